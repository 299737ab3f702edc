"""What the scheduler asks the model runner to compute, and what the runner returns.

Plain values that can be pickled: a runner in another process needs nothing else of the scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxpaged.core.messages import EngineRequest, TokenLogprobs

FAILED_TOKEN = -1  # sampled where the logits are not finite
NO_TOKEN_LEFT = -2  # sampled where no token is allowed
REJECTED_TOKEN = -3  # sampled after a proposed token that does not follow


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy these blocks to host memory as segment number `segment`."""

    segment: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy a segment to blocks: `blocks` has one for each row of the segment, the null block for rows to skip."""

    segment: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfers:
    """Blocks to move before a step writes anything, in this order.

    Attributes:
        saves: blocks to copy to host memory.
        copies: pairs of blocks, source and target.
        loads: blocks to fill from host memory.
        drops: segments of host memory that are not needed any more.
    """

    saves: tuple[SaveBlocks, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    loads: tuple[LoadBlocks, ...] = ()
    drops: tuple[int, ...] = ()


NO_TRANSFERS = Transfers()


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that has got a slot.

    Attributes:
        output_token_ids: tokens known so far beyond its prompt; a preempted request has some.
    """

    message: EngineRequest
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """What a chunk of a prompt returns besides keys and values.

    Attributes:
        pooling: pool its hidden states for an embedding; None: log probabilities of tokens.
        targets: the prompt tokens that follow the chunk's tokens, whose log probabilities are wanted.
        num_logprobs: number of alternatives besides each of those.
    """

    pooling: Literal["last", "mean"] | None = None
    targets: tuple[int, ...] = ()
    num_logprobs: int = 0


class ScheduledChunk(NamedTuple):
    """Consecutive tokens of one request in one step.

    Attributes:
        slot: the request's slot.
        start: position of the first token.
        token_ids: ids of the chunk; the last one is missing while it is still in flight.
        num_tokens: number of tokens in the chunk.
        num_samples: number of the chunk's last tokens after each of which the step samples a token. All but the first
            of these were only proposed: the runner returns REJECTED_TOKEN in each row after a proposed token that is
            not the one sampled before it.
        blocks: the units of the blocks that begin within the chunk: a row for each unit of a block, of one KV group
            after the other; empty where none begins.
        new: the request, if it is its first chunk since it got its slot.
        table: like `blocks` all units of the request's blocks if the slot's table before `start` has to be written,
            else empty.
        scoring: what it returns besides keys and values.

    A chunk without tokens samples another token from the last row of the chunk before it.
    """

    request_id: str
    slot: int
    start: int
    token_ids: Sequence[int]
    num_tokens: int
    num_samples: int
    blocks: Sequence[Sequence[int]]
    new: NewRequest | None = None
    table: Sequence[Sequence[int]] = ()
    scoring: PromptScoring | None = None


@dataclass(frozen=True, slots=True)
class FullSampling:
    """What the full variant of the sampler needs to know of a step.

    Attributes:
        num_logprobs: of each sampled row, the number of alternatives whose log probabilities are wanted, or None.
        masks: sampled rows, by index, and their allowed tokens: an array, uint32 [W], one bit per token.
    """

    num_logprobs: tuple[int | None, ...]
    masks: tuple[tuple[int, Any], ...]


class PromptLogprobs(NamedTuple):
    """Log probabilities of the prompt tokens after the one at `start`; `chunk` is an index into the step's chunks."""

    chunk: int
    start: int
    values: list[TokenLogprobs]


class PooledTokens(NamedTuple):
    """Hidden states of prompt tokens from `start` on, pooled for an embedding: their sum, or the last one.

    `chunk` is an index into the step's chunks.
    """

    chunk: int
    start: int
    values: list[float]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_tokens: of all chunks.
        num_sampled: rows that are sampled in all chunks.
        num_proposed: tokens among those of all chunks that were only proposed.
        transfers: blocks to move before it.
        full_sampling: set where a sampled row needs the full variant of the sampler.
        number: of the step, counted by the scheduler.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_tokens: int
    num_sampled: int
    num_proposed: int = 0
    transfers: Transfers = NO_TRANSFERS
    full_sampling: FullSampling | None = None
    number: int = 0

    @property
    def kind(self) -> str:
        """decode, prefill or mixed: the label in the metrics."""
        counts = {chunk.num_tokens for chunk in self.chunks}
        if max(counts) == 1:
            return "decode"
        return "mixed" if 1 in counts else "prefill"
