"""Products with weights, and norms, as native XLA custom calls: the CPU backend's faster path.

It is used where a C++ compiler is installed.

Float32 throughout, but weights may be stored in 16 bits: results are bitwise those of the same numbers in float32. A
row's result is bitwise the same whatever other rows it is computed with.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels.native_build import NativeKernel

_PRODUCTS = ("jaxpaged_linear", "jaxpaged_gated", "jaxpaged_transposed")
KERNEL = NativeKernel("linear.cc", (*_PRODUCTS, "jaxpaged_rms_norm"))
_LINEAR, _GATED, _TRANSPOSED, _RMS_NORM = KERNEL.targets
_SUFFIXES = {"float32": "", "bfloat16": "_bf16", "float16": "_f16"}


def kernel_for(dtype: str) -> NativeKernel:
    """The library for weights of this dtype. That of float32 has the norms as well."""
    suffix = _SUFFIXES[dtype]
    if not suffix:
        return KERNEL
    return NativeKernel("linear.cc", tuple(name + suffix for name in _PRODUCTS),
                        (f"-DJAXPAGED_STORED_16={suffix.removeprefix('_')}",))


def linear(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x [T, in] times weights [in, out]."""
    assert x.shape[1] == weights.shape[0], (x.shape, weights.shape)
    _check_float32(x)
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(_target(_LINEAR, weights), result)(x, weights)
    return product


def gated(x: jax.Array, weights: jax.Array) -> jax.Array:
    """silu(x @ gate) * (x @ up) of x [T, in] and weights [in, 2 * out], gate before up (Shazeer, 2020)."""
    assert x.shape[1] == weights.shape[0] and weights.shape[1] % 2 == 0, (x.shape, weights.shape)
    _check_float32(x)
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1] // 2), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(_target(_GATED, weights), result)(x, weights)
    return product


def transposed(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x [T, in] times the transpose of weights [out, in]."""
    assert x.shape[1] == weights.shape[1], (x.shape, weights.shape)
    _check_float32(x)
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[0]), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(_target(_TRANSPOSED, weights), result)(x, weights)
    return product


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Each row of x [T, D] over its root mean square, times scale [D] (Zhang and Sennrich, 2019)."""
    assert x.shape[1:] == scale.shape, (x.shape, scale.shape)
    _check_float32(x, scale)
    y: jax.Array = jax.ffi.ffi_call(_RMS_NORM, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, scale, eps=np.float32(eps))
    return y


def _check_float32(*arrays: jax.Array) -> None:
    assert all(array.dtype == jnp.float32 for array in arrays), [array.dtype for array in arrays]


def _target(product: str, weights: jax.Array) -> str:
    """The custom call for weights of this dtype."""
    return product + _SUFFIXES[weights.dtype.name]
