"""The native CPU attention kernel against float64 NumPy and the plain specification."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import native_attention, reference
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.native_build import build
from tests.pallas_kernels import test_rotary_kv_write as rotary
from tests.pallas_kernels.test_paged_attention import Batch, Piece, Shape, expected, make_batch

CHUNK = 32  # tokens of context between two updates of the kernel's softmax


@pytest.fixture(scope="module", autouse=True)
def built(native_folder: Path) -> None:
    failure = build(native_folder, [native_attention.KERNEL])
    if failure:
        pytest.skip(f"the native kernel cannot be built here: {failure}")


@cache
def compiled(scale: float) -> Callable[..., jax.Array]:
    @jax.jit
    def run(q: Any, k_pool: Any, v_pool: Any, table: Any, slot: Any, position: Any) -> jax.Array:
        return native_attention.paged_attention(q, k_pool, v_pool, table, slot, position, scale)

    return run


def run(batch: Batch, scale: float) -> np.ndarray:
    return np.asarray(compiled(scale)(batch.q, batch.k_pool, batch.v_pool, batch.block_table, batch.slot,
                                      batch.position))


def check(shape: Shape, pieces: Sequence[Piece], seed: int = 0, *, tolerance: float = 2e-6, **how: Any) -> None:
    """Compare with float64; every place that must not be read holds NaN, unless `how` says otherwise."""
    assert sum(piece.new for piece in pieces) <= shape.tokens and len(pieces) <= shape.slots
    batch = make_batch(shape, pieces, np.random.default_rng(seed), **how)
    scale = shape.head_dim**-0.5
    np.testing.assert_allclose(run(batch, scale), expected(batch, pieces, scale), rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 63, 64, 65, 96])
def test_one_row_at_every_border(context: int) -> None:
    check(Shape(tokens=1), [Piece(context)])


@pytest.mark.parametrize("new", [2, 3, 15, 16, 17, 31, 33, 48])
@pytest.mark.parametrize("before", [0, 1, 15, 16, 17, 31, 32, 40])
def test_prefill_pieces_of_every_alignment(before: int, new: int) -> None:
    check(Shape(), [Piece(before + new, new)])


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_group_sizes(group: int, kv_heads: int) -> None:
    check(Shape(group=group, kv_heads=kv_heads), [Piece(40), Piece(30, 20), Piece(7, 7)])


@pytest.mark.parametrize("head_dim", [1, 4, 16, 20, 24, 64, 80, 96, 128])
def test_head_dims(head_dim: int) -> None:
    check(Shape(head_dim=head_dim, group=3), [Piece(37), Piece(50, 30)])


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    pieces = [Piece(block_size - 1), Piece(block_size), Piece(block_size + 1), Piece(2 * block_size + 3, 20)]
    check(Shape(block_size=block_size), pieces)


def test_a_group_larger_than_a_tile() -> None:
    check(Shape(tokens=8, kv_heads=1, group=130), [Piece(20, 3), Piece(40)])


def test_one_more_row_than_a_tile_holds() -> None:
    check(Shape(tokens=256, group=3, width=20), [Piece(290, 193), Piece(100)])


def test_mixed_batch_with_shared_pages() -> None:
    check(Shape(tokens=64, group=3), [Piece(40), Piece(64, 20), Piece(33), Piece(96, 31)], share=True)


def test_long_context() -> None:
    shape = Shape(tokens=64, group=3, width=256, num_pages=600)
    check(shape, [Piece(4096), Piece(4080, 40)], tolerance=5e-6)


def test_large_scores() -> None:
    """Far beyond what exp can hold without the highest score taken off."""
    check(Shape(), [Piece(90), Piece(60, 30)], scale=20.0, tolerance=2e-3)


def test_padding_gives_zeros_whatever_the_queries_hold() -> None:
    shape = Shape(tokens=32)
    batch = make_batch(shape, [Piece(20, 3)], np.random.default_rng(0))
    batch.q[3:] = np.nan
    assert not run(batch, 0.25)[3:].any()
    batch.slot[:] = shape.slots
    assert not run(batch, 0.25).any()


def test_agrees_with_the_plain_specification() -> None:
    batch = make_batch(Shape(), [Piece(40), Piece(60, 30)], np.random.default_rng(3), unread=0)
    q, k_pool, v_pool, table = map(jnp.asarray, (batch.q, batch.k_pool, batch.v_pool, batch.block_table))
    slot, position = jnp.asarray(batch.slot), jnp.asarray(batch.position)
    pages = KVPages(k_pool, v_pool)
    wanted = reference.paged_attention(q, pages, table, slot, position, AttentionRule(0.3), HeadBias())
    np.testing.assert_allclose(run(batch, 0.3)[:31], wanted[:31], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("pool", ["keys", "values"])
@pytest.mark.parametrize("place", [0, 5, 40, 59])
def test_nan_reaches_the_rows_that_see_it_and_no_others(pool: str, place: int) -> None:
    """A tile's later rows read what its earlier ones must not notice."""
    shape = Shape(kv_heads=1, group=3)
    batch = make_batch(shape, [Piece(60, 30), Piece(50)], np.random.default_rng(1))
    clean = run(batch, 0.25)
    array = batch.k_pool if pool == "keys" else batch.v_pool
    array[batch.block_table[batch.slot[0], place // 16], place % 16] = np.nan
    found = run(batch, 0.25)
    sees = np.zeros(shape.tokens, bool)
    sees[:30] = batch.position[:30] >= place
    assert np.isnan(found[sees]).all()
    np.testing.assert_array_equal(found[~sees], clean[~sees])


def test_a_nan_query_stays_in_its_head() -> None:
    batch = make_batch(Shape(), [Piece(60, 30)], np.random.default_rng(1))
    clean = run(batch, 0.25)
    batch.q[7, 2, 3] = np.nan
    found = run(batch, 0.25).copy()
    assert np.isnan(found[7, 2]).all()
    found[7, 2] = clean[7, 2]
    np.testing.assert_array_equal(found, clean)


def test_a_row_is_bitwise_the_same_in_any_batch() -> None:
    batch = make_batch(Shape(tokens=64, group=3), [Piece(64, 40), Piece(50), Piece(70, 20)], np.random.default_rng(2))
    whole = run(batch, 0.25)
    for row in range(61):
        alone = Batch(batch.q[row : row + 1], batch.k_pool, batch.v_pool, batch.block_table,
                      batch.slot[row : row + 1], batch.position[row : row + 1], [], [])
        np.testing.assert_array_equal(run(alone, 0.25)[0], whole[row])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), share=st.booleans())
