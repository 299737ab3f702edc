"""Products with weights, and norms, as native XLA custom calls: the CPU backend's faster path.

It is used where a C++ compiler is installed.

Float32 throughout. A row's result is bitwise the same whatever other rows it is computed with.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels.native_build import NativeKernel

KERNEL = NativeKernel("linear.cc", ("jaxpaged_linear", "jaxpaged_gated", "jaxpaged_transposed", "jaxpaged_rms_norm"))
_LINEAR, _GATED, _TRANSPOSED, _RMS_NORM = KERNEL.targets


def linear(x: jax.Array, weights: Sequence[jax.Array], addend: jax.Array | None = None) -> list[jax.Array]:
    """x [T, in] times each of the weights [in, out]; with a single one, plus `addend` [T, out]."""
    assert addend is None or len(weights) == 1, f"an addend for {len(weights)} products"
    assert all(x.shape[1] == w.shape[0] for w in weights), (x.shape, [w.shape for w in weights])
    added = [] if addend is None else [addend]
    _check_float32(x, *weights, *added)
    results = [jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32) for w in weights]
    return list(jax.ffi.ffi_call(_LINEAR, results)(x, *added, *weights, adds=addend is not None))


def gated(x: jax.Array, weights: jax.Array) -> jax.Array:
    """silu(x @ gate) * (x @ up) of x [T, in] and weights [in, 2 * out], gate before up (Shazeer, 2020)."""
    assert x.shape[1] == weights.shape[0] and weights.shape[1] % 2 == 0, (x.shape, weights.shape)
    _check_float32(x, weights)
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1] // 2), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(_GATED, result)(x, weights)
    return product


def transposed(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x [T, in] times the transpose of weights [out, in]."""
    assert x.shape[1] == weights.shape[1], (x.shape, weights.shape)
    _check_float32(x, weights)
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[0]), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(_TRANSPOSED, result)(x, weights)
    return product


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Each row of x [T, D] over its root mean square, times scale [D] (Zhang and Sennrich, 2019)."""
    assert x.shape[1:] == scale.shape, (x.shape, scale.shape)
    _check_float32(x, scale)
    y: jax.Array = jax.ffi.ffi_call(_RMS_NORM, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, scale, eps=np.float32(eps))
    return y


def _check_float32(*arrays: jax.Array) -> None:
    assert all(array.dtype == jnp.float32 for array in arrays), [array.dtype for array in arrays]
