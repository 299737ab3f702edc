"""What the scheduler asks the model runner to compute, and what the runner returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpaged.core.messages import TokenLogprobs
from jaxpaged.scheduling.kv_manager import NO_TRANSFERS, Transfers
from jaxpaged.scheduling.request import Request

FAILED_TOKEN = -1  # sampled where the logits are not finite
NO_TOKEN_LEFT = -2  # sampled where no token is allowed


class ScheduledChunk(NamedTuple):
    """Consecutive tokens of one request in one step.

    Attributes:
        slot: the request's slot; a copy, since a finished request loses its slot while the step runs.
        start: position of the first token.
        token_ids: ids of the chunk; the last one is missing while it is still in flight.
        num_tokens: number of tokens in the chunk.
        samples: whether the step samples the token after the chunk's last.
        blocks: the units of the blocks that begin within the chunk: a row for each unit of a block, of one KV group
            after the other; empty where none begins.
        admit: it is the first chunk since the request got its slot.
        table: likewise all units of the request's blocks if the slot's table before `start` has to be written, else
            empty.

    A chunk without tokens samples another token from the last row of the chunk before it.
    """

    request: Request
    slot: int
    start: int
    token_ids: Sequence[int]
    num_tokens: int
    samples: bool
    blocks: Sequence[Sequence[int]]
    admit: bool
    table: Sequence[Sequence[int]] = ()


class PromptLogprobs(NamedTuple):
    """Log probabilities of the prompt tokens after the one at `start`."""

    request: Request
    start: int
    values: list[TokenLogprobs]


class PooledTokens(NamedTuple):
    """Hidden states of prompt tokens from `start` on, pooled for an embedding: their sum, or the last one."""

    request: Request
    start: int
    values: list[float]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: its chunks, their number of tokens, and the blocks to move before it."""

    chunks: tuple[ScheduledChunk, ...]
    num_tokens: int
    transfers: Transfers = NO_TRANSFERS

    @property
    def num_sampled(self) -> int:
        return sum([chunk.samples for chunk in self.chunks])

    @property
    def kind(self) -> str:
        """decode, prefill or mixed: the label in the metrics."""
        counts = {chunk.num_tokens for chunk in self.chunks}
        if max(counts) == 1:
            return "decode"
        return "mixed" if 1 in counts else "prefill"
