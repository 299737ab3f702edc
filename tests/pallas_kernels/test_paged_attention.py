"""Attention over pages: the plain specification against float64 NumPy, and the XLA path against both.

The reference below sees a batch as users would describe it, contexts and how many of their last tokens are new; pages,
tables, tiles and padding are the product's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import kv_pages, reference, xla_paged_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias, alibi_slopes
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.xla_paged_attention import TileSizes, make_tile_list


@dataclass(frozen=True)
class Shape:
    """What a program is compiled for; `slots` and `width` are those of the block table without the null slot."""

    tokens: int = 48
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    slots: int = 6
    width: int = 6
    num_pages: int = 40


@dataclass(frozen=True)
class Chunk:
    """The last `new` of a sequence's `context` tokens."""

    context: int
    new: int = 1


@dataclass
class Batch:
    """A step over random contexts; arrays as the kernels take them, and the contexts themselves."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_table: np.ndarray
    slot: np.ndarray
    position: np.ndarray
    keys: list[np.ndarray]  # of each chunk, [context, K, H]
    values: list[np.ndarray]


def make_batch(shape: Shape, chunks: Sequence[Chunk], rng: np.random.Generator, *, unread: float = np.nan,
               share: bool = False, scale: float = 1.0) -> Batch:
    """Put the chunks' contexts into randomly placed pages.

    Args:
        unread: what fills every position that no token may see.
        share: all sequences have one prefix, whose pages they share.
    """
    free = list(rng.permutation(np.arange(1, shape.num_pages)))
    slots = rng.permutation(shape.slots)[: len(chunks)]
    cell = (shape.kv_heads, shape.head_dim)
    k_pool, v_pool = (np.full((shape.num_pages, shape.block_size, *cell), unread, np.float32) for _ in "kv")
    # Stale entries of a table point at pages of others.
    table = rng.integers(0, shape.num_pages, (shape.slots + 1, shape.width)).astype(np.int32)
    table[shape.slots] = 0
    prefix = min(chunk.context for chunk in chunks) // shape.block_size if share and chunks else 0
    common = [scale * rng.standard_normal((prefix * shape.block_size, *cell), np.float32) for _ in "kv"]
    shared_pages = [free.pop() for _ in range(prefix)]
    q = scale * rng.standard_normal((shape.tokens, shape.kv_heads * shape.group, shape.head_dim), np.float32)
    batch = Batch(q, k_pool, v_pool, table, np.full(shape.tokens, shape.slots, np.int32),
                  np.zeros(shape.tokens, np.int32), [], [])
    row = 0
    for chunk, slot in zip(chunks, slots, strict=True):
        count = -(-chunk.context // shape.block_size)
        pages = [*shared_pages, *(free.pop() for _ in range(count - prefix))]
        table[slot, :count] = pages
        own = [scale * rng.standard_normal((chunk.context - len(common[0]), *cell), np.float32) for _ in "kv"]
        for pool, start, rest, contexts in zip((k_pool, v_pool), common, own, (batch.keys, batch.values), strict=True):
            context = np.concatenate([start, rest])
            contexts.append(context)
            for position in range(chunk.context):
                pool[pages[position // shape.block_size], position % shape.block_size] = context[position]
        batch.slot[row : row + chunk.new] = slot
        batch.position[row : row + chunk.new] = np.arange(chunk.context - chunk.new, chunk.context)
        row += chunk.new
    return batch


@dataclass(frozen=True)
class Variant:
    """Variants of attention besides the causal one."""

    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False

    def rule(self, scale: float) -> AttentionRule:
        return AttentionRule(scale, self.window, self.softcap)

    def arrays(self, heads: int) -> dict[str, np.ndarray]:
        found = {"slopes": alibi_slopes(heads)} if self.alibi else {}
        return found | ({"sinks": np.linspace(-2, 3, heads, dtype=np.float32)} if self.sinks else {})

    def bias(self, heads: int) -> HeadBias:
        return HeadBias(**{name: jnp.asarray(numbers) for name, numbers in self.arrays(heads).items()})

    def expected(self, batch: Batch, chunks: Sequence[Chunk], scale: float) -> np.ndarray:
        return expected(batch, chunks, scale, window=self.window, softcap=self.softcap,
                        **self.arrays(batch.q.shape[1]))


PLAIN = Variant()
VARIANTS = {
    "window": Variant(window=20),
    "window of one": Variant(window=1),
    "window and softcap": Variant(window=33, softcap=2.0),
    "softcap": Variant(softcap=1.5),
    "alibi": Variant(alibi=True),
    "sinks": Variant(sinks=True),
    "window and sinks": Variant(window=24, sinks=True),
    "all": Variant(window=40, softcap=3.0, alibi=True, sinks=True),
}
variants = st.builds(Variant, window=st.none() | st.integers(1, 90), softcap=st.sampled_from([None, 3.0]),
                     alibi=st.booleans(), sinks=st.booleans())


def hide_what_is_out_of_sight(batch: Batch, chunks: Sequence[Chunk], window: int) -> None:
    """NaN at the positions that even the first new token of a chunk no longer sees."""
    row = 0
    for chunk in chunks:
        size = batch.k_pool.shape[1]
        for offset in range(chunk.context - chunk.new - window + 1):
            for pool in (batch.k_pool, batch.v_pool):
                pool[batch.block_table[batch.slot[row], offset // size], offset % size] = np.nan
        row += chunk.new


def expected(batch: Batch, chunks: Sequence[Chunk], scale: float, *, window: int | None = None,
             softcap: float | None = None, slopes: np.ndarray | None = None,
             sinks: np.ndarray | None = None) -> np.ndarray:
    """Plain causal attention in float64; rows of padding are zeros."""
    out = np.zeros_like(batch.q, dtype=np.float64)
    heads, kv_heads = batch.q.shape[1], batch.k_pool.shape[2]
    row = 0
    for chunk, keys, values in zip(chunks, batch.keys, batch.values, strict=True):
        for position in range(chunk.context - chunk.new, chunk.context):
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = scale * (keys[seen, kv_head].astype(np.float64) @ batch.q[row, head].astype(np.float64))
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if slopes is not None:
                    scores = scores - slopes[head] * (position - np.arange(seen.start, seen.stop))
                highest = np.max(scores) if sinks is None else max(np.max(scores), sinks[head])
                weights = np.exp(scores - highest)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - highest))
                out[row, head] = weights / total @ values[seen, kv_head].astype(np.float64)
            row += 1
    return out


QUICKLY_COMPILED = {"xla_backend_optimization_level": 0}


@cache
def compiled(sizes: TileSizes, scale: float, variant: Variant) -> Callable[..., jax.Array]:
    @partial(jax.jit, compiler_options=QUICKLY_COMPILED)
    def run(q: Any, k_pool: Any, v_pool: Any, table: Any, slot: Any, position: Any) -> jax.Array:
        work = make_tile_list(slot, position, table.shape[0] - 1, sizes)
        return xla_paged_attention.paged_attention(q, KVPages(k_pool, v_pool), table, work, variant.rule(scale),
                                                   variant.bias(q.shape[1]), sizes)

    return run


def run_xla(batch: Batch, sizes: TileSizes, scale: float, variant: Variant = PLAIN) -> np.ndarray:
    run = compiled(sizes, scale, variant)
    return np.asarray(run(batch.q, batch.k_pool, batch.v_pool, batch.block_table, batch.slot, batch.position))


def check(shape: Shape, chunks: Sequence[Chunk], seed: int = 0, *, sizes: TileSizes | None = None,
          variant: Variant = PLAIN, tolerance: float = 2e-6, **how: Any) -> None:
    """Compare the XLA path with float64."""
    assert sum(chunk.new for chunk in chunks) <= shape.tokens and len(chunks) <= shape.slots
    batch = make_batch(shape, chunks, np.random.default_rng(seed), **how)
    if variant.window is not None:
        hide_what_is_out_of_sight(batch, chunks, variant.window)
    scale = shape.head_dim**-0.5
    found, wanted = run_xla(batch, sizes or TileSizes(), scale, variant), variant.expected(batch, chunks, scale)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=tolerance)


SMALL = Shape()
DECODE = Shape(tokens=8, slots=8)
# Small chunks, groups and tiles, so that few tokens cross many of their borders.
FINE = TileSizes(group=2, group_chunk=16, tile_rows=4, tile_chunk=32, min_tiled_rows=16)

lengths = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 95, 96])


@st.composite
def mixed(draw: st.DrawFn, shape: Shape) -> list[Chunk]:
    """Decode rows and prefill chunks in any order, up to the step's size."""
    chunks, left = [], shape.tokens
    for _ in range(draw(st.integers(0, shape.slots))):
        if not left:
            break
        context = draw(lengths)
        new = draw(st.one_of(st.just(1), st.integers(1, min(left, context))))
        chunks.append(Chunk(context, new))
        left -= new
    return chunks


