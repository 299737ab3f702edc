"""Who is served first, who has to go when blocks or slots run out, and how much room stays free for growth.

A policy decides four things and owns nothing: `queue_key` orders the waiting queue, `running_key` the running requests
(the first gets tokens and blocks first, the last is the victim), `preempts` says whether a waiting request takes the
place of the last running one, and `growth_blocks` how many blocks stay free for a running request before another is let
in. It may learn from `finished`. Everything else (what fits, what is shared, that the first running request always goes
on, that a request which does not fit is passed by a bounded number of others) is the scheduler's, whatever the policy.

Ageing is linear in the time of arrival, so that the order of two requests never changes: each is overtaken only by
those that come within a bounded time after it, and nothing starves.
"""

from collections.abc import Callable
from typing import Protocol

from jaxpaged.scheduling.predictor import LengthPredictor
from jaxpaged.scheduling.request import Request

Key = tuple[float, ...]  # the smaller comes first; ends with `request.order`, so that no two are equal


class Policy(Protocol):
    """What the scheduler asks. Keys are asked once and kept: at most one call per change of state, none per step."""

    def queue_key(self, request: Request) -> Key:
        """Place among the waiting; asked whenever the request begins to wait, after a preemption too."""

    def running_key(self, request: Request) -> Key:
        """Place among the running; asked when the request is let in.

        Of two requests of equal priority the younger must have the larger key: the oldest is never its victim.
        """

    def preempts(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting`, for which there is no slot or block, takes them from `running`, the victim in line."""

    def growth_blocks(self, request: Request, block_size: int) -> int:
        """Blocks that stay free for this running request's further tokens when others are let in."""

    def finished(self, request: Request) -> None:
        """A request has ended by itself: not aborted, not failed."""


class FcfsPolicy:
    """First come, first served; the youngest goes first. One block each stays free for growth."""

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
    """The more important first (the smaller number, as in vLLM), then by arrival; it takes a less important's place.

    A minute of waiting outweighs one level. An aged request is served before more important ones that came later, and
    is safe from them once it runs, but takes nobody's place.
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
    """Shortest predicted remaining work first, and as many blocks kept free as the running will soon grow by.

    Work is counted in steps: one for each token to come, and a share of one for each token to process before. Lengths
    are predicted from the requests that have finished lately (`LengthPredictor`).

    Args:
        ageing_rate: tokens of predicted work that a second of waiting outweighs.
        quantile: of the predicted length, for the blocks to keep free; 0 to 1.
        horizon: tokens of growth to keep blocks free for; those that run on longer will find the blocks of others.
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
        if request.num_tokens >= request.predicted_length:  # not asked yet, or it goes on for longer than was thought
            left = self._predictor.remaining(request.message, request.num_output_tokens, self._quantile)
            request.predicted_length = request.num_tokens + left
        tokens = request.num_tokens + min(request.predicted_length - request.num_tokens, self._horizon)
        return max(0, -(-tokens // block_size) - max(len(request.block_table), -(-request.num_tokens // block_size)))

    def finished(self, request: Request) -> None:
        self._predictor.observe(request.message, len(request.token_ids) - request.num_prompt_tokens)


_PREFILL_TOKEN_STEPS = 1 / 32

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FcfsPolicy, "priority": PriorityPolicy, "predicted": PredictedPolicy}
