"""The recurrent state of a sequence in pages of the pool: float32 numbers, whatever the pages' dtype is.

A state takes as many whole pages as it needs. Each page has its part of the keys' array first, then that of the values.
Scales of pages in 8 bits are not used. The bits stay the same, with one exception: XLA's CPU moves pages of 16 bits
through float32. Where one half of a number would be a NaN of 16 bits it becomes another NaN; the number changes by less
than 2**-16 of itself.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.pallas_kernels.kv_pages import KVPages

WORD = 4  # bytes of a number


def units_for_state(size: int, page_numbers: int, itemsize: int) -> int:
    """Pages that a state takes.

    Args:
        size: its numbers.
        page_numbers: numbers of a page's keys, and of its values.
        itemsize: bytes of each.
    """
    return -(-size // (2 * (page_numbers * itemsize // WORD)))


def read_state(pages: KVPages, units: jax.Array, size: int) -> jax.Array:
    """The state [size] float32 in pages `units` [n]."""
    return jnp.concatenate([_words(pages.k[units]), _words(pages.v[units])], axis=1).reshape(-1)[:size]


def write_state(pages: KVPages, units: jax.Array, state: jax.Array) -> KVPages:
    """The pages with a state [size] in `units` [n]."""
    words = _words(pages.k[units]).shape[1]
    parts = jnp.pad(state, (0, units.shape[0] * 2 * words - state.shape[0])).reshape(units.shape[0], 2, words)
    k, v = (pool.at[units].set(_numbers(parts[:, index], pool), mode="promise_in_bounds")
            for index, pool in enumerate((pages.k, pages.v)))
    return pages._replace(k=k, v=v)


def _words(pages: jax.Array) -> jax.Array:
    """[n, S, K, H] -> [n, words] float32."""
    rows, itemsize = pages.reshape(pages.shape[0], -1), pages.dtype.itemsize
    if itemsize == WORD:
        return rows
    return lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, WORD // itemsize), jnp.float32)


def _numbers(words: jax.Array, pool: jax.Array) -> jax.Array:
    """[n, words] float32 -> [n, S, K, H] of the pool's dtype."""
    numbers = words if pool.dtype.itemsize == WORD else lax.bitcast_convert_type(words, pool.dtype)
    return numbers.reshape(-1, *pool.shape[1:])