@settings(max_examples=40)
@given(mixed(SMALL), st.integers(0, 2**31), st.booleans(), st.sampled_from([TileSizes(), FINE]))
def test_mixed_batches(chunks: list[Chunk], seed: int, share: bool, sizes: TileSizes) -> None:
    check(SMALL, chunks, seed, share=share, sizes=sizes)


@settings(max_examples=20)
@given(st.lists(lengths, max_size=8), st.integers(0, 2**31), st.sampled_from([TileSizes(), FINE]))
def test_decode_batches(contexts: list[int], seed: int, sizes: TileSizes) -> None:
    check(DECODE, [Chunk(context) for context in contexts], seed, sizes=sizes)


@pytest.mark.parametrize(("name", "sizes"), [
    ("window", FINE), ("all", FINE), *(pytest.param(name, sizes, marks=pytest.mark.slow) for name in VARIANTS
                                       for sizes in (TileSizes(), FINE))])
def test_variants(name: str, sizes: TileSizes) -> None:
    variant = VARIANTS[name]
    check(SMALL, [Chunk(70, 20), Chunk(1), Chunk(64), Chunk(17, 2)], sizes=sizes, variant=variant, tolerance=4e-6)
    check(DECODE, [Chunk(1), Chunk(70), Chunk(96), Chunk(40, 3)], sizes=sizes, variant=variant, tolerance=4e-6)


