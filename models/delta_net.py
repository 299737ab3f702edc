"""The gated delta net of Qwen3-Next: see `pallas_kernels.delta_rule`, which computes its recurrence."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import DeltaSpec, NormSpec
from jaxpaged.models.layers import Linear, MeshAxes, Norm
from jaxpaged.models.metadata import StateMetadata
from jaxpaged.pallas_kernels.delta_rule import DeltaInputs, DeltaShape, delta_rule
from jaxpaged.pallas_kernels.kv_pages import KVPages


class DeltaNet(nnx.Module):
    """A recurrent mixer of one layer: products, convolution and delta rule, then a norm that is gated.

    On a mesh each device has a part of the heads.
    """

    def __init__(
        self, spec: DeltaSpec, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        self.spec = spec
        # Queries, keys, values, gate; then beta and the decay of each value head.
        self.inputs = Linear(model_dim, spec.channels + spec.values, bias=False, dtype=dtype, rngs=rngs)
        self.rates = Linear(model_dim, 2 * spec.value_heads, bias=False, dtype=dtype, rngs=rngs)
        self.conv = nnx.Param(jnp.zeros((spec.channels, spec.conv_width), dtype))
        self.log_decay = nnx.Param(jnp.zeros(spec.value_heads, dtype))
        self.decay_bias = nnx.Param(jnp.zeros(spec.value_heads, dtype))
        self.norm = Norm(spec.value_dim, NormSpec(spec.eps), dtype=dtype)
        self.out = Linear(spec.values, model_dim, bias=False, dtype=dtype, rngs=rngs, sum_over=axis)

    def __call__(self, x: jax.Array, pages: KVPages, meta: StateMetadata) -> tuple[jax.Array, KVPages]:
        """[T, D] -> [T, D], and the pools with the states after this step."""
        spec, tokens = self.spec, x.shape[0]
        conv = self.conv[...].reshape(-1, spec.conv_width)  # of this device's heads
        share = spec.channels // conv.shape[0]
        shape = DeltaShape(spec.key_heads // share, spec.value_heads // share, spec.key_dim, spec.value_dim)
        mixed, gate = jnp.split(self.inputs(x), [conv.shape[0]], axis=1)
        beta, raw = jnp.split(self.rates(x).astype(jnp.float32), 2, axis=1)
        decay = -jnp.exp(self.log_decay[...].astype(jnp.float32)) * jax.nn.softplus(
            raw + self.decay_bias[...].astype(jnp.float32))
        y, pages = delta_rule(DeltaInputs(mixed, decay, jax.nn.sigmoid(beta)), conv, pages, meta.table, meta.slot,
                              meta.position, meta.tiles, shape)
        y = self.norm(y.reshape(-1, spec.value_dim)).reshape(tokens, -1)
        y = y * jax.nn.silu(gate.astype(jnp.float32))
        return self.out(y.astype(x.dtype)), pages
