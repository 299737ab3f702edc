"""The step's attention metadata, and the one place that picks the attention path."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Linear, MeshAxes, RMSNorm, apply_linear, rotary_angles, rotate
from jaxpaged.pallas_kernels import native_attention, paged_attention, xla_paged_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias, alibi_slopes
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.kv_write import write_kv
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.rotary_kv_write import rotary_kv_write
from jaxpaged.pallas_kernels.tiles import AttentionTiles
from jaxpaged.pallas_kernels.work_list import GpuWorkList, make_work_list

XLA_TILES = xla_paged_attention.TileSizes()


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """The work of one step for the GPU kernel: a work list for each window that some layer has."""

    target: GpuTarget
    tiles: AttentionTiles
    work: tuple[tuple[int | None, GpuWorkList], ...]

    def work_for(self, window: int | None) -> GpuWorkList:
        return dict(self.work)[window]


jax.tree_util.register_pytree_node(
    GpuAttention,
    lambda gpu: ([work for _, work in gpu.work], (gpu.target, gpu.tiles, tuple(window for window, _ in gpu.work))),
    lambda static, lists: GpuAttention(static[0], static[1], tuple(zip(static[2], lists, strict=True))),
)


@partial(jax.tree_util.register_dataclass,
         data_fields=["slot", "position", "page", "place", "cos", "sin", "block_table", "work"], meta_fields=[])
@dataclass(frozen=True)
class AttentionMetadata:
    """What all layers of one step share, computed once on the device.

    Attributes:
        slot, position: [T] of each token; padding has the null slot and position 0.
        page, place: [T] where each token's key and value go: page and place inside it. Padding's go to the null page;
            the GPU's kernel writes none, and has -1 there.
        cos, sin: [T, H // 2] float32 rotary angles.
        block_table: [slots + 1, width] pages of each slot; the last row is the null slot of padding.
        work: what the path through attention needs, and with that, which path: the GPU's kernel, XLA, or None for the
            native CPU kernel, which finds its tiles itself.
    """

    slot: jax.Array
    position: jax.Array
    page: jax.Array
    place: jax.Array
    cos: jax.Array
    sin: jax.Array
    block_table: jax.Array
    work: GpuAttention | xla_paged_attention.XlaTileList | None


def make_metadata(
    slot: jax.Array, position: jax.Array, block_table: jax.Array, config: ModelConfig, block_size: int, *,
    dtype: jnp.dtype | None = None, cache_dtype: jnp.dtype | None = None, native: bool = False,
    target: GpuTarget | None = None,
) -> AttentionMetadata:
    """Metadata of a step of T tokens; padding rows have the null slot (the table's last row) and position 0.

    Args:
        config: with the heads that this device has.
        dtype, cache_dtype: of the queries and of the pages; only the GPU's tiles depend on them.
        native: attention runs in the native CPU kernel; see `native_build.build`.
        target: the GPU, if it runs on one.
    """
    null_slot = block_table.shape[0] - 1
    cos, sin = rotary_angles(position, config.head_dim, config.rope)
    if config.alibi:  # these turn nothing
        cos, sin = jnp.ones_like(cos), jnp.zeros_like(sin)
    page = block_table[slot, position // block_size]
    work: GpuAttention | xla_paged_attention.XlaTileList | None = None
    if target is not None:
        assert dtype is not None and cache_dtype is not None, "the GPU's tiles depend on the dtypes"
        work = _gpu_attention(slot, position, null_slot, config, dtype, cache_dtype, target)
        page = jnp.where(slot == null_slot, -1, page)
    elif not native:
        work = xla_paged_attention.make_tile_list(slot, position, null_slot, XLA_TILES)
    return AttentionMetadata(
        slot=slot,
        position=position,
        page=page,
        place=position % block_size,
        cos=cos,
        sin=sin,
        block_table=block_table,
        work=work,
    )


def uses_mosaic(target: GpuTarget, config: ModelConfig, dtype: jnp.dtype, cache_dtype: jnp.dtype) -> bool:
    """Whether Mosaic GPU computes this model's attention in steps of fewer than `MANY_TOKENS` tokens."""
    return _tiles(target, 1, config, dtype, cache_dtype).mosaic


def _tiles(
    target: GpuTarget, tokens: int, config: ModelConfig, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> AttentionTiles:
    return paged_attention.choose_tiles(target, tokens, config.num_heads // config.num_kv_heads, config.head_dim,
                                        dtype, cache_dtype, is_biased=config.alibi or config.attention_sinks)


def _gpu_attention(
    slot: jax.Array, position: jax.Array, null_slot: int, config: ModelConfig, dtype: jnp.dtype,
    cache_dtype: jnp.dtype, target: GpuTarget,
) -> GpuAttention:
    tokens, heads, kv_heads = slot.shape[0], config.num_heads, config.num_kv_heads
    tiles = _tiles(target, tokens, config, dtype, cache_dtype)
    sizes = paged_attention.work_sizes(target, tiles, tokens, null_slot, heads, kv_heads)
    windows = sorted({config.window(layer) for layer in range(config.num_layers)}, key=lambda window: window or 0)
    lists = ((window, make_work_list(slot, position, null_slot, sizes, window)) for window in windows)
    return GpuAttention(target, tiles, tuple(lists))


def can_run_natively(config: ModelConfig) -> bool:
    """Whether the native CPU kernel computes all that this model's attention asks for."""
    return not (any(config.windows) or config.attention_softcap or config.alibi or config.attention_sinks)


class Attention(nnx.Module):
    """Grouped-query self-attention of one layer over its page pools."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        bias = config.attention_bias
        self.q = Linear(config.model_dim, heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.k = Linear(config.model_dim, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.v = Linear(config.model_dim, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.o = Linear(heads * head_dim, config.model_dim, bias=config.attention_output_bias, dtype=dtype, rngs=rngs,
                        sum_over=axis)
        self.q_norm = RMSNorm(head_dim, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32)) if config.attention_sinks else None
        self.alibi_heads = heads if config.alibi else 0
        self.axis = axis
        self.head_dim = head_dim
        self.rule = AttentionRule(config.attention_scale or head_dim**-0.5, config.window(layer),
                                  config.attention_softcap)

    def __call__(
        self, x: jax.Array, pages: KVPages, meta: AttentionMetadata, residual: jax.Array
    ) -> tuple[jax.Array, KVPages]:
        """x, residual [T, D] -> (residual + y [T, D], pools with this step's keys and values)."""
        tokens = x.shape[0]
        q, k, v = (y.reshape(tokens, -1, self.head_dim) for y in apply_linear(x, self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (norm(y.reshape(-1, self.head_dim)).reshape(y.shape) for norm, y in ((self.q_norm, q),
                                                                                        (self.k_norm, k)))
        rule, bias, work = self.rule, self._head_bias(q.shape[1]), meta.work
        if isinstance(work, GpuAttention):
            q, pages = rotary_kv_write(q, k, v, meta.cos, meta.sin, meta.page, meta.place, pages, target=work.target)
        elif work is None:
            q, k_pool, v_pool = native_attention.rotary_kv_write(q, k, v, meta.cos, meta.sin, meta.page, meta.place,
                                                                 pages.k, pages.v)
            pages = KVPages(k_pool, v_pool)
        else:
            q, k = rotate(q, meta.cos, meta.sin), rotate(k, meta.cos, meta.sin)
            pages = write_kv(pages, k, v, meta.page, meta.place)
        if work is None:
            y = native_attention.paged_attention(
                q, pages.k, pages.v, meta.block_table, meta.slot, meta.position, rule.scale
            )
        elif isinstance(work, GpuAttention):
            y = paged_attention.paged_attention(q, pages, meta.block_table, work.work_for(rule.window), rule, bias,
                                                tiles=work.tiles, target=work.target)
        else:
            y = xla_paged_attention.paged_attention(q, pages, meta.block_table, work, rule, bias, XLA_TILES)
        return self.o(y.reshape(tokens, -1), residual), pages

    def _head_bias(self, heads: int) -> HeadBias:
        """Of the `heads` query heads that this device has."""
        slopes = None
        if self.alibi_heads:
            slopes = jnp.asarray(alibi_slopes(self.alibi_heads))
            if self.axis is not None:
                slopes = jax.lax.dynamic_slice_in_dim(slopes, jax.lax.axis_index(self.axis) * heads, heads)
        return HeadBias(slopes, None if self.sinks is None else self.sinks[...].astype(jnp.float32))