def test_through_a_window_a_row_is_the_same_beside_rows_of_any_length() -> None:
    """Each row of a group starts where its own window begins."""
    shape, variant = Shape(tokens=4, slots=4, width=64, num_pages=130), Variant(window=20)
    chunks = [Chunk(1000), Chunk(17), Chunk(400), Chunk(65)]
    check(shape, chunks, variant=variant, sizes=FINE)
    batch = make_batch(shape, chunks, np.random.default_rng(0))
    whole = run_xla(batch, TileSizes(), 0.25, variant)
    for row in range(4):
        alone = replace(batch, slot=np.where(np.arange(4) == row, batch.slot, shape.slots).astype(np.int32))
        np.testing.assert_allclose(run_xla(alone, TileSizes(), 0.25, variant)[row], whole[row], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [TileSizes(), FINE], ids=["default", "fine"])
@pytest.mark.parametrize("border", [16, 32, 64, 96])
def test_contexts_around_page_and_chunk_borders(border: int, sizes: TileSizes) -> None:
    around = [context for context in (border - 1, border, border + 1) if context <= SMALL.width * SMALL.block_size]
    check(SMALL, [Chunk(context) for context in around], sizes=sizes)
    check(SMALL, [Chunk(context, 15) for context in around], sizes=sizes)


@pytest.mark.parametrize("start", range(0, 17))
def test_a_prompt_cut_at_every_alignment(start: int) -> None:
    """The chunk starts anywhere in a page and ends anywhere."""
    for new in (2, 3, 4, 5, 16, 17, 31, 32, 33, 48):
        check(SMALL, [Chunk(start + new, new)], seed=start, sizes=FINE)


def test_one_token_with_nothing_before_it() -> None:
    for shape in (SMALL, DECODE):
        check(shape, [Chunk(1)])


def test_a_step_of_padding_alone_gives_zeros() -> None:
    for shape in (SMALL, DECODE):
        batch = make_batch(shape, [], np.random.default_rng(0))
        assert not run_xla(batch, TileSizes(), 0.25).any()


@pytest.mark.parametrize("unread", [np.nan, np.inf, -np.inf, 3e38])
def test_places_that_no_token_may_see_can_hold_anything(unread: float) -> None:
    chunks = [Chunk(33, 17), Chunk(5), Chunk(64), Chunk(40, 8)]
    check(SMALL, chunks, unread=unread)
    check(DECODE, [Chunk(17), Chunk(1), Chunk(31)], unread=unread)


