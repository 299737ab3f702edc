"""Prompt log probabilities, and hidden states for embeddings: what some prompts return besides keys and values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxpaged.execution.logprobs import unpack_row
from jaxpaged.execution.step_shape import SCORED_ROWS
from jaxpaged.scheduling.scheduler_output import PooledTokens, PromptLogprobs, ScheduledChunk


class ChunkPart(NamedTuple):
    """A part of a scored chunk, and the index of that chunk in its step."""

    chunk_index: int
    chunk: ScheduledChunk


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Log probabilities, being computed, of `count` prompt tokens after the one at `start`.

    Attributes:
        chunk: index of the chunk in its step.
        num_logprobs: number of alternatives besides each.
        array: [SCORED_ROWS, ...] of several requests; these begin at `row`.
    """

    chunk: int
    start: int
    num_logprobs: int
    count: int
    array: jax.Array
    row: int

    def result(self) -> PromptLogprobs:
        """Wait for the device."""
        rows = np.asarray(self.array)[self.row : self.row + self.count]
        return PromptLogprobs(self.chunk, self.start, [unpack_row(row, self.num_logprobs) for row in rows])


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states, being computed, of `count` prompt tokens from the one at `start` on.

    Attributes:
        chunk: index of the chunk in its step.
        array: [SCORED_ROWS, D] of several requests; these begin at `row`.
    """

    chunk: int
    start: int
    pooling: Literal["last", "mean"]
    count: int
    array: jax.Array
    row: int

    def result(self) -> PooledTokens:
        """Wait for the device."""
        rows = np.asarray(self.array)[self.row : self.row + self.count].astype(np.float64)
        pooled = rows.sum(axis=0) if self.pooling == "mean" else rows[-1]
        return PooledTokens(self.chunk, self.start, pooled.tolist())


def parts_of(index: int, chunk: ScheduledChunk, block_size: int) -> list[ChunkPart]:
    """A scored chunk in parts of at most SCORED_ROWS tokens."""
    return [ChunkPart(index, _part_of(chunk, first, min(SCORED_ROWS, chunk.num_tokens - first), block_size))
            for first in range(0, chunk.num_tokens, SCORED_ROWS)]


def wants_states(part: ChunkPart) -> bool:
    """Whether it is for an embedding."""
    return part.chunk.scoring is not None and part.chunk.scoring.pooling is not None


def _part_of(chunk: ScheduledChunk, first: int, count: int, block_size: int) -> ScheduledChunk:
    """`count` tokens of a chunk from its `first` on, and the blocks that begin with them; none of them is sampled."""
    start = chunk.start + first
    begun, end = (-(-position // block_size) + chunk.start // -block_size for position in (start, start + count))
    blocks = tuple(units[begun:end] for units in chunk.blocks) if begun < end else ()
    assert chunk.scoring is not None
    scoring = replace(chunk.scoring, targets=chunk.scoring.targets[first : first + count])
    return chunk._replace(start=start, token_ids=chunk.token_ids[first : first + count], num_tokens=count,
                          num_samples=0, blocks=blocks, scoring=scoring)


def runs_of(parts: Iterable[ChunkPart]) -> Iterator[list[ChunkPart]]:
    """Neighbors of one kind that fit into SCORED_ROWS together."""
    run: list[ChunkPart] = []
    room = SCORED_ROWS
    for part in parts:
        if run and (part.chunk.num_tokens > room or wants_states(part) != wants_states(run[0])):
            yield run
            run, room = [], SCORED_ROWS
        run.append(part)
        room -= part.chunk.num_tokens
    if run:
        yield run
