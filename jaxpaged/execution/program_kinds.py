"""The table of compiled programs: what each kind computes, from which arguments, in which sizes.

`forward[T]` computes a step of T token rows, `sample[B]` draws after B of them, `sample_full[B]` does so in steps where
a row wants more than a draw. `prompt_logprobs[64]` and `hidden[64]` compute rows of prompts whose log probabilities or
hidden states are wanted. `admit[n]` writes n slots and `admit_full[1]` what only the full sampler reads, `table[n]` the
block-table rows of n slots whose first blocks are there already. `copy[n]` copies n blocks in all layers; with host
memory for blocks, `gather[n]` and `scatter[n]` take them out of the pools and put them back.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpaged.execution import step_functions
from jaxpaged.execution.kv_cache import KVCacheSpec, copy_blocks, gather_blocks, scatter_blocks
from jaxpaged.execution.logit_processors import ProcessorState, neutral_processors
from jaxpaged.execution.sampler import SamplingState, state_of
from jaxpaged.execution.sharding import LOGITS, REPLICATED, Placement, pool_spec, spec_tree
from jaxpaged.execution.step_functions import Params, StepFunctions
from jaxpaged.execution.step_shape import ADMIT_SIZES, COPY_BLOCKS, SCORED_ROWS, TABLE_ROWS, StepShape
from jaxpaged.models.transformer import Pools


class ArgumentShapes:
    """Shapes, dtypes and shardings of everything that the programs take.

    Args:
        params: shapes of the weights.
        axes: of each weight, in a tree like `params`.
        num_logits: V, padding for the mesh included.
        units: U, units of a block in every KV group.
        state_units: units of a sequence's state. They lie in further rows of the block tables, one after the other.

    Attributes:
        params, pools: with their shardings.
        axes: of the weights.
        slots: their number, the null slot included.
        table: the block table; last_id: the last token id of each slot.
    """

    def __init__(
        self, params: Params, axes: Params, cache: KVCacheSpec, shape: StepShape, placement: Placement, num_logits: int,
        units: int, state_units: int = 0,
    ) -> None:
        self._placement = placement
        self._cache = cache
        self._num_logits = num_logits
        self.units = units
        self.has_states = state_units > 0
        self._table_rows = units + -(-state_units // shape.table_width)
        self.shape = shape
        self.slots = shape.max_num_seqs + 1
        self.axes = axes
        self.params = jax.tree.map(self._like, params, spec_tree(axes))
        self.pools = self.blocks(shape.num_blocks)
        self.table = self.table_rows(self.slots)
        self.last_id = self.int32(self.slots)

    def int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def table_rows(self, rows: int) -> jax.ShapeDtypeStruct:
        return self.int32(self._table_rows, rows, self.shape.table_width)

    def packed_step(self, rows: int, samples: int = 0) -> jax.ShapeDtypeStruct:
        """See `pad_step`."""
        return self.int32((3 + self.units) * rows + 2 * samples)

    def blocks(self, count: int) -> Pools:
        """Pools of `count` blocks."""
        pools: Pools = jax.tree.map(lambda leaf: self._like(leaf, pool_spec(leaf)), self._cache.shapes(count))
        return pools

    def logits(self, rows: int) -> jax.ShapeDtypeStruct:
        return self._array((rows, self._num_logits), jnp.float32, LOGITS)

    def sampling(self, rows: int) -> SamplingState:
        state: SamplingState = jax.tree.map(self._like, jax.eval_shape(lambda: state_of((), rows)))
        return state

    def processors(self, rows: int) -> ProcessorState:
        """Devices share the counts as they share the logits."""
        shapes: ProcessorState = jax.eval_shape(lambda: neutral_processors(rows, self._num_logits))
        return replace(jax.tree.map(self._like, shapes), counts=self._like(shapes.counts, LOGITS))

    def _array(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = REPLICATED) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._placement.sharding(spec))

    def _like(self, leaf: Any, spec: PartitionSpec = REPLICATED) -> jax.ShapeDtypeStruct:
        return self._array(leaf.shape, leaf.dtype, spec)


def specs_of(arguments: Any) -> Any:
    """Where the mesh cuts each array of a tree of `ArgumentShapes`."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)


