"""Grouped-query attention, and the one module that picks the attention path.

Axis letters: T tokens, D model, N query heads, K kv heads, H head dim.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.models.config import AttentionSpec
from jaxpaged.models.layers import Linear, MeshAxes, Norm
from jaxpaged.models.metadata import XLA_TILES, AttentionMetadata, GpuAttention, GpuLatents
from jaxpaged.models.rotary import rotate
from jaxpaged.pallas_kernels import native_attention, paged_attention, xla_paged_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias, alibi_slopes
from jaxpaged.pallas_kernels.heads import Heads
from jaxpaged.pallas_kernels.kv_pages import KVPages, write_kv
from jaxpaged.pallas_kernels.rotary_kv_write import rotary_kv_write


class Attention(nnx.Module):
    """Grouped-query self-attention of one layer over its page pools."""

    def __init__(
        self, spec: AttentionSpec, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        # Angles come with the step: layers that differ in these alone are equal, and traced once.
        self.spec, self.axis, self.head_dim = replace(spec, rope=None), axis, head_dim
        self.qkv = Linear(model_dim, (heads + 2 * kv_heads) * head_dim, bias=spec.bias, dtype=dtype, rngs=rngs)
        self.o = Linear(heads * head_dim, model_dim, bias=spec.output_bias, dtype=dtype, rngs=rngs, sum_over=axis)
        self.q_norm = self._qk_norm(heads, dtype)
        self.k_norm = self._qk_norm(kv_heads, dtype)
        self.gate = Linear(model_dim, heads * head_dim, bias=False, dtype=dtype, rngs=rngs) if spec.gated else None
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32)) if spec.sinks else None
        self.alibi_heads = heads if spec.alibi else 0
        self.rule = AttentionRule(spec.scale or head_dim**-0.5, spec.window, spec.softcap)

    def __call__(self, x: jax.Array, pages: KVPages, meta: AttentionMetadata) -> tuple[jax.Array, KVPages]:
        """[T, D] -> [T, D], and the pools with this step's keys and values."""
        qkv = self.qkv(x).reshape(x.shape[0], -1, self.head_dim)
        kv_heads = pages.k.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        q, k, v = Heads(qkv, 0, heads), Heads(qkv, heads, kv_heads), Heads(qkv, heads + kv_heads, kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.spec.query_growth is not None:
            base, length = self.spec.query_growth
            growth = 1 + base * jnp.log1p(jnp.floor(meta.position.astype(jnp.float32) / length))
            q = Heads.of((q.apart() * growth[:, None, None]).astype(x.dtype))
        rule, bias, work = self.rule, self._head_bias(heads), meta.work
        if isinstance(work, GpuAttention):
            y, padded, pages = rotary_kv_write(q, k, v, meta.cos, meta.sin, meta.page, meta.offset, pages,
                                               target=work.target, token_rows=work.tiles.token_rows)
            y = paged_attention.paged_attention(y, pages, meta.block_table, work.work, rule, bias, tiles=work.tiles,
                                                target=work.target, padded=padded)
        elif work is None:
            y, k_pool, v_pool = native_attention.rotary_kv_write(q, k, v, meta.cos, meta.sin, meta.page, meta.offset,
                                                                 pages.k, pages.v)
            pages = KVPages(k_pool, v_pool)
            y = native_attention.paged_attention(y, pages.k, pages.v, meta.block_table, meta.slot, meta.position, rule,
                                                 bias)
        else:
            assert not isinstance(work, GpuLatents), "its kernel reads latents"
            y, keys = (rotate(part.apart(), meta.cos, meta.sin) for part in (q, k))
            pages = write_kv(pages, keys, v.apart(), meta.page, meta.offset)
            y = xla_paged_attention.paged_attention(y, pages, meta.block_table, work, rule, bias, XLA_TILES)
        y = y.reshape(x.shape[0], -1)
        if self.gate is not None:
            y = y * jax.nn.sigmoid(self.gate(x).astype(jnp.float32)).astype(y.dtype)
        return self.o(y), pages

    def _qk_norm(self, heads: int, dtype: jnp.dtype) -> Norm | None:
        over, size = self.spec.qk_norm_over, self.head_dim
        if self.spec.qk_norm is None:
            return None
        if over == "all heads":
            return Norm(heads * size, self.spec.qk_norm, dtype=dtype, mean_over=self.axis)
        return Norm((heads, size) if over == "each head" else size, self.spec.qk_norm, dtype=dtype)

    def _normed(self, heads: Heads, norm: Norm) -> Heads:
        rows = heads.apart()  # [T, heads, H]
        shape = {"head": (-1, self.head_dim), "each head": rows.shape, "all heads": (rows.shape[0], -1)}
        return Heads.of(norm(rows.reshape(shape[self.spec.qk_norm_over])).reshape(rows.shape))

    def _head_bias(self, heads: int) -> HeadBias:
        """Of the `heads` query heads that this device has."""
        slopes = None
        if self.alibi_heads:
            slopes = jnp.asarray(alibi_slopes(self.alibi_heads) * np.float32(self.spec.alibi_scale))
            if self.axis is not None:
                slopes = jax.lax.dynamic_slice_in_dim(slopes, jax.lax.axis_index(self.axis) * heads, heads)
        return HeadBias(slopes, None if self.sinks is None else self.sinks[...].astype(jnp.float32))