def test_a_row_that_is_not_a_number_spoils_no_other_sequence() -> None:
    """Tiles and groups hold rows of several sequences."""
    for shape, sizes in ((SMALL, TileSizes()), (SMALL, FINE), (DECODE, TileSizes())):
        chunks = [Chunk(20), Chunk(33, 2), Chunk(7), Chunk(18)]
        batch = make_batch(shape, chunks, np.random.default_rng(3))
        batch.q[1:3] = np.nan
        batch.k_pool[batch.block_table[batch.slot[1], 0]] = np.nan
        found, wanted = run_xla(batch, sizes, 0.25), expected(batch, chunks, 0.25)
        rows = [0, 3, 4]
        assert np.isnan(found[1:3]).all()
        np.testing.assert_allclose(found[rows], wanted[rows], rtol=1e-5, atol=2e-6)
        assert not found[5:].any()


def test_large_scores_do_not_overflow() -> None:
    """Scores of several hundred: exp() of them is infinite in float32."""
    check(SMALL, [Chunk(96, 20), Chunk(70), Chunk(33, 3)], scale=12.0, tolerance=2e-4)


@pytest.mark.parametrize("shape", [
    Shape(kv_heads=1, group=1, head_dim=16, block_size=16),
    Shape(kv_heads=3, group=3, head_dim=64, block_size=16),
    Shape(kv_heads=2, group=4, head_dim=32, block_size=32, width=3),
    Shape(kv_heads=1, group=5, head_dim=80, block_size=64, width=2, num_pages=16),
    Shape(kv_heads=2, group=6, head_dim=96, block_size=16),
    Shape(kv_heads=2, group=7, head_dim=64, block_size=16),
    Shape(kv_heads=1, group=8, head_dim=128, block_size=128, width=1, num_pages=8),
], ids=lambda shape: f"group {shape.group}, head {shape.head_dim}, block {shape.block_size}")
def test_heads_and_block_sizes(shape: Shape) -> None:
    for seed in range(4):
        check(shape, [Chunk(70, 33), Chunk(1), Chunk(64), Chunk(17, 2), Chunk(31), Chunk(95, 5)], seed)


