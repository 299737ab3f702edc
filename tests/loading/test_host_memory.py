"""Memory in huge pages holds what it should, whatever the system grants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.loading.host_memory import HostArena, move_zeros_to_huge_pages, return_free_memory, zeros


@pytest.mark.parametrize("sizes", [[0], [1, 63, 64, 65], [3 * 2**20, 5, 2**21]])
def test_arrays_of_an_arena_are_zeroed_aligned_and_apart(sizes: list[int]) -> None:
    arena = HostArena(sum(sizes), len(sizes))
    arrays = [arena.allocate(size) for size in sizes]
    for number, array in enumerate(arrays):
        assert not array.size or array.ctypes.data % 64 == 0  # where nothing lies has no alignment
        assert not array.any()
        array[:] = number + 1
    for number, array in enumerate(arrays):
        assert (array == number + 1).all()


def test_a_full_arena_gives_nothing_more() -> None:
    arena = HostArena(100, 1)
    arena.allocate(100)
    with pytest.raises(AssertionError, match="full"):
        arena.allocate(200)


def test_memory_outlives_its_arena() -> None:
    array = zeros(2**22)
    array[:] = 7
    np.testing.assert_array_equal(array, np.full(2**22, 7, np.uint8))


def test_a_pool_stays_zero_and_its_neighbors_untouched() -> None:
    before, pool, after = jnp.ones(2**21), jnp.zeros(2**22), jnp.ones(2**21)
    move_zeros_to_huge_pages(jax.block_until_ready(pool).unsafe_buffer_pointer(), pool.nbytes)
    return_free_memory()
    assert not np.asarray(pool).any()
    assert np.asarray(before).all() and np.asarray(after).all()
    written = jax.jit(lambda array: array.at[5].set(1), donate_argnums=0)(pool)
    assert float(jnp.sum(written)) == 1
