"""A mixture of experts as one native XLA custom call: the CPU backend's faster path.

It is used where a C++ compiler is installed. Float32 throughout, but weights may be stored in 16 bits, both products'
in the same; results are bitwise those of the same numbers in float32. A row's result is bitwise the same whatever other
rows it is computed with.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels.native_build import NativeKernel

_SUFFIXES = {"float32": "", "bfloat16": "_bf16", "float16": "_f16"}


def kernel_for(dtype: str) -> NativeKernel:
    """The library for weights of this dtype."""
    suffix = _SUFFIXES[dtype]
    flags = (f"-DJAXPAGED_STORED_16={suffix.removeprefix('_')}",) if suffix else ()
    return NativeKernel("experts.cc", (f"jaxpaged_experts{suffix}",), flags)


def experts(
    x: jax.Array,  # [T, D]
    expert: jax.Array,  # [T, k] int32; E: sent nowhere
    weight: jax.Array,  # [T, k]
    gate_up: jax.Array,  # [E, D, 2 * F], gate before up
    down: jax.Array,  # [E, F, D]
    bias: jax.Array | None = None,  # [E, 2 * F] float32, of gate and up
    clamp: tuple[float, float] | None = None,
) -> jax.Array:  # [T, D]
    """The weighted sum of silu(x @ gate) * (x @ up) @ down over each token's experts.

    Args:
        clamp: (limit, growth): the gate, bounded from above, is multiplied by the sigmoid of itself times growth, and
            with the bounded other product plus 1, in place of silu.
    """
    assert gate_up.shape == (down.shape[0], x.shape[1], 2 * down.shape[1]), (x.shape, gate_up.shape, down.shape)
    assert down.shape[2] == x.shape[1] and expert.shape == weight.shape, (down.shape, expert.shape, weight.shape)
    assert x.dtype == weight.dtype == jnp.float32 and gate_up.dtype == down.dtype, (x.dtype, gate_up.dtype, down.dtype)
    call = jax.ffi.ffi_call(f"jaxpaged_experts{_SUFFIXES[down.dtype.name]}", jax.ShapeDtypeStruct(x.shape, x.dtype))
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias
    limit, growth = clamp or (0.0, 1.0)
    assert bias.dtype == jnp.float32 and bias.shape in ((0,), (len(down), 2 * down.shape[1])), bias
    result: jax.Array = call(x, expert, weight, gate_up, down, bias, limit=np.float32(limit), growth=np.float32(growth))
    return result
