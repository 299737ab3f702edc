"""How much of each running request a step computes, and who gives its blocks back for that."""

from collections.abc import Sequence

from jaxpaged.scheduling.kv_manager import KVManager
from jaxpaged.scheduling.queues import Queues
from jaxpaged.scheduling.request import Request, RequestStatus
from jaxpaged.scheduling.scheduler_output import ScheduledPiece
from jaxpaged.scheduling.step_plan import STEP_OVERHEAD_TOKENS, StepPlan

# A prompt of more tokens than this, and than a budget, takes no more of a step than the requests beside it, so that the
# gaps in their streams stay small; but at least an eighth of the budget, and more of a small one.
LONG_PROMPT_TOKENS = 2048
LONG_PROMPT_PIECE = 128
# Waiting requests that one step looks at.
LOOK_AHEAD = 64


class StepPlanner:
    """Spends a step's token budget on the running requests.

    Args:
        queues: who runs; preempted requests go back among the waiting.
        kv: their blocks.
        budget: most tokens of a step.
        step_sizes: ascending numbers of tokens that a step can have after padding.
        swap: host memory keeps what a preempted request has computed, until it runs again.

    Attributes:
        plan: the step being planned.
        num_preemptions: since the start.
    """

    def __init__(self, queues: Queues, kv: KVManager, *, budget: int, step_sizes: Sequence[int], swap: bool) -> None:
        self.plan = StepPlan(0)
        self.num_preemptions = 0
        self._queues = queues
        self._kv = kv
        self._allocator = kv.allocator
        self._block_size = kv.block_size
        self._budget = budget
        self._step_sizes = tuple(step_sizes)
        self._swap = swap

    def begin(self) -> None:
        """Begin a step."""
        self.plan = StepPlan(self._budget)

    def commit(self) -> list[ScheduledPiece]:
        """Fit the plan to a step size; it is final then, and its tokens count as computed."""
        self.plan.fit(self._step_sizes)
        pieces = []
        block_size = self._block_size
        for request, count in self.plan.counts.items():
            start, known, table = request.num_computed, request.token_ids, request.block_table
            end = start + count
            request.num_computed = end
            samples = end == len(known) + request.num_pending
            request.num_pending += samples
            if end // block_size > request.num_keyed:
                self._kv.note_computed(request)
            admit, rewrite = request.new_in_slot, request.new_table
            if admit or rewrite:
                request.new_in_slot = request.new_table = False
            # By position: hundreds are made per step, and keywords would cost more than the rest of this loop.
            pieces.append(ScheduledPiece(
                request, request.slot, start, known[start:end] if start < len(known) else (), count, samples,
                table[-(-start // block_size) : -(-end // block_size)] if count > 1 or not start % block_size else (),
                admit, tuple(table) if rewrite else ()))
        return pieces

    def plan_decodes(self) -> list[Request]:
        """Plan the running requests that lack one token; return the others that lack some, in their order.

        The first of those keeps a token of the budget: requests after it cannot use all of it up.
        """
        plan, block_size, running = self.plan, self._block_size, RequestStatus.RUNNING
        prefills: list[Request] = []
        for request in self._queues.running.all():
            if plan.left <= bool(prefills):
                break
            if request.status is not running:
                break  # preempted by one before it, as are those after it
            count = request.num_to_compute
            if not count:
                continue
            if count > 1:
                prefills.append(request)
            elif ((request.num_computed < len(request.block_table) * block_size and not request.shares_tail)
                  or self._take_blocks(request, 1)):
                plan.counts[request] = 1
                plan.left -= 1
        return prefills

    def plan_prefills(self, prefills: list[Request]) -> None:
        """Plan pieces of the prompts under way: the first one's, then the others', those that lack least first."""
        if prefills:
            first, *others = prefills
            others.sort(key=lambda request: request.num_to_compute)
            self.plan_piece(first, others)
            for request in others:
                self.plan_piece(request)

    def plan_rest(self, prefills: list[Request]) -> None:
        """Spend what is left of the budget on the planned prompts in their order, as far as free blocks allow."""
        for request in prefills:
            planned = self.plan.counts.get(request, 0)
            count = min(request.num_to_compute, planned + self.plan.left)
            if not 0 < planned < count or self._gives_way(request):
                continue
            if self._allocator.can_allocate(self._kv.num_missing(request, count)):
                self._take_blocks(request, count)
                self.plan.add(request, count - planned)

    def plan_piece(self, request: Request, others: Sequence[Request] = ()) -> None:
        """Plan a piece of a prompt; `others` lack tokens as well, the first of them least."""
        count, left = request.num_to_compute, self.plan.left
        if self._gives_way(request):
            least = max(self._budget // 8, min(self._budget // 4, LONG_PROMPT_PIECE))
            left = min(left, max(least, self._budget - left + STEP_OVERHEAD_TOKENS))
        if count > left:
            shorter = (others and others[0].num_to_compute < count) or any(
                waiting.num_tokens < count for waiting in self._queues.waiting.first(LOOK_AHEAD))
            count = min(left, max(1, left // 2)) if shorter else left
        if count and request.status is RequestStatus.RUNNING and self._take_blocks(request, count):
            self._kv.plan(request, count)
            self.plan.add(request, count)

    def _gives_way(self, request: Request) -> bool:
        """Whether a prompt is so long that the requests beside it would feel every step full of it."""
        lacked = request.num_tokens - request.num_cached
        return lacked > max(LONG_PROMPT_TOKENS, self._budget) and len(self._queues.running) > 1

    def _take_blocks(self, request: Request, count: int) -> bool:
        """Take the blocks for `count` more tokens, preempting the last; False where the request had to go itself."""
        while not self._allocator.can_allocate(missing := self._kv.num_missing(request, count)):
            victim = self._queues.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        if missing or request.shares_tail:
            self._kv.take(request, missing)
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and slot back; it goes on later."""
        self.plan.drop(request)
        self._kv.unplan(request)
        self.stop(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if not request.stands:
            self._queues.waiting.add(request)

    def stop(self, request: Request) -> None:
        """Take the blocks and the slot of a running request that has no piece in the step; it is in no queue then."""
        self._kv.release(request)
        self._queues.stop(request)
        if self._swap:
            self._kv.hold(request)
        request.status = RequestStatus.PREEMPTED
