"""The decoder that the families share: embed, layers, norm, logits of the sampled rows."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.attention import Attention, AttentionMetadata
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Embedding, GatedMLP, Linear, MeshAxes, RMSNorm
from jaxpaged.pallas_kernels.kv_pages import KVPages

Pools = tuple[KVPages, ...]  # one per layer


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        self.attn_norm = RMSNorm(config.model_dim, eps=config.norm_eps, dtype=dtype)
        self.attn = Attention(config, layer, dtype=dtype, rngs=rngs, axis=axis)
        self.mlp_norm = RMSNorm(config.model_dim, eps=config.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.model_dim, config.mlp_dim, bias=config.mlp_bias, dtype=dtype, rngs=rngs, axis=axis)

    def __call__(self, x: jax.Array, pages: KVPages, meta: AttentionMetadata) -> tuple[jax.Array, KVPages]:
        x, pages = self.attn(self.attn_norm(x), pages, meta, x)
        return self.mlp(self.mlp_norm(x), x), pages


class Transformer(nnx.Module):
    """A causal decoder over page pools.

    Args:
        config: sizes and switches.
        dtype: of weights and activations.
        rngs: for random weights; under `nnx.eval_shape` nothing is drawn.
        axis: mesh axes that share heads, MLP and vocabulary, for a model that runs under `jax.shard_map` on its own
            piece of every weight; None on one device.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.model_dim, dtype=dtype, rngs=rngs, axis=axis)
        self.layers = nnx.List([DecoderLayer(config, layer, dtype=dtype, rngs=rngs, axis=axis)
                                for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.model_dim, eps=config.norm_eps, dtype=dtype)
        tied = config.tie_embeddings
        self.head = None if tied else Linear(config.model_dim, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, ids: jax.Array, sample_row: jax.Array, pools: Pools, meta: AttentionMetadata
    ) -> tuple[jax.Array, Pools]:
        """One step.

        Args:
            ids: [T] int32.
            sample_row: [B] int32, rows whose logits are wanted; the head runs on these alone.
            pools: keys and values of every layer, updated in place where donated.
            meta: see `make_metadata`.

        Returns:
            Logits [B, V] float32, or this device's columns of them, and the pools.
        """
        x, pools = self._layers(ids, pools, meta)
        x = self.norm(x[sample_row])
        logits = self.embed.logits(x) if self.head is None else self.head.logits(x)
        return logits, pools

    def hidden(self, ids: jax.Array, pools: Pools, meta: AttentionMetadata) -> tuple[jax.Array, Pools]:
        """As a step of `__call__`, with what the head would read of every row: [T, D] float32, and the pools."""
        x, pools = self._layers(ids, pools, meta)
        return self.norm(x).astype(jnp.float32), pools

    def _layers(self, ids: jax.Array, pools: Pools, meta: AttentionMetadata) -> tuple[jax.Array, Pools]:
        x = self.embed(ids)
        updated = []
        for layer, pages in zip(self.layers, pools, strict=True):
            graph, weights = nnx.split(layer)
            x, pages = _run_layer(graph, weights, x, pages, meta)
            updated.append(pages)
        return x, tuple(updated)


# A jit inside the step's jit: equal layers are traced once.
@partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef[DecoderLayer], weights: nnx.State, x: jax.Array, pages: KVPages, meta: AttentionMetadata
) -> tuple[jax.Array, KVPages]:
    return nnx.merge(graph, weights)(x, pages, meta)
