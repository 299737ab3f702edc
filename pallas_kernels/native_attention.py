"""Rotary embedding, KV write and paged attention as native XLA custom calls: the CPU backend's faster path.

It is used where a C++ compiler is installed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.heads import Heads
from jaxpaged.pallas_kernels.native_build import NativeKernel

KERNEL = NativeKernel("paged_attention.cc", ("jaxpaged_paged_attention", "jaxpaged_rotary_kv_write"))
_ATTENTION, _ROTARY_KV_WRITE = KERNEL.targets


def paged_attention(
    q: jax.Array,  # [T, N, H] float32
    k_pool: jax.Array,  # [P, S, K, H] float32
    v_pool: jax.Array,  # [P, S, K, V] float32; V may differ from H
    block_table: jax.Array,  # [slots + 1, width] int32; stale entries are fine, out of range ones are not
    slot: jax.Array,  # [T] int32; the tokens of one slot are neighbors, in order; padding has the last slot
    position: jax.Array,  # [T] int32
    rule: AttentionRule,
    bias: HeadBias,
) -> jax.Array:  # [T, N, V]
    """Attention of each row to its slot's positions up to its own, by the rule; padding rows give zeros.

    Nothing before the windows is read, neither pages nor their numbers in the block table. A row's result is bitwise
    the same whatever other rows the step has.
    """
    assert q.dtype == k_pool.dtype == v_pool.dtype == jnp.float32, (q.dtype, k_pool.dtype, v_pool.dtype)
    assert q.shape[1] % k_pool.shape[2] == 0 and k_pool.shape[:3] == v_pool.shape[:3] and (
        q.shape[2] == k_pool.shape[3]), (q.shape, k_pool.shape, v_pool.shape)
    slopes, sinks = (jnp.zeros(0, jnp.float32) if array is None else array for array in bias)
    call = jax.ffi.ffi_call(_ATTENTION, jax.ShapeDtypeStruct((*q.shape[:2], v_pool.shape[3]), q.dtype))
    result: jax.Array = call(q, k_pool, v_pool, block_table, slot, position, slopes, sinks,
                             scale=np.float32(rule.scale), softcap=np.float32(rule.softcap or 0),
                             window=np.int64(rule.window or 0))
    return result


def rotary_kv_write(
    q: jax.Array | Heads,  # [T, N, H] float32
    k: jax.Array | Heads,  # [T, K, H] float32
    v: jax.Array | Heads,  # [T, K, H] float32
    cos: jax.Array,  # [T, H // 2] float32
    sin: jax.Array,  # [T, H // 2] float32
    page: jax.Array,  # [T] int32; padding rows point at the null page, which is never read
    offset: jax.Array,  # [T] int32, 0 to S - 1
    k_pool: jax.Array,  # [P, S, K, H] float32
    v_pool: jax.Array,  # [P, S, K, H] float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotate q and k by the rotary angles, and write k and v into the pools, in place where these are donated.

    Returns:
        The rotated q, and both pools.
    """
    q, k, v = Heads.of(q), Heads.of(k), Heads.of(v)
    arrays = [q.array, k.array, v.array]
    assert all(array.dtype == jnp.float32 for array in (*arrays, k_pool, v_pool)), [array.dtype for array in arrays]
    assert k.shape == v.shape == (k.shape[0], *k_pool.shape[2:]) and k_pool.shape == v_pool.shape, (
        k.shape, v.shape, k_pool.shape, v_pool.shape)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, k_pool.shape, v_pool.shape)]
    call = jax.ffi.ffi_call(_ROTARY_KV_WRITE, results, input_output_aliases={7: 1, 8: 2})
    turned, k_pool, v_pool = call(*arrays, cos, sin, page, offset, k_pool, v_pool, first_q=np.int64(q.first),
                                  first_k=np.int64(k.first), first_v=np.int64(v.first))
    return turned, k_pool, v_pool
