"""What all layers of a step share, computed once on the device, and the part of it that each layer reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpaged.models.config import AttentionSpec, DeltaSpec, LatentSpec, ModelConfig, RopeConfig, TokenSpec
from jaxpaged.models.rotary import rotary_angles
from jaxpaged.pallas_kernels import paged_attention, paged_latents, xla_paged_attention
from jaxpaged.pallas_kernels.delta_rule import StateTiles, make_state_tiles
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.tiles import AttentionTiles, LatentTiles
from jaxpaged.pallas_kernels.work_list import GpuWorkList, make_work_list

Key = TypeVar("Key")

XLA_TILES = xla_paged_attention.TileSizes()


@partial(jax.tree_util.register_dataclass, data_fields=["work"], meta_fields=["target", "tiles"])
@dataclass(frozen=True)
class GpuAttention:
    """The work of one step for the GPU kernel, for layers of one shape and window."""

    target: GpuTarget
    tiles: AttentionTiles
    work: GpuWorkList


@partial(jax.tree_util.register_dataclass, data_fields=["work"], meta_fields=["target", "tiles"])
@dataclass(frozen=True)
class GpuLatents:
    """The work of one step for the GPU kernel of latent attention."""

    target: GpuTarget
    tiles: LatentTiles
    work: GpuWorkList


# None: the native CPU kernel, which finds its tiles itself.
Work = GpuAttention | GpuLatents | xla_paged_attention.XlaTileList | None


@partial(jax.tree_util.register_dataclass,
         data_fields=["slot", "position", "page", "offset", "cos", "sin", "block_table", "work"],
         meta_fields=["target"])
@dataclass(frozen=True)
class AttentionMetadata:
    """What one layer reads of a step.

    Attributes:
        slot, position: [T] of each token; padding has the null slot and position 0.
        page, offset: [T] where each token's key and value are written: the page and the row in it. Padding's are
            written to the null page; the GPU's kernel writes none, and has -1 there.
        cos, sin: [T, H // 2] float32 rotary angles.
        block_table: [slots + 1, width] pages of each slot; the last row is the null slot of padding.
        work: what the attention path needs; its type says which path.
        target: the GPU, if it runs on one.
    """

    slot: jax.Array
    position: jax.Array
    page: jax.Array
    offset: jax.Array
    cos: jax.Array
    sin: jax.Array
    block_table: jax.Array
    work: Work
    target: GpuTarget | None

    @property
    def valid(self) -> jax.Array:
        """[T] bool: whether a row is a token; the others are padding."""
        return self.slot != self.block_table.shape[0] - 1


@partial(jax.tree_util.register_dataclass, data_fields=["slot", "position", "table", "tiles"], meta_fields=["target"])
@dataclass(frozen=True)
class StateMetadata:
    """What one layer with a recurrent state reads of a step.

    Attributes:
        slot, position: as in `AttentionMetadata`.
        table: [slots + 1, n] units that hold each slot's state of this layer.
        tiles: consecutive rows of one slot each.
        target: the GPU, if it runs on one.
    """

    slot: jax.Array
    position: jax.Array
    table: jax.Array
    tiles: StateTiles
    target: GpuTarget | None = None

    @property
    def valid(self) -> jax.Array:
        """[T] bool: whether a row is a token; the others are padding."""
        return self.slot != self.table.shape[0] - 1


LayerMetadata = AttentionMetadata | StateMetadata


class WorkShape(NamedTuple):
    """What the GPU's work list depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    is_biased: bool

    @classmethod
    def of(cls, spec: AttentionSpec) -> "WorkShape":
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window, spec.alibi or spec.sinks)


@dataclass(frozen=True, slots=True)
class LayerIndices:
    """Which of a step's angles, work lists and block-table units a layer reads.

    Of a layer with a state: the slice of it, and nothing else.
    """

    angles: int
    work: int
    unit: int
    has_state: bool = False


@partial(jax.tree_util.register_dataclass,
         data_fields=["slot", "position", "page", "offset", "angles", "block_table", "work", "states"],
         meta_fields=["layers", "target"])
@dataclass(frozen=True)
class StepMetadata:
    """What the layers of one step share.

    Attributes:
        page: [U, T], U units of a block in all KV groups together.
        angles: cosine and sine for each distinct rotary rule.
        block_table: [U, slots + 1, width].
        work: for each distinct shape and window of attention.
        layers: indices of each layer into these.
        states: of each slice of the states, what its layers read.
        For the rest see `AttentionMetadata`.
    """

    slot: jax.Array
    position: jax.Array
    page: jax.Array
    offset: jax.Array
    angles: tuple[tuple[jax.Array, jax.Array], ...]
    block_table: jax.Array
    work: tuple[Work, ...]
    layers: tuple[LayerIndices, ...]
    target: GpuTarget | None = None
    states: tuple[StateMetadata, ...] = ()

    def of_layer(self, layer: int) -> LayerMetadata:
        indices = self.layers[layer]
        if indices.has_state:
            return self.states[indices.unit]
        cos, sin = self.angles[indices.angles]
        return AttentionMetadata(self.slot, self.position, self.page[indices.unit], self.offset, cos, sin,
                                 self.block_table[indices.unit], self.work[indices.work], self.target)


