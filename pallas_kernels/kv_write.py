"""Write new keys and values into the page pools, in place when the pools are donated."""

import jax


def write_kv(
    k_pool: jax.Array,  # [P, S, K, H]
    v_pool: jax.Array,  # [P, S, K, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    page: jax.Array,  # [T] int32; padding rows point at the null page, which nobody reads
    place: jax.Array,  # [T] int32, 0 to S - 1
) -> tuple[jax.Array, jax.Array]:
    """Return the pools with the T rows written; two rows never share a place outside the null page."""
    k_pool = k_pool.at[page, place].set(k.astype(k_pool.dtype), mode="promise_in_bounds")
    v_pool = v_pool.at[page, place].set(v.astype(v_pool.dtype), mode="promise_in_bounds")
    return k_pool, v_pool
