"""Which request is served first, which is preempted when blocks or slots run out, and how much room stays free.

A policy decides four things and has no requests of its own: `queue_key` orders the waiting queue, `running_key` the
running requests (the first gets tokens and blocks first, the last is the victim), `preempts` says whether a waiting
request may preempt the last running one, and `growth_blocks` is the number of blocks that stay free for a running
request when another is admitted. It may learn from `finished`. The scheduler decides everything else, whatever the
policy: what fits, what is shared, that the first running request always continues, and that a request which does not
fit is passed by a bounded number of others.

Ageing is linear in the time of arrival, so that the order of two requests never changes: a request is overtaken only by
those that arrive within a bounded time after it, and none starves.
"""

from collections.abc import Callable
from typing import Protocol

from jaxpaged.scheduling.predictor import LengthPredictor
from jaxpaged.scheduling.request import Request

Key = tuple[float, ...]  # the smaller comes first; ends with `request.order`, so that no two are equal


class Policy(Protocol):
    """What the scheduler asks. A key is computed once per change of a request's state, never per step."""

    def queue_key(self, request: Request) -> Key:
        """Position among the waiting requests, computed when the request begins to wait, after a preemption too."""

    def running_key(self, request: Request) -> Key:
        """Position among the running requests, computed when the request is admitted.

        Of two requests of equal priority the newer must have the larger key: it never preempts the older.
        """

    def preempts(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting`, for which there is no slot or block, may preempt `running`, the last running request."""

    def growth_blocks(self, request: Request, block_size: int) -> int:
        """Blocks that stay free for further tokens of this running request when others are admitted."""

    def finished(self, request: Request) -> None:
        """Learn from a request that has stopped or reached its length: not aborted, not failed."""


class FcfsPolicy:
    """First come, first served; the newest is preempted first. One block each stays free for growth."""

    def queue_key(self, request: Request) -> Key:
        return (request.order,)

    def running_key(self, request: Request) -> Key:
        return (request.order,)

    def preempts(self, waiting: Request, running: Request) -> bool:
        return False

    def growth_blocks(self, request: Request, block_size: int) -> int:
        return 1

    def finished(self, request: Request) -> None:
        pass


PRIORITY_AGEING_SECONDS = 60.0  # waiting that outweighs one level of priority


class PriorityPolicy(FcfsPolicy):
    """By priority (the smaller number first, as in vLLM), then by arrival; preempts requests of lower priority.

    A minute of waiting outweighs one level. An aged request is served before requests of higher priority that arrived
    later, and they do not preempt it, but it preempts no other.
    """

    def queue_key(self, request: Request) -> Key:
        return (_aged_priority(request), request.order)

    def running_key(self, request: Request) -> Key:
        return (_aged_priority(request), request.order)

    def preempts(self, waiting: Request, running: Request) -> bool:
        return (waiting.message.priority < running.message.priority
                and _aged_priority(waiting) < _aged_priority(running))


def _aged_priority(request: Request) -> float:
    return request.message.priority + request.message.arrival_time / PRIORITY_AGEING_SECONDS


class PredictedPolicy(FcfsPolicy):
    """Shortest predicted remaining work first; blocks stay free for the predicted growth of the running requests.

    Work is counted in steps: one for each token to generate, and a share of one for each token to prefill. Lengths
    are predicted from the requests that have finished recently (`LengthPredictor`).

    Args:
        ageing_rate: tokens of predicted work that a second of waiting outweighs.
        quantile: of the predicted length, for the blocks that stay free; 0 to 1.
        horizon: maximum growth in tokens that blocks stay free for; by then other requests have freed theirs.
    """

    def __init__(self, *, ageing_rate: float = 10.0, quantile: float = 0.5, horizon: int = 32) -> None:
        self._predictor = LengthPredictor()
        self._ageing_rate = ageing_rate
        self._quantile = quantile
        self._horizon = horizon

    def queue_key(self, request: Request) -> Key:
        prefill = (request.num_tokens - request.num_computed_tokens) * _PREFILL_TOKEN_STEPS
        left = self._predictor.remaining(request.message, request.num_output_tokens)
        return (prefill + left + request.message.arrival_time * self._ageing_rate, request.order)

    def growth_blocks(self, request: Request, block_size: int) -> int:
        if request.num_tokens >= request.predicted_length:  # not predicted yet, or longer than predicted
            left = self._predictor.remaining(request.message, request.num_output_tokens, self._quantile)
            request.predicted_length = request.num_tokens + left
        tokens = request.num_tokens + min(request.predicted_length - request.num_tokens, self._horizon)
        return max(0, -(-tokens // block_size) - max(request.num_blocks, -(-request.num_tokens // block_size)))

    def finished(self, request: Request) -> None:
        self._predictor.observe(request.message, len(request.token_ids) - request.num_prompt_tokens)


_PREFILL_TOKEN_STEPS = 1 / 32

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FcfsPolicy, "priority": PriorityPolicy, "predicted": PredictedPolicy}
