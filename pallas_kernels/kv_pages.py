"""One layer's page pools: keys and values by page, and their scales where they are stored in 8 bits.

The layout is [P, S, K, H] on every platform. For the GPU kernels [P, K, S, H] would work as well: both compile to the
same loads, 16 bytes per thread along H, and a (page, head) is a plain box of memory for TMA in either. The CPU paths
read all heads of a token together, which are neighbors in this layout. Scales are [P, K, S]: a GPU program reads one
head's scales of many tokens, and these are then neighbors.

Axis letters: P pages, S page size, K kv heads, H head dim, T tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVPages(NamedTuple):
    """One layer's pools; axis 0 of every array is the block."""

    k: jax.Array  # [P, S, K, H]
    v: jax.Array  # [P, S, K, H]
    k_scale: jax.Array | None = None  # [P, K, S] float32: a key is its stored numbers times its scale
    v_scale: jax.Array | None = None  # [P, K, S] float32


class LatentPages(NamedTuple):
    """One layer's pool of latents, which all heads' keys and values are made of; axis 0 is the block."""

    latent: jax.Array  # [P, S, 1, H]
    scale: jax.Array | None = None  # [P, 1, S] float32, as a key's

    @property
    def as_keys_and_values(self) -> KVPages:
        """What attention over latents reads: each is its own value."""
        return KVPages(self.latent, self.latent, self.scale, self.scale)


Pages = KVPages | LatentPages

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}  # dtypes that need scales


def page_dtype(name: str, model_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that --kv-cache-dtype names."""
    return jnp.dtype({"auto": model_dtype, "fp8": jnp.float8_e4m3fn}.get(name, name))


def max_addressable(num_pages: int, page_numbers: int, dtype: jnp.dtype) -> int:
    """The maximum number of pages, up to `num_pages`, that the GPU kernels can address in one array.

    Triton indexes arrays of up to 4 GiB with 31 bits: too few for one-byte numbers beyond 2 GiB.
    """
    if jnp.dtype(dtype).itemsize == 1 and 2**31 <= num_pages * page_numbers <= 2**32:
        return (2**31 - 1) // page_numbers
    return num_pages


def is_scaled(dtype: jnp.dtype) -> bool:
    """Whether pages of this dtype come with scales."""
    return jnp.dtype(dtype) in LARGEST


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Store x [..., H] in 8 bits, with one scale per row.

    Returns:
        The stored numbers [..., H] of `dtype`, and the scales [...] float32: the row's largest magnitude over the
        dtype's, so that nothing overflows; 1 for a row of zeros, and NaN or infinity for a row that has any.
    """
    largest = LARGEST[jnp.dtype(dtype)]
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / largest
    scale = jnp.where(scale == 0, 1.0, scale)
    stored = jnp.where(jnp.isfinite(scale)[..., None], wide / scale[..., None], 0)
    if jnp.issubdtype(dtype, jnp.integer):
        stored = jnp.round(stored)
    return stored.astype(dtype), scale


def write_kv(
    pages: KVPages,
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    page: jax.Array,  # [T] int32; padding rows point at the null page, which is never read
    offset: jax.Array,  # [T] int32, 0 to S - 1
) -> KVPages:
    """The pools with T distinct rows written, in place when donated; padding rows may coincide."""
    k_pool, k_scale = _write(pages.k, pages.k_scale, k, page, offset)
    v_pool, v_scale = _write(pages.v, pages.v_scale, v, page, offset)
    return KVPages(k_pool, v_pool, k_scale, v_scale)


def write_latents(
    pages: LatentPages,
    rows: jax.Array,  # [T, 1, H]
    page: jax.Array,  # [T] int32; padding rows point at the null page, which is never read
    offset: jax.Array,  # [T] int32, 0 to S - 1
) -> LatentPages:
    """The pool with T distinct rows written, in place when donated; padding rows may coincide."""
    return LatentPages(*_write(pages.latent, pages.scale, rows, page, offset))


def _write(
    pool: jax.Array, scales: jax.Array | None, rows: jax.Array, page: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    if scales is not None:
        rows, scale = quantize(rows, pool.dtype)
        scales = scales.at[page, :, offset].set(scale, mode="promise_in_bounds")
    return pool.at[page, offset].set(rows.astype(pool.dtype), mode="promise_in_bounds"), scales