def test_random_batches(data: st.DataObject, seed: int, share: bool) -> None:
    shape = data.draw(st.sampled_from([Shape(), Shape(kv_heads=1, group=3, head_dim=64), Shape(tokens=8)]))
    pieces: list[Piece] = []
    room = shape.tokens
    while room and len(pieces) < shape.slots and data.draw(st.booleans()):
        context = data.draw(st.integers(1, shape.block_size * shape.width))
        new = data.draw(st.integers(1, min(context, room)))
        pieces.append(Piece(context, new))
        room -= new
    check(shape, pieces, seed, share=share)


@jax.jit
def rotary_kv_write(case: dict[str, Any], pages: KVPages) -> tuple[jax.Array, KVPages]:
    q, k_pool, v_pool = native_attention.rotary_kv_write(**case, k_pool=pages.k, v_pool=pages.v)
    return q, KVPages(k_pool, v_pool)


@pytest.mark.parametrize("sizes", [(1, 4, 2, 64), (6, 7, 1, 16), (100, 3, 3, 80), (17, 9, 3, 6)])
def test_rotary_embedding_and_kv_write_against_float64(sizes: tuple[int, int, int, int]) -> None:
    case = rotary.make_case(*sizes, seed=4)
    rotary.check(case, rotary.make_pages(sizes[2], sizes[3], jnp.float32), 1e-5, rotary_kv_write)
