"""Building blocks of the decoders.

Axis letters: T tokens, D model, N query heads, K kv heads, H head dim, F mlp, V vocab.

Norms, rotary angles and logits are computed in float32 whatever the weights' dtype.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import RopeConfig
from jaxpaged.pallas_kernels import native_linear

MeshAxes = tuple[str, ...] | None


class Linear(nnx.Module):
    """y = x @ kernel (+ bias); kernel is [in, out], the faster way round on every backend.

    `sum_over` names the mesh axes that share the rows of the kernel: their products are added up.
    `native`: see `use_native_products`.
    """

    def __init__(
        self, size_in: int, size_out: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs, sum_over: MeshAxes = None
    ) -> None:
        draw = jax.random.normal(rngs.params(), (size_in, size_out), jnp.float32) * size_in**-0.5
        self.kernel = nnx.Param(draw.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if bias else None
        self.sum_over = sum_over
        self.native = False

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """[T, in] -> [T, out], plus `residual` [T, out]."""
        if residual is None:
            return apply_linear(x, self)[0]
        if self.native and self.bias is None and not self.sum_over:
            return native_linear.linear(x, [self.kernel[...]], residual)[0]
        return residual + apply_linear(x, self)[0]

    def logits(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, V] float32
        """As an output head: not rounded to the weights' dtype."""
        if self.kernel[...].dtype == jnp.float32:
            return self(x)
        y = jnp.einsum("bd,dv->bv", x, self.kernel[...], preferred_element_type=jnp.float32)
        return y if self.bias is None else y + self.bias[...]


def apply_linear(x: jax.Array, *layers: Linear) -> list[jax.Array]:
    """x through each of the layers: natively one call, which suits layers of few columns."""
    kernels = [layer.kernel[...] for layer in layers]
    products = native_linear.linear(x, kernels) if layers[0].native else [x @ kernel for kernel in kernels]
    results = []
    for layer, y in zip(layers, products, strict=True):
        y = jax.lax.psum(y, layer.sum_over) if layer.sum_over else y
        results.append(y if layer.bias is None else y + layer.bias[...])
    return results


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps
        self.native = False

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.native:
            return native_linear.rms_norm(x, self.scale[...], self.eps)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


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
            return table[ids]
        row = ids - jax.lax.axis_index(self.axis) * table.shape[0]
        mine = (row >= 0) & (row < table.shape[0])
        found = jnp.where(mine[:, None], table[jnp.where(mine, row, 0)], 0)
        return jax.lax.psum(found, self.axis)  # of one row and zeros

    def logits(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, V] float32
        if self.native:
            return native_linear.transposed(x, self.table[...])
        return jnp.einsum("bd,vd->bv", x, self.table[...], preferred_element_type=jnp.float32)


class GatedMLP(nnx.Module):
    """residual + down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(
        self, model_dim: int, mlp_dim: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        self.gate = Linear(model_dim, mlp_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear(model_dim, mlp_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(mlp_dim, model_dim, bias=bias, dtype=dtype, rngs=rngs, sum_over=axis)

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        if self.gate.native and self.gate.bias is None:
            return self.down(native_linear.gated(x, self.gate.kernel[...], self.up.kernel[...]), residual)
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x), residual)


def use_native_products(model: nnx.Module) -> None:
    """From now on all products with the model's weights, float32, and norms run in the native CPU kernels."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Linear | Embedding | RMSNorm):
            module.native = True


def rotary_angles(position: jax.Array, head_dim: int, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, H // 2] float32 of each token's rotary angles (Su et al., 2021).

    Angles come from integer positions in float32 whatever the weights' dtype: half precision cannot count to 2,049.
    """
    frequency = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    scaling = dict(rope.scaling)
    if rope.kind == "linear":
        frequency = frequency / scaling["factor"]
    elif rope.kind == "llama3":
        frequency = _llama3_frequency(frequency, scaling)
    elif rope.kind == "yarn":
        frequency = _yarn_frequency(frequency, rope.theta, scaling)
    angle = position.astype(jnp.float32)[:, None] * frequency[None, :]
    magnitude = scaling.get("attention_factor", 1.0)
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def _llama3_frequency(frequency: jax.Array, scaling: dict[str, float]) -> jax.Array:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * jnp.pi)
    smooth = jnp.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn_frequency(frequency: jax.Array, theta: float, scaling: dict[str, float]) -> jax.Array:
    """Slow frequencies divided by the factor, fast ones as they are, a ramp between (YaRN; Peng et al., 2023)."""
    size = 2 * len(frequency)

    def pair(turns: float) -> float:
        """The pair that turns so often in the original context."""
        context = scaling["original_max_position_embeddings"]
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling["beta_fast"]), pair(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    slow = jnp.clip((jnp.arange(len(frequency)) - low) / (high - low or 1e-3), 0, 1)
    return slow * frequency / scaling["factor"] + (1 - slow) * frequency


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary angles [T, H // 2] to x [T, heads, H]; first and second half of H form the pairs."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