@dataclass(frozen=True, slots=True)
class ProgramKind:
    """A kind of program, compiled once for each of its sizes.

    Attributes:
        sizes: the sizes that an engine of this shape needs, the slowest to compile first.
        function: what is compiled for a size.
        arguments: shapes of what it takes for a size.
        results: where the mesh cuts its results; None if XLA shares the work out to the devices by itself.
        donated: numbers of the arguments whose memory the results reuse.
    """

    name: str
    sizes: Callable[[StepShape], Iterable[int]]
    function: Callable[[StepFunctions, int], Callable[..., Any]]
    arguments: Callable[[ArgumentShapes, int], tuple[Any, ...]]
    results: Callable[[ArgumentShapes], Any] | None = None
    donated: tuple[int, ...] = ()

    def lower(self, functions: StepFunctions, shapes: ArgumentShapes, size: int) -> jax.stages.Lowered:
        """The program of one size, traced and lowered for the devices of `shapes`."""
        function, arguments = self.function(functions, size), self.arguments(shapes, size)
        if self.results is not None and functions.placement.mesh is not None:
            function = functions.placement.spread(function, specs_of(arguments), self.results(shapes))
        return jax.jit(function, donate_argnums=self.donated).lower(*arguments)


def _prompt_results(at: ArgumentShapes) -> Any:
    return specs_of(at.pools), REPLICATED, REPLICATED


# The slowest to compile come first.
KINDS = {kind.name: kind for kind in (
    ProgramKind(
        "forward", lambda shape: shape.sizes[::-1], StepFunctions.forward,
        lambda at, size: (at.params, at.pools, at.table, at.last_id,
                          at.packed_step(size, at.shape.samples_of(size))),
        lambda at: (LOGITS, specs_of(at.pools), REPLICATED, REPLICATED, REPLICATED), donated=(1, 2)),
    ProgramKind(
        "sample_full", StepShape.sample_sizes, lambda functions, _: functions.full_sample(),
        lambda at, size: (at.sampling(at.slots), at.processors(at.slots), at.last_id, at.logits(size), at.int32(size),
                          at.int32(size), at.processors(size).allowed),
        lambda at: (REPLICATED, specs_of(at.processors(at.slots)), REPLICATED, REPLICATED), donated=(1, 2)),
    ProgramKind(
        "sample", StepShape.sample_sizes, lambda functions, _: functions.plain_sample(),
        lambda at, size: (at.sampling(at.slots), at.last_id, at.logits(size), at.int32(size), at.int32(size)),
        lambda at: REPLICATED, donated=(1,)),
    ProgramKind(
        "admit", lambda shape: ADMIT_SIZES, lambda functions, _: step_functions.admit,
        lambda at, size: (at.sampling(at.slots), at.sampling(size), at.int32(size)), donated=(0,)),
    ProgramKind(
        "table", lambda shape: (TABLE_ROWS,), lambda functions, _: step_functions.write_table,
        lambda at, size: (at.table, at.table_rows(size), at.int32(size)), donated=(0,)),
    ProgramKind(
        "admit_full", lambda shape: (1,), lambda functions, _: step_functions.admit_full,
        lambda at, size: (at.processors(at.slots), at.processors(size), at.int32(size)), donated=(0,)),
    ProgramKind(
        "copy", lambda shape: (COPY_BLOCKS,), lambda functions, _: functions.on_blocks(copy_blocks),
        lambda at, size: (at.pools, at.int32(size), at.int32(size)), lambda at: specs_of(at.pools), donated=(0,)),
    ProgramKind(
        "prompt_logprobs", lambda shape: (SCORED_ROWS,), StepFunctions.score,
        lambda at, size: (at.params, at.pools, at.table, at.int32((4 + at.units) * size)), _prompt_results,
        donated=(1, 2)),
    ProgramKind(
        "gather", lambda shape: shape.transfer_sizes, lambda functions, _: functions.on_blocks(gather_blocks),
        lambda at, size: (at.pools, at.int32(size)), lambda at: specs_of(at.pools)),
    ProgramKind(
        "scatter", lambda shape: shape.transfer_sizes, lambda functions, _: functions.on_blocks(scatter_blocks),
        lambda at, size: (at.pools, at.blocks(size), at.int32(size)), lambda at: specs_of(at.pools), donated=(0,)),
    ProgramKind(
        "hidden", lambda shape: (SCORED_ROWS,) * shape.embeddings, StepFunctions.hidden,
        lambda at, size: (at.params, at.pools, at.table, at.packed_step(size)), _prompt_results, donated=(1, 2)),
)}
