"""Building blocks of the decoders.

Axis letters: T tokens, D model, N query heads, K kv heads, H head dim, F mlp, V vocab.

Norms, rotary angles and logits are computed in float32 whatever the weights' dtype.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import NormSpec
from jaxpaged.models.quantization import PANEL, PackedType
from jaxpaged.pallas_kernels import native_linear, native_packed

MeshAxes = tuple[str, ...] | None


class Packed(nnx.Module):
    """Weights [in, out] of 4 or 8 bits, in place of an array: see `PackedType`. Their products are native ones."""

    def __init__(self, kind: PackedType, size_in: int, size_out: int) -> None:
        self.kind = kind
        shapes = kind.shapes(size_in, size_out)
        self.q = nnx.Param(jnp.zeros(shapes["q"].shape, shapes["q"].dtype))
        self.d = nnx.Param(jnp.zeros(shapes["d"].shape, shapes["d"].dtype))
        self.m, self.s, self.h = (nnx.Param(jnp.zeros(shapes[name].shape, shapes[name].dtype))
                                  if name in shapes else None for name in "msh")
        self.order = nnx.Param(jnp.zeros(size_in, jnp.int32)) if "order" in shapes else None

    @property
    def arrays(self) -> list[jax.Array]:
        """q, d and those of m, s and h that there are, each with three axes on a mesh too."""
        leaves = self.q, self.d, self.m, self.s, self.h
        return [leaf[...].reshape(-1, *leaf[...].shape[-2:]) for leaf in leaves if leaf is not None]

    def linear(self, x: jax.Array, *, one_sum: bool = False) -> jax.Array:
        """[T, in] -> [T, out]; see `native_packed.linear`."""
        return native_packed.linear(self._ordered(x), self.kind.name, self.arrays, one_sum=one_sum)

    def gated(self, x: jax.Array) -> jax.Array:
        """See `native_packed.gated`."""
        return native_packed.gated(self._ordered(x), self.kind.name, self.arrays)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """See `native_packed.look_up`."""
        return native_packed.look_up(ids, self.kind.name, self.arrays)

    def _ordered(self, x: jax.Array) -> jax.Array:
        return x if self.order is None else x[:, self.order[...]]


class Linear(nnx.Module):
    """y = x @ kernel (+ bias); kernel is [in, out], the faster way round on every backend.

    `sum_over` names the mesh axes that share the rows of the kernel: their products are added up.
    `native`: see `use_native_products`. On a mesh a fused axis is two, of which the first is 1 here: see `FusedAxis`.
    """

    kernel: nnx.Param[jax.Array] | Packed

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
        assert not isinstance(self.kernel, Packed)
        kernel = self.kernel[...]
        return kernel.reshape(kernel.shape[0], -1)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [T, out]."""
        y = self._product(x)
        y = jax.lax.psum(y, self.sum_over) if self.sum_over else y
        return y if self.bias is None else y + self.bias[...].reshape(-1)

    def gated(self, x: jax.Array) -> jax.Array:
        """silu(x @ gate) * (x @ up) of a kernel [gate | up] without a bias, in the native kernels."""
        if isinstance(self.kernel, Packed):
            return self.kernel.gated(x)
        return native_linear.gated(x, self.weights)

    def _product(self, x: jax.Array) -> jax.Array:
        if isinstance(self.kernel, Packed):
            return self.kernel.linear(x)
        return native_linear.linear(x, self.weights) if self.native else x @ self.weights

    def logits(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, V] float32
        """As an output head: not rounded to the weights' dtype."""
        if self.native or self.weights.dtype == jnp.float32:
            return self(x)
        y = jnp.einsum("bd,dv->bv", x, self.weights, preferred_element_type=jnp.float32)
        return y if self.bias is None else y + self.bias[...]


class ExpertKernels(nnx.Module):
    """The weights of the same product in every expert of a layer: kernel [E, in, out], and bias [E, out].

    `native`: see `use_native_products`. On a mesh a fused axis is two, of which the first is 1 here: see `FusedAxis`.
    """

    def __init__(
        self, count: int, size_in: int, size_out: int, *, bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        draw = jax.random.normal(rngs.params(), (count, size_in, size_out), jnp.float32) * size_in**-0.5
        self.kernel = nnx.Param(draw.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((count, size_out), dtype)) if bias else None
        self.native = False

    @property
    def weights(self) -> jax.Array:
        """The kernels [E, in, out]."""
        kernel = self.kernel[...]
        return kernel.reshape(*kernel.shape[:2], -1)

    @property
    def biases(self) -> jax.Array | None:
        """The biases [E, out]."""
        return None if self.bias is None else self.bias[...].reshape(len(self.bias[...]), -1)


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

    table: nnx.Param[jax.Array] | Packed

    def __init__(
        self, vocab_size: int, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        draw = jax.random.normal(rngs.params(), (vocab_size, model_dim), jnp.float32) * model_dim**-0.5
        self.table = nnx.Param(draw.astype(dtype))
        self.axis = axis
        self.native = False

    def __call__(self, ids: jax.Array) -> jax.Array:  # [T] -> [T, D]
        if not self.axis:
            return self._rows(ids)
        count = PANEL * self.table.arrays[0].shape[0] if isinstance(self.table, Packed) else self.table[...].shape[0]
        row = ids - jax.lax.axis_index(self.axis) * count
        mine = (row >= 0) & (row < count)
        found = jnp.where(mine[:, None], self._rows(jnp.where(mine, row, 0)), 0)
        return jax.lax.psum(found, self.axis)  # of one row and zeros

    def _rows(self, ids: jax.Array) -> jax.Array:
        if isinstance(self.table, Packed):
            return self.table.look_up(ids)
        rows = self.table[...][ids]
        return rows.astype(jnp.float32) if self.native else rows

    def logits(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, V] float32
        if isinstance(self.table, Packed):
            return self.table.linear(x, one_sum=True)
        if self.native:
            return native_linear.transposed(x, self.table[...])
        return jnp.einsum("bd,vd->bv", x, self.table[...], preferred_element_type=jnp.float32)


def keep_packed(model: nnx.Module, packed: Mapping[str, PackedType]) -> None:
    """Put packed weights in the place of those of the modules at these paths.

    Args:
        packed: see `QuantScheme.packed`.
    """
    for path, module in nnx.iter_graph(model):
        kind = packed.get(".".join(map(str, path)))
        if kind is None:
            continue
        if isinstance(module, Linear):
            module.kernel = Packed(kind, *module.weights.shape)
        elif isinstance(module, Embedding) and not isinstance(module.table, Packed):
            module.table = Packed(kind, *module.table[...].shape[::-1])


def use_native_products(model: nnx.Module) -> None:
    """From now on all products with the model's weights, and norms, run in the native CPU kernels.

    Activations are float32; the weights may be stored in 16 bits or in blocks.
    """
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Linear | Embedding | Norm | ExpertKernels):
            module.native = True
