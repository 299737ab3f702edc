"""Write new keys and values into the page pools, in place when the pools are donated."""

import jax

from jaxpaged.pallas_kernels.kv_pages import KVPages, quantize


def write_kv(
    pages: KVPages,
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    page: jax.Array,  # [T] int32; padding rows point at the null page, which nobody reads
    place: jax.Array,  # [T] int32, 0 to S - 1
) -> KVPages:
    """Return the pools with the T rows written; two rows never share a place outside the null page."""
    k_pool, k_scale = _write(pages.k, pages.k_scale, k, page, place)
    v_pool, v_scale = _write(pages.v, pages.v_scale, v, page, place)
    return KVPages(k_pool, v_pool, k_scale, v_scale)


def _write(
    pool: jax.Array, scales: jax.Array | None, rows: jax.Array, page: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    if scales is not None:
        rows, scale = quantize(rows, pool.dtype)
        scales = scales.at[page, :, place].set(scale, mode="promise_in_bounds")
    return pool.at[page, place].set(rows.astype(pool.dtype), mode="promise_in_bounds"), scales
