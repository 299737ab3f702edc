"""What the scheduler hands to those who run a step, and what they hand back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpaged.core.messages import TokenLogprobs
from jaxpaged.scheduling.kv_manager import NO_TRANSFERS, Transfers
from jaxpaged.scheduling.request import Request

FAILED_TOKEN = -1  # what the sampler returns for a row whose logits are not finite
NO_TOKEN_LEFT = -2  # and for one where everything is forbidden


class ScheduledChunk(NamedTuple):
    """Consecutive tokens of one request in one step.

    Attributes:
        slot: the request's slot; kept here because a finished request loses it while the step runs.
        start: position of the first token.
        token_ids: ids of the chunk; one that is still in flight is missing at the end.
        num_tokens: length of the chunk.
        samples: whether the step samples the token after the chunk's last.
        blocks: the block of each position in the chunk that begins a block, in order.
        admit: the chunk is the first since the request got its slot.
        table: all blocks of the request where the slot's columns before `start` have to be written, else empty.

    A chunk without tokens samples once more after the row that the chunk before it samples after.
    """

    request: Request
    slot: int
    start: int
    token_ids: Sequence[int]
    num_tokens: int
    samples: bool
    blocks: Sequence[int]
    admit: bool
    table: Sequence[int] = ()


class PromptLogprobs(NamedTuple):
    """Log probabilities of the prompt tokens behind the one at `start`."""

    request: Request
    start: int
    values: list[TokenLogprobs]


class PooledTokens(NamedTuple):
    """What an embedding gains from prompt tokens from the one at `start` on: their sum, or the last of them."""

    request: Request
    start: int
    values: list[float]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: its chunks, how many tokens they hold, and which blocks have to be moved before it."""

    chunks: tuple[ScheduledChunk, ...]
    num_tokens: int
    transfers: Transfers = NO_TRANSFERS

    @property
    def num_sampled(self) -> int:
        return sum([chunk.samples for chunk in self.chunks])

    @property
    def kind(self) -> str:
        """decode, prefill or mixed, as the metrics call it."""
        counts = {chunk.num_tokens for chunk in self.chunks}
        if max(counts) == 1:
            return "decode"
        return "mixed" if 1 in counts else "prefill"