@pytest.mark.parametrize("tokens", [1, 7, 15, 17])
def test_odd_step_sizes(tokens: int) -> None:
    shape = Shape(tokens=tokens, slots=3)
    check(shape, [Chunk(40, tokens)])
    check(shape, [Chunk(33, max(1, tokens // 2)), *[Chunk(18)] * (tokens > 1)])


def test_the_order_of_the_rows_changes_nothing() -> None:
    """Each sequence's result is its own; only the index of its rows changes."""
    chunks = [Chunk(20), Chunk(33, 5), Chunk(64), Chunk(40, 12)]
    batch = make_batch(SMALL, chunks, np.random.default_rng(1))
    found = run_xla(batch, TileSizes(), 0.25)
    starts = np.cumsum([0, *(chunk.new for chunk in chunks)])
    rows = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in (2, 3, 0, 1)])
    order = np.concatenate([rows, np.arange(starts[-1], SMALL.tokens)])
    batch.q, batch.slot, batch.position = batch.q[order], batch.slot[order], batch.position[order]
    np.testing.assert_allclose(run_xla(batch, TileSizes(), 0.25), found[order], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", [TileSizes(), FINE], ids=["default", "fine"])
def test_the_work_list_covers_every_row_once(sizes: TileSizes) -> None:
    chunks = [Chunk(33, 11), Chunk(9), Chunk(64, 1), Chunk(40, 20), Chunk(5, 5)]
    batch = make_batch(SMALL, chunks, np.random.default_rng(2))
    slot, position = jnp.asarray(batch.slot), jnp.asarray(batch.position)
    work = jax.tree.map(np.asarray, make_tile_list(slot, position, SMALL.slots, sizes))
    assert work.num_single == len(work.row[: work.num_single])
    covered = list(work.row[: work.num_single])
    assert list(work.context[: work.num_single]) == sorted(work.context[: work.num_single], reverse=True)
    for tile in range(work.num_tiles):
        rows = range(work.tile_row[tile], work.tile_row[tile] + work.tile_len[tile])
        assert 2 <= len(rows) <= sizes.tile_rows
        assert {batch.slot[row] for row in rows} == {work.tile_slot[tile]}
        assert work.tile_context[tile] == batch.position[rows[0]] + 1
        covered += rows
    assert sorted(covered) == list(range(sum(chunk.new for chunk in chunks)))
    assert (work.row[work.num_single :] == SMALL.tokens).all() and not work.context[work.num_single :].any()


def test_half_precision_adds_up_in_float32() -> None:
    chunks = [Chunk(96, 20), Chunk(70), Chunk(33, 3)]
    batch = make_batch(SMALL, chunks, np.random.default_rng(5))
    for name in ("q", "k_pool", "v_pool"):
        setattr(batch, name, getattr(batch, name).astype(jnp.bfloat16))
    batch.keys, batch.values = ([np.asarray(array.astype(jnp.bfloat16), np.float32) for array in arrays]
                                for arrays in (batch.keys, batch.values))
    found, wanted = run_xla(batch, TileSizes(), 0.25), expected(batch, chunks, 0.25)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=0.02, atol=0.02)


def run_reference(batch: Batch, scale: float) -> np.ndarray:
    pages = KVPages(jnp.asarray(batch.k_pool), jnp.asarray(batch.v_pool))
    return np.asarray(jax.jit(partial(reference.paged_attention, rule=AttentionRule(scale), bias=HeadBias()))(
        batch.q, pages, batch.block_table, batch.slot, batch.position))


@pytest.mark.parametrize("share", [False, True])
def test_the_specification_is_plain_attention(share: bool) -> None:
    chunks = [Chunk(70, 12), Chunk(33), Chunk(96, 3), Chunk(32, 16), Chunk(49)]
    for seed in range(3):
        batch = make_batch(SMALL, chunks, np.random.default_rng(seed), share=share)
        rows = sum(chunk.new for chunk in chunks)
        found, wanted = run_reference(batch, 0.25), expected(batch, chunks, 0.25)
        np.testing.assert_allclose(found[:rows], wanted[:rows], rtol=1e-5, atol=2e-6)


def test_both_paths_agree_on_the_specification() -> None:
    chunks = [Chunk(70, 12), Chunk(33), Chunk(96, 3), Chunk(32, 16), Chunk(49)]
    batch = make_batch(SMALL, chunks, np.random.default_rng(7))
    rows = sum(chunk.new for chunk in chunks)
    found, wanted = run_xla(batch, TileSizes(), 0.25), run_reference(batch, 0.25)
    np.testing.assert_allclose(found[:rows], wanted[:rows], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("write", [kv_pages.write_kv, reference.write_kv], ids=["kv_pages", "reference"])
@given(st.integers(0, 2**31))
@settings(max_examples=10)
def test_keys_and_values_go_to_their_places_and_nowhere_else(write: Callable[..., Any], seed: int) -> None:
    """Against assignment in NumPy; padding rows all go to the null page's first row."""
    rng = np.random.default_rng(seed)
    pages, size, heads, dim, tokens, padding = 7, 4, 2, 8, 6, 3
    pools = [rng.standard_normal((pages, size, heads, dim), np.float32) for _ in "kv"]
    new = [rng.standard_normal((tokens, heads, dim), np.float32) for _ in "kv"]
    chosen = rng.permutation(np.arange(size, pages * size))[: tokens - padding]
    page = np.concatenate([chosen // size, np.zeros(padding)]).astype(np.int32)
    offset = np.concatenate([chosen % size, np.zeros(padding)]).astype(np.int32)
    written = jax.jit(write)(KVPages(*map(jnp.asarray, pools)), *new, page, offset)
    for pool, rows, found in zip(pools, new, written[:2], strict=True):
        wanted = pool.copy()
        for index in range(tokens):
            wanted[page[index], offset[index]] = rows[index]
        wanted[0, 0] = np.asarray(found)[0, 0]  # the last one written
        np.testing.assert_array_equal(found, wanted)


def test_writing_in_place_casts_to_the_pools_dtype_and_uses_their_memory() -> None:
    pools = [jnp.zeros((5, 4, 2, 8), jnp.bfloat16) for _ in "kv"]
    rows = np.full((3, 2, 8), 1 / 3, np.float32)
    page, offset = np.array([1, 2, 4], np.int32), np.array([0, 3, 1], np.int32)
    pointers = [pool.unsafe_buffer_pointer() for pool in pools]
    written = jax.jit(kv_pages.write_kv, donate_argnums=0)(KVPages(*pools), rows, rows, page, offset)
    assert [pool.unsafe_buffer_pointer() for pool in written[:2]] == pointers
    assert all(pool.dtype == jnp.bfloat16 for pool in written[:2])
    assert float(written.k[4, 1, 0, 0]) == float(jnp.bfloat16(1 / 3))
