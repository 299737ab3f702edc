"""Products with weights that stay in 4 or 8 bits, as native XLA custom calls on the CPU.

Float32 throughout: results are bitwise those that `native_linear` gives with the same weights widened to float32. How
they lie is said in native/packed_types.h.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpaged.pallas_kernels.native_build import NativeKernel

_LINEAR, _GATED, _LOOK_UP = "jaxpaged_packed_linear", "jaxpaged_packed_gated", "jaxpaged_packed_look_up"


_SCALES = ("F16", "BF16", "F32")
# The types of weights, and how many numbers along the depth a 32-bit word of each holds.
PER_WORD = {"Q4_0": 8, "Q4_1": 8, "Q8_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8} | {
    f"{kind}_{scale}": 32 // int(kind[1]) for kind in ("I4", "I8", "F8") for scale in _SCALES}


def kernel_for(kind: str) -> NativeKernel:
    """The library for weights of a type."""
    return NativeKernel("packed_linear.cc", tuple(f"{name}_{kind}" for name in (_LINEAR, _GATED, _LOOK_UP)),
                        (f"-DJAXPAGED_BLOCK={kind}",))


def linear(x: jax.Array, kind: str, weights: Sequence[jax.Array], *, one_sum: bool = False) -> jax.Array:
    """x [T, in] times weights [in, out].

    Args:
        kind: the weights' type.
        weights: q [out / 16, words, 64] uint8, scales d [out / 16, G, 16] of G groups, and maybe m like d: minimums,
            or zero points in uint8. Those of Q4_K, Q5_K and Q6_K also have s [out / 16, in / 256, 32 or 16], and the
            last two h [out / 16, words, 64].
        one_sum: sum over the whole depth at once, as `native_linear.transposed` does.
    """
    _check(x, kind, weights)
    result = jax.ShapeDtypeStruct((x.shape[0], 16 * weights[0].shape[0]), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(f"{_LINEAR}_{kind}", result)(x, *weights, one_sum=one_sum)
    return product


def gated(x: jax.Array, kind: str, weights: Sequence[jax.Array]) -> jax.Array:
    """silu(x @ gate) * (x @ up) of x [T, in] and weights [in, 2 * out], gate before up (Shazeer, 2020)."""
    _check(x, kind, weights)
    assert weights[0].shape[0] % 2 == 0, weights[0].shape
    result = jax.ShapeDtypeStruct((x.shape[0], 8 * weights[0].shape[0]), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(f"{_GATED}_{kind}", result)(x, *weights)
    return product


def look_up(ids: jax.Array, kind: str, table: Sequence[jax.Array]) -> jax.Array:
    """Rows `ids` [T] of a table [rows, in], which lies as its transpose, weights [in, rows]: [T, in]."""
    result = jax.ShapeDtypeStruct((ids.shape[0], PER_WORD[kind] * table[0].shape[1]), jnp.float32)
    rows: jax.Array = jax.ffi.ffi_call(f"{_LOOK_UP}_{kind}", result)(ids, *table)
    return rows


def _check(x: jax.Array, kind: str, weights: Sequence[jax.Array]) -> None:
    depth, groups = PER_WORD[kind] * weights[0].shape[1], weights[1].shape[1]
    assert x.dtype == jnp.float32 and x.shape[1] == depth and depth % (16 * groups) == 0, (
        x.dtype, x.shape, [leaf.shape for leaf in weights])