def make_metadata(
    slot: jax.Array, position: jax.Array, block_table: jax.Array, config: ModelConfig, block_size: int, *,
    dtype: jnp.dtype | None = None, cache_dtype: jnp.dtype | None = None, native: bool = False,
    target: GpuTarget | None = None, state_table: jax.Array | None = None,
) -> StepMetadata:
    """Metadata of a step of T tokens; padding rows have the null slot (the tables' last row) and position 0.

    Args:
        block_table: [U, slots + 1, width].
        config: with the heads that this device has.
        dtype, cache_dtype: of the queries and of the pages; only the GPU's tiles depend on them.
        native: attention runs in the native CPU kernel; see `native_build.build`.
        target: the GPU, if it runs on one.
        state_table: [slots + 1, n * slices] units of each slot's state, where the model has one.
    """
    null_slot = block_table.shape[1] - 1
    page = block_table[:, slot, position // block_size]
    if target is not None:
        page = jnp.where(slot == null_slot, -1, page)

    def work_of(shape: WorkShape | LatentSpec | None) -> Work:
        if target is None or shape is None:
            return None if native else xla_paged_attention.make_tile_list(slot, position, null_slot, XLA_TILES)
        if isinstance(shape, LatentSpec):
            by = paged_latents.choose_tiles(target, slot.shape[0], shape.num_heads)
            sizes = paged_latents.work_sizes(target, by, slot.shape[0], null_slot, shape.num_heads)
            return GpuLatents(target, by, make_work_list(slot, position, null_slot, sizes))
        assert dtype is not None and cache_dtype is not None, "the GPU's tiles depend on the dtypes"
        tiles = gpu_tiles(target, slot.shape[0], shape, dtype, cache_dtype)
        sizes = paged_attention.work_sizes(target, tiles, slot.shape[0], null_slot, shape.num_heads,
                                           shape.num_kv_heads)
        return GpuAttention(target, tiles, make_work_list(slot, position, null_slot, sizes, shape.window))

    rules, rule_of = _distinct([(spec.rope, spec.rotary_dim) for spec in config.attention])
    # On CPU one list serves all layers.
    shapes, shape_of = _distinct([_gpu_shape(spec, dtype, cache_dtype) if target else None
                                  for spec in config.attention])
    layout, of_attention = config.kv_layout, iter(zip(rule_of, shape_of, strict=True))
    layers = tuple(LayerIndices(0, 0, unit, has_state=True) if isinstance(layer.mixer, DeltaSpec) else
                   LayerIndices(*next(of_attention), unit)
                   for layer, unit in zip(config.layers, layout.units, strict=True))
    states: tuple[StateMetadata, ...] = ()
    if layout.state_slices:
        assert state_table is not None, "a model with states needs their table"
        tiles = make_state_tiles(slot, null_slot)
        states = tuple(StateMetadata(slot, position, table, tiles, target)
                       for table in jnp.split(state_table, layout.state_slices, axis=1))
    return StepMetadata(
        slot=slot, position=position, page=page, offset=position % block_size,
        angles=tuple(_angles(position, rope, size) for rope, size in rules), block_table=block_table,
        work=tuple(map(work_of, shapes)), layers=layers, target=target, states=states)


def _gpu_shape(
    spec: TokenSpec, dtype: jnp.dtype | None, cache_dtype: jnp.dtype | None
) -> WorkShape | LatentSpec | None:
    """What the GPU's work list depends on; None: XLA computes this attention."""
    if isinstance(spec, AttentionSpec):
        return WorkShape.of(spec)
    assert dtype is not None and cache_dtype is not None, "whether there is a kernel depends on the dtypes"
    served = paged_latents.supports(spec.latent_dim, spec.rotary_dim, dtype, cache_dtype)
    return replace(spec, rope=None) if served else None


def gpu_tiles(
    target: GpuTarget, tokens: int, shape: WorkShape, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> AttentionTiles:
    """The GPU's tiles for a step of `tokens` tokens."""
    return paged_attention.choose_tiles(target, tokens, shape.num_heads // shape.num_kv_heads, shape.head_dim,
                                        dtype, cache_dtype, is_biased=shape.is_biased)


def uses_mosaic(target: GpuTarget, config: ModelConfig, dtype: jnp.dtype, cache_dtype: jnp.dtype) -> bool:
    """Whether Mosaic GPU computes this model's attention in steps of fewer than `MANY_TOKENS` tokens."""
    return all(isinstance(spec, AttentionSpec) and gpu_tiles(target, 1, WorkShape.of(spec), dtype, cache_dtype).mosaic
               for spec in set(config.attention))


def _angles(position: jax.Array, rope: RopeConfig | None, head_dim: int) -> tuple[jax.Array, jax.Array]:
    if rope is not None:
        return rotary_angles(position, head_dim, rope)
    ones = jnp.ones((position.shape[0], head_dim // 2), jnp.float32)  # these turn nothing
    return ones, jnp.zeros_like(ones)


def _distinct(keys: Sequence[Key]) -> tuple[list[Key], list[int]]:
    """The distinct keys, and the index of each key among them."""
    found = list(dict.fromkeys(keys))
    return found, [found.index(key) for key in keys]
