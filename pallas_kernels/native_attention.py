"""Paged attention as a native XLA custom call: the CPU backend's faster path, where a C++ compiler is there."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels.native_build import NativeKernel

KERNEL = NativeKernel("paged_attention.cc", ("jaxpaged_paged_attention",))


def paged_attention(
    q: jax.Array,  # [T, N, H] float32
    k_pool: jax.Array,  # [P, S, K, H] float32
    v_pool: jax.Array,  # [P, S, K, H] float32
    block_table: jax.Array,  # [slots + 1, width] int32; stale entries are fine, out of range ones are not
    slot: jax.Array,  # [T] int32; the tokens of one slot are neighbours, in order; padding has the last slot
    position: jax.Array,  # [T] int32
    scale: float,
) -> jax.Array:  # [T, N, H]
    """Causal attention of each row to its slot's positions 0 to its own; padding rows give zeros.

    A row's result is bitwise the same whatever other rows the step has.
    """
    assert q.dtype == k_pool.dtype == v_pool.dtype == jnp.float32, (q.dtype, k_pool.dtype, v_pool.dtype)
    assert q.shape[1] % k_pool.shape[2] == 0 and k_pool.shape == v_pool.shape, (q.shape, k_pool.shape, v_pool.shape)
    call = jax.ffi.ffi_call(KERNEL.targets[0], jax.ShapeDtypeStruct(q.shape, q.dtype))
    result: jax.Array = call(q, k_pool, v_pool, block_table, slot, position, scale=np.float32(scale))
    return result
