"""Runs scheduled steps on the device; owns the weights, the pools and the slots' state there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.kv_groups import NULL_BLOCK
from jaxpaged.core.messages import TokenLogprobs
from jaxpaged.execution.host_blocks import HostBlocks
from jaxpaged.execution.logit_processors import neutral_allowed, neutral_processors, processors_of
from jaxpaged.execution.logprobs import unpack_row
from jaxpaged.execution.params import (
    addresses,
    bytes_moved,
    check_params,
    leaf_names,
    merged,
    part_of,
    placed,
    plain_tree,
)
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.execution.prompt_scores import ChunkPart, HiddenRows, ScoredRows, parts_of, runs_of, wants_states
from jaxpaged.execution.sampler import state_of
from jaxpaged.execution.step_functions import Params
from jaxpaged.execution.step_input import pad_step
from jaxpaged.execution.step_shape import ADMIT_SIZES, COPY_BLOCKS, SCORED_ROWS, TABLE_ROWS, StepShape
from jaxpaged.models.transformer import Pools
from jaxpaged.scheduling.scheduler_output import (
    REJECTED_TOKEN,
    FullSampling,
    NewRequest,
    ScheduledChunk,
    SchedulerOutput,
    Transfers,
)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A dispatched step; `ids` [B], and log probabilities where a row or a prompt wants them, are being computed."""

    step: SchedulerOutput
    size: int
    ids: jax.Array | None
    logprobs: jax.Array | None = None
    scored: tuple[ScoredRows | HiddenRows, ...] = ()
    weights_version: int = 0

    def is_ready(self) -> bool:
        last = self.ids if self.ids is not None else self.scored[-1].array if self.scored else None
        return last is None or last.is_ready()  # type: ignore[attr-defined]

    def sampled(self) -> list[int]:
        """Ids in the order of the sampled rows, negative as `scheduler_output` says; waits for the device."""
        if self.ids is None:
            return []
        ids = np.asarray(self.ids)[: self.step.num_sampled].tolist()
        return with_rejections(self.step.chunks, ids) if self.step.num_proposed else ids

    def sampled_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log probabilities in the order of the sampled rows, None for those without."""
        if self.logprobs is None or self.step.full_sampling is None:
            return None
        return [None if count is None else unpack_row(row, count)
                for count, row in zip(self.step.full_sampling.num_logprobs, np.asarray(self.logprobs), strict=False)]


def with_rejections(chunks: Sequence[ScheduledChunk], sampled: Sequence[int]) -> list[int]:
    """The sampled ids, with REJECTED_TOKEN in the rows of each chunk after a proposed token that was not sampled."""
    ids = list(sampled)
    row = 0
    for chunk in chunks:
        proposed = chunk.token_ids[len(chunk.token_ids) - chunk.num_samples + 1 :]
        end = row + chunk.num_samples
        for token in proposed:
            row += 1
            if token != ids[row - 1]:
                ids[row:end] = [REJECTED_TOKEN] * (end - row)
                break
        row = end
    return ids


class ModelRunner:
    """Dispatches steps; never waits for one.

    Args:
        programs: the compiled set.
        params: the weights on their devices.
        make_pools: makes zeroed pools on their devices.
        stored: shapes of the weights as checkpoints have them.

    Attributes:
        weights_version: number of times that weights have been replaced.
    """

    def __init__(
        self,
        programs: ProgramSet,
        params: Params,
        make_pools: Callable[[], Pools],
        shape: StepShape,
        *,
        stored: Params | None = None,
    ) -> None:
        self._programs = programs
        self._params = params
        self._shape = shape
        self._stored = params if stored is None else stored
        slots = shape.max_num_seqs + 1
        self.weights_version = 0
        self._make_pools = make_pools
        self._pools = make_pools()
        self._host = HostBlocks(programs, programs.host_memory_kind)
        everywhere = programs.placement.sharding()
        self._block_table = jnp.zeros(programs.shapes.table.shape, jnp.int32, device=everywhere)
        self._last_id = jnp.zeros(slots, jnp.int32, device=everywhere)
        self._sampling = jax.device_put(state_of((), slots), everywhere)
        self._vocab_size = programs.num_logits
        shardings = jax.tree.map(lambda leaf: leaf.sharding, programs.shapes.processors(slots))
        self._processors = jax.device_put(neutral_processors(slots, self._vocab_size), shardings)
        self._all_allowed = {
            rows: jax.device_put(neutral_allowed(rows, self._vocab_size), everywhere)
            for rows in shape.sample_sizes()
        }

    @property
    def params(self) -> Params:
        return self._params

    @property
    def num_logits(self) -> int:
        """V of the logits."""
        return self._vocab_size

    @property
    def num_compiled(self) -> int:
        return self._programs.num_compiled

    def dispatch(self, step: SchedulerOutput) -> StepInFlight:
        """Queue a step on the device, after those already there."""
        shape = self._shape
        changed = [chunk for chunk in step.chunks if chunk.new or chunk.table]
        admitted = [(chunk.new, chunk.slot) for chunk in changed if chunk.new]
        for first in range(0, len(admitted), ADMIT_SIZES[-1]):
            self._admit(admitted[first : first + ADMIT_SIZES[-1]])
        for new, slot in admitted:
            if new.message.params.has_processors:
                self._admit_processors(new, slot)
        tables = [(chunk.slot, chunk.table) for chunk in changed if chunk.table]
        for first in range(0, len(tables), TABLE_ROWS):
            self._write_tables(tables[first : first + TABLE_ROWS])
        self._move_blocks(step.transfers)
        whole, scored = step, list[ScoredRows | HiddenRows]()
        if any([chunk.scoring for chunk in step.chunks]):
            step, scored = self._score(step)
        if not step.chunks:
            return StepInFlight(whole, whole.num_tokens, None, None, tuple(scored), self.weights_version)
        size = shape.size_for(step.num_tokens, step.num_sampled)
        buffer = pad_step(step, size=size, num_samples=shape.samples_of(size), null_slot=shape.max_num_seqs,
                          block_size=shape.block_size, units=self._programs.shapes.units)
        logits, self._pools, self._block_table, slot, position = self._programs.get(("forward", size))(
            self._params, self._pools, self._block_table, self._last_id, buffer
        )
        ids, logprobs = None, None
        if step.full_sampling is not None:
            samples = shape.samples_of(size)
            ids, self._processors, self._last_id, logprobs = self._programs.get(("sample_full", samples))(
                self._sampling, self._processors, self._last_id, logits, slot, position,
                self._allowed(step.full_sampling, samples)
            )
        elif step.num_sampled:
            ids, self._last_id = self._programs.get(("sample", shape.samples_of(size)))(
                self._sampling, self._last_id, logits, slot, position
            )
        return StepInFlight(whole, max(size, whole.num_tokens), ids, logprobs, tuple(scored), self.weights_version)

    def replace_params(self, params: Mapping[Any, Any], *, partial: bool = False, donate: bool = False) -> int:
        """Use other weights from the next step on.

        Args:
            partial: weights that are missing stay.
            donate: the given arrays are not needed any more.

        Returns:
            Bytes that had to be moved.

        Raises:
            ConfigError: the tree, a shape or a dtype differs from the loaded weights'.
        """
        programs, params = self._programs, plain_tree(params)
        stored, held, axes = self._stored, programs.params, programs.axes
        if partial:
            stored, held, axes = part_of(stored, params), part_of(held, params), part_of(axes, params)
        check_params(params, stored, held, what="the new weights", hint=programs.quant_hint)
        given = addresses(params)
        new = placed(params, held, axes, programs.placement, donate=donate)
        self._params = merged(self._params, new) if partial else new
        self.weights_version += 1
        return bytes_moved(given, new)

    def free_pools(self) -> None:
        """Give the memory of the pools back; nothing may be dispatched until `make_pools`."""
        jax.tree.map(lambda leaf: leaf.delete(), self._pools)

    def make_pools(self) -> None:
        """Make the pools again, zeroed."""
        self._pools = self._make_pools()

    def deleted_weight(self) -> str | None:
        """The name of a weight whose memory is gone, as after it was donated elsewhere; None if all are there."""
        if not any([leaf.is_deleted() for leaf in jax.tree.leaves(self._params)]):
            return None
        return next(name for name, leaf in leaf_names(self._params) if leaf.is_deleted())

    def _allowed(self, wanted: FullSampling, rows: int) -> jax.Array | np.ndarray:
        """Allowed tokens of each sampled row: all, on the device already, unless a row has a mask."""
        if not wanted.masks:
            return self._all_allowed[rows]
        allowed = neutral_allowed(rows, self._vocab_size)
        for row, mask in wanted.masks:
            allowed[row] = mask
        return allowed

    def _score(self, step: SchedulerOutput) -> tuple[SchedulerOutput, list[ScoredRows | HiddenRows]]:
        """Compute the chunks whose log probabilities or hidden states are wanted; what is left for the step itself.

        Of a chunk that samples those tokens are left: their keys and values are written a second time.
        """
        left: list[ScheduledChunk] = []
        parts: list[ChunkPart] = []
        for index, chunk in enumerate(step.chunks):
            if chunk.scoring is None:
                left.append(chunk)
                continue
            # A state must see each token once: there the last ones of a chunk that samples are not scored.
            twice = chunk.num_samples if self._programs.shapes.has_states else 0
            parts += parts_of(index, chunk._replace(num_tokens=chunk.num_tokens - twice), self._shape.block_size)
            if chunk.num_samples:
                first = chunk.num_tokens - chunk.num_samples
                left.append(chunk._replace(start=chunk.start + first, token_ids=chunk.token_ids[first:],
                                           num_tokens=chunk.num_samples, blocks=()))
        scored = [rows for together in runs_of(parts) for rows in self._score_rows(together)]
        return replace(step, chunks=tuple(left), num_tokens=sum(chunk.num_tokens for chunk in left)), scored

    def _score_rows(self, parts: Sequence[ChunkPart]) -> Iterator[ScoredRows | HiddenRows]:
        """Parts of several requests, SCORED_ROWS tokens at most, in one program."""
        chunks = [part.chunk for part in parts]
        offsets = list(accumulate((chunk.num_tokens for chunk in chunks), initial=0))
        rows = pad_step(SchedulerOutput(tuple(chunks), offsets[-1], 0), size=SCORED_ROWS, num_samples=0,
                        null_slot=self._shape.max_num_seqs, block_size=self._shape.block_size,
                        units=self._programs.shapes.units)
        wanted = [(index, chunk, chunk.scoring) for index, chunk in parts if chunk.scoring is not None]
        if wants_states(parts[0]):
            self._pools, self._block_table, states = self._programs.get(("hidden", SCORED_ROWS))(
                self._params, self._pools, self._block_table, rows)
            for offset, (index, chunk, scoring) in zip(offsets, wanted, strict=False):
                if scoring.pooling is not None:
                    yield HiddenRows(index, chunk.start, scoring.pooling, chunk.num_tokens, states, offset)
            return
        targets = np.zeros(SCORED_ROWS, np.int32)
        for offset, (_, _, scoring) in zip(offsets, wanted, strict=False):
            targets[offset : offset + len(scoring.targets)] = scoring.targets
        self._pools, self._block_table, logprobs = self._programs.get(("prompt_logprobs", SCORED_ROWS))(
            self._params, self._pools, self._block_table, np.concatenate([rows, targets])
        )
        for offset, (index, chunk, scoring) in zip(offsets, wanted, strict=False):
            yield ScoredRows(index, chunk.start, scoring.num_logprobs, len(scoring.targets), logprobs, offset)

    def _admit_processors(self, new: NewRequest, slot: int) -> None:
        row = processors_of(new.message, new.message.prompt_token_ids, new.output_token_ids, self._vocab_size)
        self._processors = self._programs.get(("admit_full", 1))(self._processors, row, np.array([slot], np.int32))

    def _admit(self, requests: Sequence[tuple[NewRequest, int]]) -> None:
        size = next(size for size in ADMIT_SIZES if size >= len(requests))
        rows = state_of([new.message for new, _ in requests], size)
        slots = np.full(size, self._shape.max_num_seqs, np.int32)
        slots[: len(requests)] = [slot for _, slot in requests]
        self._sampling = self._programs.get(("admit", size))(self._sampling, rows, slots)

    def _move_blocks(self, transfers: Transfers) -> None:
        self._host.save(self._pools, transfers.saves)
        for first in range(0, len(transfers.copies), COPY_BLOCKS):
            self._copy_blocks(transfers.copies[first : first + COPY_BLOCKS])
        self._pools = self._host.load(self._pools, transfers.loads)
        self._host.drop(transfers.drops)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        pairs = np.full((2, COPY_BLOCKS), NULL_BLOCK, np.int32)
        pairs[:, : len(copies)] = np.array(copies, np.int32).T
        self._pools = self._programs.get(("copy", COPY_BLOCKS))(self._pools, pairs[0], pairs[1])

    def _write_tables(self, tables: Sequence[tuple[int, Sequence[Sequence[int]]]]) -> None:
        rows = np.zeros(self._programs.shapes.table_rows(TABLE_ROWS).shape, np.int32)
        slots = np.full(TABLE_ROWS, self._shape.max_num_seqs, np.int32)  # the null slot's row stays zero
        for row, (slot, units) in enumerate(tables):
            slots[row] = slot
            columns, state = units[: self._programs.shapes.units], units[self._programs.shapes.units :]
            rows[: len(columns), row, : len(columns[0])] = columns
            for first in range(0, len(state[0]) if state else 0, self._shape.table_width):
                part = state[0][first : first + self._shape.table_width]
                rows[len(columns) + first // self._shape.table_width, row, : len(part)] = part
        self._block_table = self._programs.get(("table", TABLE_ROWS))(self._block_table, rows, slots)
