"""Who is served first, who has to go when blocks or slots run out, and how much room stays free for growth.

A policy decides four things and owns nothing: `queue_key` orders the waiting queue, `running_key` the running requests
(the first gets tokens and blocks first, the last is the victim), `preempts` says whether a waiting request takes the
place of the last running one, and `growth_blocks` how many blocks stay free for a running request before another is let
in. It may learn from `finished`. Everything else (what fits, what is shared, that the first running request always goes
on, that a request which does not fit is passed by a bounded number of others) is the scheduler's, whatever the policy.
"""

from typing import Protocol

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
