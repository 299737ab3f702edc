"""Building blocks of the decoders.

Axis letters: T tokens, D model, N query heads, K kv heads, H head dim, F mlp, V vocab.

Norms, rotary angles and logits are computed in float32 whatever the weights' dtype.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import NormSpec
from jaxpaged.pallas_kernels import native_linear

MeshAxes = tuple[str, ...] | None


class Linear(nnx.Module):
    """y = x @ kernel (+ bias); kernel is [in, out], the faster way round on every backend.

    `sum_over` names the mesh axes that share the rows of the kernel: their products are added up.
    `native`: see `use_native_products`. On a mesh a fused axis is two, of which the first is 1 here: see `FusedAxis`.
    """

    def __init__(
        self, size_in: int, size_out: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs, sum_over: MeshAxes = None
    ) -> None:
        draw = jax.random.normal(rngs.params(), (size_in, size_out), jnp.float32) * size_in**-0.5
        self.kernel = nnx.Param(draw.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if bias else None
        self.sum_over = sum_over
        self.native = False

    @property
    def weights(self) -> jax.Array:
        """The kernel [in, out]."""
        kernel = self.kernel[...]
        return kernel.reshape(kernel.shape[0], -1)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [T, out]."""
        y = native_linear.linear(x, self.weights) if self.native else x @ self.weights
        y = jax.lax.psum(y, self.sum_over) if self.sum_over else y
        return y if self.bias is None else y + self.bias[...].reshape(-1)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, V] float32
        """As an output head: not rounded to the weights' dtype."""
        if self.native or self.kernel[...].dtype == jnp.float32:
            return self(x)
        y = jnp.einsum("bd,dv->bv", x, self.weights, preferred_element_type=jnp.float32)
        return y if self.bias is None else y + self.bias[...]


class Norm(nnx.Module):
    """A root mean square norm (Zhang and Sennrich, 2019) or, with a mean, a layer norm, in float32; see `NormSpec`.

    It is over the last axis, of which the mesh axes `mean_over` have equal parts.
    """

    def __init__(
        self, size: int | tuple[int, ...], spec: NormSpec, *, dtype: jnp.dtype, mean_over: MeshAxes = None
    ) -> None:
        self.scale = nnx.Param(jnp.zeros(size, dtype) if spec.plus_one else jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if spec.bias else None
        self.spec = spec
        self.mean_over = mean_over
        self.native = False

    def __call__(self, x: jax.Array) -> jax.Array:
        spec, scale = self.spec, self.scale[...].astype(jnp.float32)
        if spec.plus_one:
            scale = 1 + scale
        if self.native and scale.ndim == 1 and not (spec.mean or spec.bias or self.mean_over):
            return native_linear.rms_norm(x, scale, spec.eps)
        wide = x.astype(jnp.float32)
        if spec.mean:
            wide = wide - self._mean(wide)
        wide = wide * jax.lax.rsqrt(self._mean(wide * wide) + spec.eps) * scale
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)

    def _mean(self, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        return jax.lax.pmean(mean, self.mean_over) if self.mean_over else mean


class Embedding(nnx.Module):
    """Token table [V, D]; also the output head of models with tied embeddings.

    `axis` names the mesh axes that share the rows of the table; each device then has its own columns of the logits.
    """

    def __init__(
        self, vocab_size: int, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        draw = jax.random.normal(rngs.params(), (vocab_size, model_dim), jnp.float32) * model_dim**-0.5
        self.table = nnx.Param(draw.astype(dtype))
        self.axis = axis
        self.native = False

    def __call__(self, ids: jax.Array) -> jax.Array:  # [T] -> [T, D]
        table = self.table[...]
        if not self.axis:
            return self._widened(table[ids])
        row = ids - jax.lax.axis_index(self.axis) * table.shape[0]
        mine = (row >= 0) & (row < table.shape[0])
        found = jnp.where(mine[:, None], table[jnp.where(mine, row, 0)], 0)
        return self._widened(jax.lax.psum(found, self.axis))  # of one row and zeros

    def _widened(self, rows: jax.Array) -> jax.Array:
        return rows.astype(jnp.float32) if self.native else rows

    def logits(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, V] float32
        if self.native:
            return native_linear.transposed(x, self.table[...])
        return jnp.einsum("bd,vd->bv", x, self.table[...], preferred_element_type=jnp.float32)


def use_native_products(model: nnx.Module) -> None:
    """From now on all products with the model's weights, and norms, run in the native CPU kernels.

    Activations are float32; the weights may be stored in 16 bits.
    """
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Linear | Embedding | Norm):
            module.native = True
