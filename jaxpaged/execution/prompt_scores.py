"""Prompt log probabilities, and hidden states for embeddings: what some prompts return besides keys and values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from jaxpaged.execution.logprobs import unpack_row
from jaxpaged.execution.step_shape import SCORED_ROWS
from jaxpaged.scheduling.request import Request
from jaxpaged.scheduling.scheduler_output import PooledTokens, PromptLogprobs, ScheduledChunk


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Log probabilities, being computed, of `count` prompt tokens after the one at `start`.

    Attributes:
        array: [SCORED_ROWS, ...] of several requests; these begin at `row`.
    """

    request: Request
    start: int
    count: int
    array: jax.Array
    row: int

    def result(self) -> PromptLogprobs:
        """Wait for the device."""
        rows = np.asarray(self.array)[self.row : self.row + self.count]
        wanted = self.request.message.params.prompt_logprobs or 0
        return PromptLogprobs(self.request, self.start, [unpack_row(row, wanted) for row in rows])


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states, being computed, of `count` prompt tokens from the one at `start` on.

    Attributes:
        array: [SCORED_ROWS, D] of several requests; these begin at `row`.
    """

    request: Request
    start: int
    count: int
    array: jax.Array
    row: int

    def result(self) -> PooledTokens:
        """Wait for the device."""
        rows = np.asarray(self.array)[self.row : self.row + self.count].astype(np.float64)
        pooled = rows.sum(axis=0) if self.request.message.pooling == "mean" else rows[-1]
        return PooledTokens(self.request, self.start, pooled.tolist())


def is_scored(chunk: ScheduledChunk) -> bool:
    """Whether log probabilities of the chunk's tokens are wanted, or an embedding, and have not been given."""
    request = chunk.request
    if not request.scored:
        return False
    return wants_states(chunk) or (
        chunk.start < request.num_prompt_tokens - 1 and len(request.token_ids) == request.num_prompt_tokens)


def wants_states(chunk: ScheduledChunk) -> bool:
    """Whether it is for an embedding."""
    return chunk.request.message.pooling is not None


def part_of(chunk: ScheduledChunk, first: int, count: int, block_size: int) -> ScheduledChunk:
    """`count` tokens of a chunk from its `first` on, and the blocks that begin with them; none of them is sampled."""
    start = chunk.start + first
    begun, end = (-(-position // block_size) + chunk.start // -block_size for position in (start, start + count))
    blocks = tuple(units[begun:end] for units in chunk.blocks) if begun < end else ()
    return chunk._replace(start=start, token_ids=chunk.token_ids[first : first + count], num_tokens=count,
                          samples=False, blocks=blocks)


def runs_of(parts: Iterable[ScheduledChunk]) -> Iterator[list[ScheduledChunk]]:
    """Neighbors of one kind that fit into SCORED_ROWS together."""
    run: list[ScheduledChunk] = []
    room = SCORED_ROWS
    for part in parts:
        if run and (part.num_tokens > room or wants_states(part) != wants_states(run[0])):
            yield run
            run, room = [], SCORED_ROWS
        run.append(part)
        room -= part.num_tokens
    if run:
        yield run
