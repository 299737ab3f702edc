"""Multi-head latent attention (DeepSeek-V2, 2024) over pages that hold one latent per token.

Keys and values of a head are products of the latent. They are never made: a query is multiplied with its head's key
matrix before attention, the result with its value matrix after it, and in between all heads read the same 576 numbers,
of which the last 64 carry the position. For a long prompt, making keys and values would take fewer operations: 640 for
each pair of a query and a key in place of 2,176, and 262,144 for each key, which is even at 171 queries.

Axis letters: T tokens, D model, N heads, L latent, O rotated, C unrotated part of a query, V value, R compressed query.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import LatentSpec
from jaxpaged.models.layers import Linear, MeshAxes, Norm
from jaxpaged.models.metadata import XLA_TILES, AttentionMetadata, GpuAttention, GpuLatents
from jaxpaged.models.rotary import rotate
from jaxpaged.pallas_kernels import native_attention, paged_latents, xla_paged_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import LatentPages, write_latents


class LatentAttention(nnx.Module):
    """Latent attention of one layer over its page pool. On a mesh heads are shared out; each device has all latents."""

    def __init__(
        self, spec: LatentSpec, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        make, norm = partial(Linear, dtype=dtype, rngs=rngs), partial(Norm, dtype=dtype)
        query_dim = spec.query_dim
        self.q_down = None if query_dim is None else make(model_dim, query_dim, bias=spec.bias)
        self.q_norm = None if query_dim is None else norm(query_dim, spec.norm)
        self.q = make(query_dim or model_dim, spec.num_heads * (spec.key_dim + spec.rotary_dim), bias=False)
        self.kv_down = make(model_dim, spec.head_dim, bias=spec.bias)
        self.kv_norm = norm(spec.latent_dim, spec.norm)
        self.key_up, self.value_up = (  # [N * C, L], [N * V, L]
            nnx.Param((jax.random.normal(rngs.params(), (spec.num_heads * size, spec.latent_dim), jnp.float32)
                       * spec.latent_dim**-0.5).astype(dtype)) for size in (spec.key_dim, spec.value_dim))
        self.o = make(spec.num_heads * spec.value_dim, model_dim, bias=spec.bias, sum_over=axis)
        self.latent_dim, self.key_dim, self.query_head = spec.latent_dim, spec.key_dim, spec.key_dim + spec.rotary_dim
        self.rule = AttentionRule(spec.scale)

    def __call__(self, x: jax.Array, pages: LatentPages, meta: AttentionMetadata) -> tuple[jax.Array, LatentPages]:
        """[T, D] -> [T, D], and the pool with this step's latents."""
        inputs = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q(inputs).reshape(len(x), -1, self.query_head)  # [T, N, C + O]
        made = self.kv_down(x)
        latent, position = self.kv_norm(made[:, : self.latent_dim]), made[:, None, self.latent_dim :]
        row = jnp.concatenate([latent[:, None], rotate(position, meta.cos, meta.sin)], axis=-1)
        # On a GPU padding has the page -1, which other kernels skip.
        pages = write_latents(pages, row, jnp.maximum(meta.page, 0), meta.offset)
        key_up, value_up = (weights[...].reshape(q.shape[1], -1, self.latent_dim)
                            for weights in (self.key_up, self.value_up))
        absorbed = jnp.einsum("tnc,ncl->tnl", q[..., : self.key_dim], key_up)
        q = jnp.concatenate([absorbed, rotate(q[..., self.key_dim :], meta.cos, meta.sin)], axis=-1)
        y = self._attend(q, pages, meta)[..., : self.latent_dim]
        y = jnp.einsum("tnl,nvl->tnv", y, value_up)
        return self.o(y.reshape(len(x), -1)), pages

    def _attend(self, q: jax.Array, pages: LatentPages, meta: AttentionMetadata) -> jax.Array:
        """[T, N, L + O] -> [T, N, L], or more numbers, which mean nothing."""
        work, both = meta.work, pages.as_keys_and_values
        if work is None:
            return native_attention.paged_attention(q, both.k, both.v, meta.block_table, meta.slot, meta.position,
                                                    self.rule, HeadBias())
        if isinstance(work, GpuLatents):
            return paged_latents.paged_latents(q, pages.latent, meta.block_table, work.work, scale=self.rule.scale,
                                               latent_dim=self.latent_dim, tiles=work.tiles, target=work.target)
        assert not isinstance(work, GpuAttention), "its kernel reads keys and values"
        return xla_paged_attention.paged_attention(q, both, meta.block_table, work, self.rule, HeadBias(), XLA_TILES)
