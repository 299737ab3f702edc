"""The decoder that the families share: embed, layers, norm, logits of the sampled rows.

What a layer is comes from its `LayerSpec`; `MIXERS` and `MLPS` say which module computes which kind of spec.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.attention import Attention
from jaxpaged.models.config import (
    AttentionSpec,
    DeltaSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
)
from jaxpaged.models.delta_net import DeltaNet
from jaxpaged.models.experts import Experts
from jaxpaged.models.latent_attention import LatentAttention
from jaxpaged.models.layers import Embedding, Linear, MeshAxes, Norm, keep_packed
from jaxpaged.models.metadata import LayerMetadata, StepMetadata
from jaxpaged.models.mlp import DenseMLP
from jaxpaged.pallas_kernels.kv_pages import Pages

Pools = tuple[Pages, ...]  # one per strip, see `KVLayout`

MIXERS: dict[type, Callable[..., Any]] = {
    AttentionSpec: Attention, LatentSpec: LatentAttention, DeltaSpec: DeltaNet}
MLPS: dict[type, Callable[..., DenseMLP | Experts]] = {MLPSpec: DenseMLP, ExpertsSpec: Experts}


class DecoderLayer(nnx.Module):
    """Mixer and MLP with their norms and residuals."""

    def __init__(
        self, spec: LayerSpec, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        def norm(*placements: str) -> Norm | None:
            return Norm(model_dim, spec.norm, dtype=dtype) if spec.norms in placements else None

        self.attn_norm = norm("before", "both", "parallel", "parallel_separate")
        self.attn = MIXERS[type(spec.mixer)](spec.mixer, model_dim, dtype=dtype, rngs=rngs, axis=axis)
        self.attn_post_norm = norm("after", "both", "after_residual")
        self.mlp_norm = norm("before", "both", "parallel_separate")
        self.mlp = MLPS[type(spec.mlp)](spec.mlp, model_dim, dtype=dtype, rngs=rngs, axis=axis)
        self.mlp_post_norm = norm("after", "both", "after_residual")
        self.norms_sum = spec.norms == "after_residual"
        self.parallel = spec.norms.startswith("parallel")
        self.residual_scale = spec.residual_scale

    def __call__(self, x: jax.Array, pages: Pages, meta: LayerMetadata) -> tuple[jax.Array, Pages]:
        """[T, D] -> [T, D], and the pools with this step's keys and values, or states."""
        normed = _apply(self.attn_norm, x)
        y, pages = self.attn(normed, pages, meta)
        if self.parallel:
            other = normed if self.mlp_norm is None else self.mlp_norm(x)
            return self._add_residual(x, y + self._mlp(other, meta)), pages
        x = self._add_normed(x, y, self.attn_post_norm)
        return self._add_normed(x, self._mlp(_apply(self.mlp_norm, x), meta), self.mlp_post_norm), pages

    def _mlp(self, x: jax.Array, meta: LayerMetadata) -> jax.Array:
        return self.mlp(x, meta.valid, meta.target) if isinstance(self.mlp, Experts) else self.mlp(x)

    def _add_normed(self, x: jax.Array, y: jax.Array, norm: Norm | None) -> jax.Array:
        if self.norms_sum:
            return _apply(norm, self._add_residual(x, y))
        return self._add_residual(x, _apply(norm, y))

    def _add_residual(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y if self.residual_scale == 1 else x + y * jnp.asarray(self.residual_scale, y.dtype)


def _apply(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Transformer(nnx.Module):
    """A causal decoder over page pools.

    Args:
        config: sizes, and what each layer is.
        dtype: of weights and activations.
        rngs: for random weights; under `nnx.eval_shape` nothing is drawn.
        axis: mesh axes that share heads, MLP and vocabulary, for a model that runs under `jax.shard_map` on its own
            part of every weight; None on one device.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None) -> None:
        self.config = config
        width, outer = config.model_dim, config.embedding_dim or config.model_dim
        self.embed = Embedding(config.vocab_size, outer, dtype=dtype, rngs=rngs, axis=axis)
        projects = config.embedding_dim is not None
        self.project_in = Linear(outer, width, bias=False, dtype=dtype, rngs=rngs) if projects else None
        self.project_out = Linear(width, outer, bias=False, dtype=dtype, rngs=rngs) if projects else None
        self.positions = (nnx.Param(jnp.zeros((config.learned_positions, config.model_dim), dtype))
                          if config.learned_positions else None)
        self.layers = nnx.List([DecoderLayer(spec, config.model_dim, dtype=dtype, rngs=rngs, axis=axis)
                                for spec in config.layers])
        self.norm = Norm(width, config.norm, dtype=dtype) if config.norm else None
        tied = config.tie_embeddings
        self.head = None if tied else Linear(outer, config.vocab_size, bias=config.head_bias, dtype=dtype, rngs=rngs)
        if config.quant.packed:
            keep_packed(self, config.quant.packed)

    def __call__(
        self, ids: jax.Array, sample_row: jax.Array, pools: Pools, meta: StepMetadata
    ) -> tuple[jax.Array, Pools]:
        """One step.

        Args:
            ids: [T] int32.
            sample_row: [B] int32, rows whose logits are wanted; the head runs on these alone.
            pools: keys and values, updated in place where donated.
            meta: see `make_metadata`.

        Returns:
            Logits [B, V] float32, or this device's columns of them, and the pools.
        """
        x, pools = self._layers(ids, pools, meta)
        x = self._before_head(x[sample_row])
        logits = self.embed.logits(x) if self.head is None else self.head.logits(x)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        if self.config.logit_softcap is not None:
            logits = self.config.logit_softcap * jnp.tanh(logits / self.config.logit_softcap)
        return logits, pools

    def hidden(self, ids: jax.Array, pools: Pools, meta: StepMetadata) -> tuple[jax.Array, Pools]:
        """As a step of `__call__`, with what the head would read of every row: [T, D] float32, and the pools."""
        x, pools = self._layers(ids, pools, meta)
        return self._before_head(x).astype(jnp.float32), pools

    def _before_head(self, x: jax.Array) -> jax.Array:
        x = _apply(self.norm, x)
        return x if self.project_out is None else self.project_out(x)

    def _layers(self, ids: jax.Array, pools: Pools, meta: StepMetadata) -> tuple[jax.Array, Pools]:
        x = self.embed(ids)
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions[...][meta.position + self.config.position_offset].astype(x.dtype)
        strips = list(pools)
        for index, (layer, strip) in enumerate(zip(self.layers, self.config.kv_layout.strips, strict=True)):
            graph, weights = nnx.split(layer)
            x, strips[strip] = _run_layer(graph, weights, x, strips[strip], meta.of_layer(index))
        return x, tuple(strips)


# A jit inside the step's jit: equal layers are traced once.
@partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef[DecoderLayer], weights: nnx.State, x: jax.Array, pages: Pages, meta: LayerMetadata
) -> tuple[jax.Array, Pages]:
    return nnx.merge(graph, weights)(x, pages, meta)
