"""The step that is being planned: how many tokens of which request, until its padded size is known."""

from collections.abc import Sequence

from jaxpaged.scheduling.request import Request

# A step's time grows as its tokens plus about this many, on CPU as on GPU: the weights are read whatever the batch.
STEP_OVERHEAD_TOKENS = 64


class StepPlan:
    """Token counts of a step's pieces.

    Args:
        budget: most tokens in the step.

    Attributes:
        left: tokens of the budget that nobody has yet.
        counts: tokens of each request's piece, in the order of the rows.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.left = budget
        self.counts: dict[Request, int] = {}
        self._fixed: set[Request] = set()

    @property
    def num_tokens(self) -> int:
        return self._budget - self.left

    def add(self, request: Request, count: int) -> None:
        """Plan `count` more tokens of a request."""
        self.counts[request] = self.counts.get(request, 0) + count
        self.left -= count

    def drop(self, request: Request) -> None:
        """Take a request's piece out again, if it has one."""
        self.left += self.counts.pop(request, 0)

    def fix(self, request: Request) -> None:
        """Another piece of this step reads what this request's piece writes: it stays, and stays as long as it is."""
        self._fixed.add(request)

    def is_fixed(self, request: Request) -> bool:
        return request in self._fixed

    def fit(self, step_sizes: Sequence[int]) -> None:
        """Cut prefill pieces down to the next smaller step size where the padding would cost more than they bring.

        A token of each stays: cut away whole, a short prompt would wait for as long as the others fill that size.
        """
        total = sum(self.counts.values())
        below = max((size for size in step_sizes if size <= total), default=0)
        above = min((size for size in step_sizes if size >= total), default=total)
        if not below or (below + STEP_OVERHEAD_TOKENS) * total >= (above + STEP_OVERHEAD_TOKENS) * below:
            return
        cuttable = {request: count - 1 for request, count in self.counts.items()
                    if count > 1 and request not in self._fixed}
        excess = total - below
        if sum(cuttable.values()) < excess:
            return
        for request in reversed(cuttable):
            cut = min(excess, cuttable[request])
            self.counts[request] -= cut
            self.left += cut
            excess -= cut
