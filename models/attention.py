"""The step's attention metadata, and the one place that picks the attention path."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Linear, MeshAxes, rotary_angles, rotate
from jaxpaged.pallas_kernels import native_attention, xla_paged_attention
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.kv_write import write_kv

TILES = xla_paged_attention.TileSizes()


@partial(jax.tree_util.register_dataclass,
         data_fields=["slot", "position", "page", "place", "cos", "sin", "block_table", "work"], meta_fields=[])
@dataclass(frozen=True)
class AttentionMetadata:
    """What all layers of one step share, computed once on the device.

    Attributes:
        slot, position: [T] of each token; padding has the null slot and position 0.
        page, place: [T] where each token's key and value go: page and place inside it.
        cos, sin: [T, H // 2] float32 rotary angles.
        block_table: [slots + 1, width] pages of each slot; the last row is the null slot of padding.
        work: the XLA path's work list; None picks the native kernel, which finds its tiles itself.
    """

    slot: jax.Array
    position: jax.Array
    page: jax.Array
    place: jax.Array
    cos: jax.Array
    sin: jax.Array
    block_table: jax.Array
    work: xla_paged_attention.WorkList | None


def make_metadata(
    slot: jax.Array, position: jax.Array, block_table: jax.Array, config: ModelConfig, block_size: int, *,
    native: bool = False,
) -> AttentionMetadata:
    """Metadata of a step of T tokens; padding rows have the null slot (the table's last row) and position 0.

    `native`: attention runs in the native CPU kernel; see `native_attention.build`.
    """
    null_slot = block_table.shape[0] - 1
    cos, sin = rotary_angles(position, config.head_dim, config.rope)
    return AttentionMetadata(
        slot=slot,
        position=position,
        page=block_table[slot, position // block_size],
        place=position % block_size,
        cos=cos,
        sin=sin,
        block_table=block_table,
        work=None if native else xla_paged_attention.make_work_list(slot, position, null_slot, TILES),
    )


class Attention(nnx.Module):
    """Grouped-query self-attention over the page pools."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None) -> None:
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        bias = config.attention_bias
        self.q = Linear(config.model_dim, heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.k = Linear(config.model_dim, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.v = Linear(config.model_dim, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.o = Linear(heads * head_dim, config.model_dim, bias=config.attention_output_bias, dtype=dtype, rngs=rngs,
                        sum_over=axis)
        self.head_dim = head_dim

    def __call__(self, x: jax.Array, pages: KVPages, meta: AttentionMetadata) -> tuple[jax.Array, KVPages]:
        """x [T, D] -> (y [T, D], pools with this step's keys and values)."""
        tokens = x.shape[0]
        q = rotate(self.q(x).reshape(tokens, -1, self.head_dim), meta.cos, meta.sin)
        k = rotate(self.k(x).reshape(tokens, -1, self.head_dim), meta.cos, meta.sin)
        v = self.v(x).reshape(tokens, -1, self.head_dim)
        pages = write_kv(pages, k, v, meta.page, meta.place)
        scale = self.head_dim**-0.5
        if meta.work is None:
            y = native_attention.paged_attention(
                q, pages.k, pages.v, meta.block_table, meta.slot, meta.position, scale
            )
        else:
            y = xla_paged_attention.paged_attention(q, pages.k, pages.v, meta.block_table, meta.work, scale, TILES)
        return self.o(y.reshape(tokens, -1)), pages
