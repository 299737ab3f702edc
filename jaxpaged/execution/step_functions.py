"""The functions that run on the device; `program_kinds` says what they are compiled for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.execution.full_sampler import sample_full, sample_full_in_kernels
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.execution.logit_processors import ProcessorState
from jaxpaged.execution.logprobs import packed_logprobs
from jaxpaged.execution.sampler import SamplingState, sample
from jaxpaged.execution.sharding import Placement
from jaxpaged.execution.step_input import unpack_step
from jaxpaged.execution.step_shape import StepShape
from jaxpaged.execution.vocab_shards import VocabShards
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import use_native_products
from jaxpaged.models.metadata import make_metadata
from jaxpaged.models.transformer import Pools, Transformer
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.sampler import SlotParameters
from jaxpaged.pallas_kernels.sampler import sample as sample_in_kernel
from jaxpaged.pallas_kernels.top_tokens import top_tokens

Params = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """Which parts of a step run in native CPU kernels, built and registered before, instead of XLA."""

    attention: bool = False
    linear: bool = False


XLA_ONLY = NativeKernels()


@dataclass(frozen=True, slots=True)
class StepFunctions:
    """The functions of one model on one placement.

    Attributes:
        graph: the model's definition, without weights.
        config: of the whole model; its `vocab_size` may be padded.
        vocab_size: without that padding.
        dtype, cache_dtype: of activations and of the pools.
        target: the GPU to write kernels for; None on CPU.
    """

    graph: nnx.GraphDef[Transformer]
    config: ModelConfig
    shape: StepShape
    placement: Placement
    vocab_size: int
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    native: NativeKernels
    target: GpuTarget | None

    def forward(
        self, size: int, *, samples_all: bool = False, hidden: bool = False
    ) -> Callable[..., tuple[jax.Array, Pools, jax.Array, jax.Array, jax.Array]]:
        """A step of `size` token rows: logits of the sampled ones, and what changes on the device.

        Args:
            samples_all: return logits of every row.
            hidden: return the head's input of every row instead.
        """
        graph, block_size, partition = self.graph, self.shape.block_size, self.placement.partition
        native, target, dtype, cache_dtype = self.native, self.target, self.dtype, self.cache_dtype
        # As one device holds it.
        config, units = self.config.part(partition.size, partition.kv), self.config.kv_layout.column_units
        state_units = KVCacheSpec.of(self.config, block_size, cache_dtype).state_width(self.config)
        shards, vocab_size = self.placement.vocab_shards, self.vocab_size

        def forward(
            params: Params,
            pools: Pools,
            block_table: jax.Array,  # [U, slots + 1, width], and rows with the units of states
            last_id: jax.Array,  # [slots + 1]
            packed: jax.Array,
        ) -> tuple[jax.Array, Pools, jax.Array, jax.Array, jax.Array]:
            rows = unpack_step(packed, size, units)
            column = jnp.where(rows.new_block[0] >= 0, rows.position // block_size, block_table.shape[2])
            block_table = block_table.at[:units, rows.slot, column].set(rows.new_block, mode="drop")
            states = None
            if state_units:
                states = block_table[units:].swapaxes(0, 1).reshape(block_table.shape[1], -1)[:, :state_units]
            ids = jnp.where(rows.token_id >= 0, rows.token_id, last_id[rows.slot])
            meta = make_metadata(rows.slot, rows.position, block_table[:units], config, block_size, dtype=dtype,
                                 cache_dtype=cache_dtype, native=native.attention, target=target, state_table=states)
            model = nnx.merge(graph, params)
            if native.linear:
                use_native_products(model)
            if hidden:
                states, pools = model.hidden(ids, pools, meta)
                return states, pools, block_table, rows.sample_slot, rows.position + 1
            sample_row = jnp.arange(size) if samples_all else rows.sample_row
            row = jnp.minimum(sample_row, size - 1)
            logits, pools = model(ids, row, pools, meta)
            logits = shards.hide_padding(logits, vocab_size)
            return logits, pools, block_table, rows.sample_slot, rows.position[row] + 1

        return forward

    def score(self, size: int) -> Callable[..., tuple[Pools, jax.Array, jax.Array]]:
        """Log probabilities of prompt tokens."""
        forward, shards = self.forward(size, samples_all=True), self.placement.vocab_shards
        num_top, target = self.num_top, None if self.placement.mesh else self.target

        def score(
            params: Params, pools: Pools, block_table: jax.Array, packed: jax.Array
        ) -> tuple[Pools, jax.Array, jax.Array]:
            """As a step of `size` rows, all known; log probabilities of the ids [size] at the end of `packed`."""
            no_ids = jnp.zeros(block_table.shape[1], jnp.int32)
            logits, pools, block_table, _, _ = forward(params, pools, block_table, no_ids, packed[:-size])
            best = None if target is None else partial(top_tokens, wanted=jnp.ones(size, jnp.bool_), target=target)
            logprobs = packed_logprobs(logits, packed[-size:], num_top, shards, best)
            return pools, block_table, logprobs

        return score

    def hidden(self, size: int) -> Callable[..., tuple[Pools, jax.Array, jax.Array]]:
        """Hidden states of prompt tokens."""
        forward = self.forward(size, hidden=True)

        def hidden(
            params: Params, pools: Pools, block_table: jax.Array, packed: jax.Array
        ) -> tuple[Pools, jax.Array, jax.Array]:
            """As a step of `size` rows, all known; the head's input of each: [size, D] float32."""
            no_ids = jnp.zeros(block_table.shape[1], jnp.int32)
            states, pools, block_table, _, _ = forward(params, pools, block_table, no_ids, packed)
            return pools, block_table, states

        return hidden

    def plain_sample(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Sampling by temperature, top-k, top-p and min-p only."""
        # The kernel needs whole rows; XLA samples from sharded ones.
        if self.target is None or self.placement.mesh:
            return partial(_sample, self.placement.vocab_shards)
        return partial(_sample_in_kernel, self.target)

    def full_sample(self) -> Callable[..., tuple[jax.Array, ProcessorState, jax.Array, jax.Array]]:
        """Sampling with every feature that a request can ask for."""
        if self.target is not None and not self.placement.mesh:
            return partial(_sample_full_in_kernels, num_top=self.num_top, target=self.target,
                           processed_logprobs=self.shape.processed_logprobs)
        return partial(_sample_full, num_top=self.num_top, processed_logprobs=self.shape.processed_logprobs,
                       shards=self.placement.vocab_shards)

    def on_blocks(self, function: Callable[..., Pools]) -> Callable[..., Pools]:
        """`copy_blocks`, `gather_blocks` or `scatter_blocks`, as this platform does it faster."""
        return partial(function, by_slices=self.target is None)

    @property
    def num_top(self) -> int:
        """Alternatives of each log probability: at most the number of tokens."""
        return min(self.shape.num_top, self.vocab_size)


def _sample(
    shards: VocabShards, state: SamplingState, last_id: jax.Array, logits: jax.Array, slot: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Ids [B], and the slots' last ids with them written."""
    rows: SamplingState = jax.tree.map(lambda leaf: leaf[slot], state)
    ids = sample(logits, rows, position, shards)
    return ids, last_id.at[slot].set(jnp.maximum(ids, 0))


def _sample_in_kernel(
    target: GpuTarget, state: SamplingState, last_id: jax.Array, logits: jax.Array, slot: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `_sample`, in one kernel that draws the same tokens."""
    parameters = SlotParameters(*(jnp.asarray(getattr(state, name)) for name in SlotParameters._fields))
    return sample_in_kernel(logits, parameters, slot, position, last_id, target=target)


def _sample_full(
    state: SamplingState, processors: ProcessorState, last_id: jax.Array, logits: jax.Array, slot: jax.Array,
    position: jax.Array, step_allowed: jax.Array, *, num_top: int, processed_logprobs: bool, shards: VocabShards,
) -> tuple[jax.Array, ProcessorState, jax.Array, jax.Array]:
    """Ids [B], both states of the slots with them written, and log probabilities [B, 2 + 2 * num_top]."""
    rows: SamplingState = jax.tree.map(lambda leaf: leaf[slot], state)
    ids, processors, logprobs = sample_full(
        logits, rows, processors, slot, position, step_allowed, num_top=num_top, processed_logprobs=processed_logprobs,
        shards=shards)
    return ids, processors, last_id.at[slot].set(jnp.maximum(ids, 0)), logprobs


def _sample_full_in_kernels(
    state: SamplingState, processors: ProcessorState, last_id: jax.Array, logits: jax.Array, slot: jax.Array,
    position: jax.Array, step_allowed: jax.Array, *, num_top: int, processed_logprobs: bool, target: GpuTarget,
) -> tuple[jax.Array, ProcessorState, jax.Array, jax.Array]:
    """As `_sample_full`."""
    return sample_full_in_kernels(logits, state, processors, last_id, slot, position, step_allowed, num_top=num_top,
                                  processed_logprobs=processed_logprobs, target=target)


def admit_full(state: ProcessorState, rows: ProcessorState, slot: jax.Array) -> ProcessorState:
    """The state with `rows` [n] written at `slot` [n]."""
    return jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), state, rows)


def admit(state: SamplingState, rows: SamplingState, slot: jax.Array) -> SamplingState:
    """The state with `rows` [n] written at `slot` [n]."""
    return jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), state, rows)


def write_table(block_table: jax.Array, rows: jax.Array, slot: jax.Array) -> jax.Array:
    """The block tables [U, slots + 1, width] with `rows` [U, n, width] written at `slot` [n]."""
    return block_table.at[:, slot].set(rows)
