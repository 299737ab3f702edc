"""The GPU's attention kernel, interpreted, against float64 NumPy; and the step that it is part of.

Contexts that no token may see hold NaN, and the NaN would show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.models.config import AttentionSpec, ModelConfig
from jaxpaged.models.metadata import make_metadata
from jaxpaged.models.transformer import Transformer
from jaxpaged.pallas_kernels import paged_attention, reference, xla_paged_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages, is_scaled, quantize
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.rotary_kv_write import rotary_kv_write
from jaxpaged.pallas_kernels.work_list import WorkSizes, make_work_list, max_tiles
from tests.pallas_kernels import test_paged_attention as paged
from tests.pallas_kernels.test_paged_attention import (
    QUICKLY_COMPILED,
    VARIANTS,
    Batch,
    Chunk,
    Shape,
    expected,
    hide_what_is_out_of_sight,
    lengths,
    make_batch,
    mixed,
)
from tests.support.model_configs import uniform_layers, with_attention, with_windows

# A GPU of 4 multiprocessors: grids are small, and contexts are split into several chunks all the same.
TARGET = GpuTarget((9, 0), 4, interpret=True)
MIN_CHUNK = 32  # tokens; the product's own would split nothing here


@dataclass(frozen=True)
class GpuVariant(paged.Variant):
    """What a kernel is traced for, besides the shape of the step."""

    dtype: Any = jnp.float32  # of queries
    page_dtype: Any = jnp.float32


PLAIN = GpuVariant()
SCALE = 0.25


@cache
def compiled(shape: Shape, variant: GpuVariant) -> Callable[..., Any]:
    heads = shape.kv_heads * shape.group
    tiles = paged_attention.choose_tiles(TARGET, shape.tokens, shape.group, shape.head_dim, variant.dtype,
                                         variant.page_dtype)
    sizes = paged_attention.work_sizes(TARGET, tiles, shape.tokens, shape.slots, heads, shape.kv_heads)
    sizes = replace(sizes, min_chunk=MIN_CHUNK)

    @partial(jax.jit, compiler_options=QUICKLY_COMPILED)
    def run(q: Any, pages: Any, table: Any, slot: Any, position: Any) -> Any:
        work = make_work_list(slot, position, shape.slots, sizes, variant.window)
        return paged_attention.paged_attention(q, pages, table, work, variant.rule(SCALE), variant.bias(heads),
                                               tiles=tiles, target=TARGET), work

    return run


def stored(batch: Batch, variant: GpuVariant) -> KVPages:
    """The batch's pools as the variant stores them; the contexts become the values read back from them."""
    if not is_scaled(variant.page_dtype):
        for contexts in (batch.keys, batch.values):
            contexts[:] = [np.asarray(jnp.asarray(array, variant.page_dtype), np.float32) for array in contexts]
        return KVPages(jnp.asarray(batch.k_pool, variant.page_dtype), jnp.asarray(batch.v_pool, variant.page_dtype))
    pools, scales = [], []
    for pool, contexts in ((batch.k_pool, batch.keys), (batch.v_pool, batch.values)):
        numbers, scale = quantize(jnp.asarray(np.nan_to_num(pool)), variant.page_dtype)
        # What must not be read: numbers and scales of NaN spoil whatever they touch.
        unread = jnp.nan if jnp.issubdtype(variant.page_dtype, jnp.floating) else 99
        pools.append(jnp.where(np.isnan(pool), jnp.asarray(unread, variant.page_dtype), numbers))
        scales.append(jnp.where(np.isnan(pool).any(axis=-1), jnp.nan, scale).swapaxes(1, 2))
        for index, context in enumerate(contexts):
            numbers, scale = quantize(jnp.asarray(context), variant.page_dtype)
            contexts[index] = np.asarray(numbers, np.float32) * np.asarray(scale)[..., None]
    return KVPages(*pools, *scales)


def check(shape: Shape, chunks: Sequence[Chunk], seed: int = 0, variant: GpuVariant = PLAIN, *, tolerance: float = 2e-6,
          **how: Any) -> Any:
    """Compare the kernel with float64; returns the work list."""
    assert sum(chunk.new for chunk in chunks) <= shape.tokens and len(chunks) <= shape.slots
    batch = make_batch(shape, chunks, np.random.default_rng(seed), **how)
    if variant.window is not None:
        hide_what_is_out_of_sight(batch, chunks, variant.window)
    batch.q = np.asarray(jnp.asarray(batch.q, variant.dtype))
    pages = stored(batch, variant)
    found, work = compiled(shape, variant)(batch.q, pages, batch.block_table, batch.slot, batch.position)
    wanted = variant.expected(batch, chunks, SCALE)
    rows = sum(chunk.new for chunk in chunks)
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(found[:rows], wanted[:rows], rtol=1e-5, atol=tolerance)
    assert np.isfinite(found).all(), "rows of padding must be finite"
    return jax.tree.map(np.asarray, work)


SMALL = Shape(tokens=48)
DECODE = Shape(tokens=8, slots=8)


def slow(*values: Any) -> list[Any]:
    """Parameters for the slow tests alone."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
            for value in values]


@settings(max_examples=25)
@given(mixed(SMALL), st.integers(0, 2**31), st.booleans())
def test_mixed_batches(chunks: list[Chunk], seed: int, share: bool) -> None:
    check(SMALL, chunks, seed, share=share)


@settings(max_examples=15)
@given(st.lists(lengths, max_size=8), st.integers(0, 2**31))
def test_decode_batches(contexts: list[int], seed: int) -> None:
    """Empty rows included: what the step has no sequence for is padding."""
    check(DECODE, [Chunk(context) for context in contexts], seed)


@pytest.mark.parametrize("border", [16, 32, 64, 96])
def test_contexts_around_page_and_chunk_borders(border: int) -> None:
    around = [context for context in (border - 1, border, border + 1) if context <= SMALL.width * SMALL.block_size]
    check(SMALL, [Chunk(context) for context in around])
    check(SMALL, [Chunk(context, 15) for context in around])
    check(DECODE, [Chunk(1), *(Chunk(context) for context in around)])


@pytest.mark.parametrize("start", [0, 1, 5, 8, 13, 15, 16, *slow(2, 3, 4, 6, 7, 9, 10, 11, 12, 14)])
def test_a_prompt_cut_at_every_alignment(start: int) -> None:
    for new in (2, 5, 16, 17, 31, 33, 48):
        check(SMALL, [Chunk(start + new, new)], seed=start)


def test_a_step_of_padding_alone() -> None:
    for shape in (SMALL, DECODE):
        check(shape, [])


@pytest.mark.parametrize("group", [7, *slow(*range(1, 7), *range(8, 18))])
def test_group_sizes(group: int) -> None:
    """Also of more rows than the small tile has."""
    check(Shape(tokens=40, kv_heads=1, group=group), [Chunk(40), Chunk(30, 20), Chunk(7, 7)])
    check(Shape(tokens=3, kv_heads=2, group=group), [Chunk(40), Chunk(30, 2)])


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 32), (128, 128), *slow((64, 16), (96, 64), (256, 16))])
def test_head_and_page_sizes(head_dim: int, block_size: int) -> None:
    shape = Shape(tokens=40, head_dim=head_dim, block_size=block_size, num_pages=24)
    check(shape, [Chunk(block_size - 1), Chunk(block_size, 9), Chunk(block_size + 1), Chunk(2 * block_size + 3, 20)])


# What rounding queries and weights to a dtype costs; results are of the size of 1.
TOLERANCES: dict[Any, float] = {jnp.float32: 6e-6, jnp.float16: 5e-3, jnp.bfloat16: 4e-2}


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Of heads, pages and variants, and of the step."""
    shape = data.draw(st.builds(
        Shape, tokens=st.sampled_from([3, 8, 33, 48]), kv_heads=st.integers(1, 3), group=st.integers(1, 16),
        head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]), block_size=st.sampled_from([16, 32, 64, 128])))
    variant = data.draw(st.builds(
        GpuVariant, window=st.none() | st.integers(1, 90), softcap=st.sampled_from([None, 3.0]), alibi=st.booleans(),
        sinks=st.booleans(), dtype=st.sampled_from(sorted(TOLERANCES, key=str)),
        page_dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn])))
    chunks = data.draw(mixed(shape))
    check(shape, chunks, data.draw(st.integers(0, 2**31)), variant, tolerance=TOLERANCES[variant.dtype],
          share=variant.window is None and data.draw(st.booleans()))


@pytest.mark.parametrize("name", ["all", *slow(*sorted(set(VARIANTS) - {"all"}))])
def test_variants(name: str) -> None:
    for shape in (Shape(tokens=48, group=3), Shape(tokens=8, slots=8, group=3)):
        chunks = [Chunk(70, min(20, shape.tokens - 4)), Chunk(1), Chunk(64), Chunk(17, 2)] if shape.tokens > 8 else \
            [Chunk(1), Chunk(70), Chunk(96), Chunk(40, 3)]
        for seed in range(2):
            check(shape, chunks, seed, GpuVariant(**vars(VARIANTS[name])), tolerance=4e-6)


@pytest.mark.parametrize(("dtype", "page_dtype", "tolerance"), [
    (jnp.bfloat16, jnp.bfloat16, 2e-2), *slow(
        (jnp.float32, jnp.int8, 4e-6), (jnp.float16, jnp.float16, 3e-3), (jnp.bfloat16, jnp.int8, 3e-2),
        (jnp.float32, jnp.float8_e4m3fn, 4e-6), (jnp.bfloat16, jnp.float8_e4m3fn, 3e-2)),
], ids=lambda value: getattr(value, "__name__", ""))
def test_dtypes(dtype: Any, page_dtype: Any, tolerance: float) -> None:
    variant = GpuVariant(dtype=dtype, page_dtype=page_dtype)
    for shape in (SMALL, DECODE):
        check(shape, [Chunk(33, 3), Chunk(5), Chunk(80), Chunk(16, 2)], 3, variant, tolerance=tolerance)
    if is_scaled(page_dtype):
        check(SMALL, [Chunk(70, 30), Chunk(50)], 4, replace(variant, window=21, softcap=4.0), tolerance=tolerance)


@pytest.mark.parametrize("page_dtype", [jnp.int8, *slow(jnp.float8_e4m3fn)])
def test_small_values_in_8_bits_are_not_lost_in_float16(page_dtype: Any) -> None:
    """Weights times the scales of such values are near the smallest float16, on XLA's path too."""
    chunks, size, variant = [Chunk(96, 3), Chunk(70)], 1e-5, GpuVariant(dtype=jnp.float16, page_dtype=page_dtype)
    batch = make_batch(SMALL, chunks, np.random.default_rng(6))
    batch.q = np.asarray(0.1 * batch.q, np.float16)
    batch.v_pool *= size
    batch.values = [size * values for values in batch.values]
    pages = stored(batch, variant)
    arguments = batch.q, pages, batch.block_table, batch.slot, batch.position
    wanted = expected(batch, chunks, SCALE)[:4]
    for results in (compiled(SMALL, variant)(*arguments)[0], by_xla(*arguments)):
        np.testing.assert_allclose(np.asarray(results, np.float64)[:4] / size, wanted / size, atol=2e-2)


@partial(jax.jit, compiler_options=QUICKLY_COMPILED)
def by_xla(q: Any, pages: Any, table: Any, slot: Any, position: Any) -> jax.Array:
    sizes = xla_paged_attention.TileSizes()
    work = xla_paged_attention.make_tile_list(slot, position, table.shape[0] - 1, sizes)
    return xla_paged_attention.paged_attention(q, pages, table, work, AttentionRule(SCALE), HeadBias(), sizes)


def test_large_scores_do_not_overflow() -> None:
    check(SMALL, [Chunk(96, 20), Chunk(70), Chunk(33, 3)], scale=12.0, tolerance=1e-3)


def test_a_row_that_is_not_a_number_spoils_no_other_sequence() -> None:
    for shape in (SMALL, DECODE):
        chunks = [Chunk(20), Chunk(33, 2), Chunk(7), Chunk(18)]
        batch = make_batch(shape, chunks, np.random.default_rng(3))
        batch.q[1:3] = np.nan
        batch.k_pool[batch.block_table[batch.slot[1], 0]] = np.nan
        pages = KVPages(jnp.asarray(batch.k_pool), jnp.asarray(batch.v_pool))
        found, _ = compiled(shape, PLAIN)(batch.q, pages, batch.block_table, batch.slot, batch.position)
        rows = [0, 3, 4]
        np.testing.assert_allclose(np.asarray(found)[rows], expected(batch, chunks, SCALE)[rows], rtol=1e-5, atol=2e-6)


def test_a_token_that_is_not_a_number_spoils_no_earlier_one() -> None:
    """Keys and values go through the kernel that writes them; queries of one tile see it, or do not."""
    chunks, bad = [Chunk(20, 20), Chunk(33, 13)], 7
    batch = make_batch(SMALL, chunks, np.random.default_rng(5))
    real = np.arange(33)
    slot, position = batch.slot[:33], batch.position[:33]
    page, offset = np.full(SMALL.tokens, -1, np.int32), np.zeros(SMALL.tokens, np.int32)
    page[:33], offset[:33] = batch.block_table[slot, position // SMALL.block_size], position % SMALL.block_size
    keys, values = np.zeros((2, SMALL.tokens, SMALL.kv_heads, SMALL.head_dim), np.float32)
    for pool, rows in ((batch.k_pool, keys), (batch.v_pool, values)):
        rows[real] = pool[page[:33], offset[:33]]
        pool[page[:33], offset[:33]] = 0
    wanted = expected(batch, chunks, SCALE)[:33]
    keys[bad] = values[bad] = np.nan
    ones = np.ones((SMALL.tokens, SMALL.head_dim // 2), np.float32)
    pages = KVPages(jnp.asarray(batch.k_pool), jnp.asarray(batch.v_pool))
    q, _, pages = jax.jit(partial(rotary_kv_write, target=TARGET))(
        batch.q, keys, values, ones, 0 * ones, page, offset, pages)
    found, _ = compiled(SMALL, PLAIN)(q, pages, batch.block_table, batch.slot, batch.position)
    found = np.asarray(found)[:33]
    sees_it = (slot == slot[bad]) & (position >= position[bad])
    np.testing.assert_allclose(found[~sees_it], wanted[~sees_it], rtol=1e-5, atol=2e-6)
    assert np.isnan(found[sees_it]).all() and 0 < sees_it.sum() < 20


# Tokens of a tile, items to split with, window: minimum and maximum of each, some between; each is compiled once.
CUTS = [(1, 1, None), (4, 7, None), (3, 13, 40), (16, 40, 40), (20, 2, 1), (7, 40, 1)]
quick_work_list = jax.jit(make_work_list, static_argnums=(2, 3, 4), compiler_options=QUICKLY_COMPILED)


@settings(max_examples=60)
@given(mixed(replace(SMALL, slots=40)), st.sampled_from(CUTS))
def test_the_work_list_covers_every_context_once(chunks: list[Chunk], cut: tuple[int, int, int | None]) -> None:
    """And fits the grid, whatever the lengths."""
    (tile_tokens, num_extra, window), tokens, slots = cut, SMALL.tokens, 40
    slot, position = np.full(tokens, slots, np.int32), np.zeros(tokens, np.int32)
    row = 0
    for index, chunk in enumerate(chunks):
        slot[row : row + chunk.new] = index
        position[row : row + chunk.new] = np.arange(chunk.context - chunk.new, chunk.context)
        row += chunk.new
    sizes = WorkSizes(tile_tokens, max_tiles(tokens, slots, tile_tokens), num_extra, MIN_CHUNK)
    work = jax.tree.map(np.asarray, quick_work_list(jnp.asarray(slot), jnp.asarray(position), slots, sizes, window))
    wanted, found = set(), []
    for index in range(row):
        first = 0 if window is None else max(0, position[index] - window + 1)
        wanted |= {(index, key) for key in range(first, position[index] + 1)}
    parts: dict[int, list[int]] = {}
    for first_row, count, of_slot, first_position, start, end, part, _ in work.items:
        assert count <= tile_tokens
        for index in range(first_row, first_row + count):
            assert slot[index] == of_slot and position[index] == first_position + index - first_row
            first = 0 if window is None else max(0, position[index] - window + 1)
            found += [(index, key) for key in range(max(start, first), min(end, position[index] + 1))]
        if count and part >= 0:
            parts.setdefault(first_row, []).append(part)
    assert len(found) == len(set(found)) and set(found) == wanted
    merged = {row: list(range(first, first + count)) for row, tokens, first, count in work.splits if tokens}
    assert merged == {row: sorted(indices) for row, indices in parts.items()}
    assert all(index < sizes.num_partials for indices in parts.values() for index in indices)


def test_the_work_list_of_a_prompt_of_a_million_tokens() -> None:
    """Its tiles see more than 2^31 tokens together, and all of them are in the items."""
    tokens, start = 2400, 1_000_000
    sizes = WorkSizes(1, max_tiles(tokens, 1, 1), 100, 256)
    position = start + jnp.arange(tokens, dtype=jnp.int32)
    work = quick_work_list(jnp.zeros(tokens, jnp.int32), position, 1, sizes, None)
    items = np.asarray(work.items, np.int64)
    items = items[items[:, 1] > 0]
    assert (items[:, 5] - items[:, 4]).sum() == sum(range(start + 1, start + tokens + 1)) > 2**31
    assert len(items) <= sizes.num_items and items[:, 6].max() < sizes.num_partials


CONFIG = ModelConfig("test", model_dim=32, vocab_size=64, max_model_len=128,
                     layers=uniform_layers(2, heads=6, kv_heads=2, head_dim=16, mlp_dim=48))
SPECIAL = with_windows(with_attention(CONFIG, softcap=5.0, sinks=True, scale=0.3), (24, None))


def model_logits(config: ModelConfig, page_dtype: Any = jnp.float32, **path: Any) -> np.ndarray:
    """Of a prompt in two chunks, another prompt, and a token of each.

    Args:
        path: through attention, as `make_metadata` takes it.
    """
    module = Transformer(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    for layer, spec in zip(module.layers, config.attention, strict=True):
        if isinstance(spec, AttentionSpec) and spec.sinks:
            layer.attn.sinks = nnx.Param(jnp.linspace(-1, 2, spec.num_heads))
    cache = KVCacheSpec.of(config, 16, jnp.dtype(page_dtype))
    table = jnp.array([[3, 1, 7, 5], [2, 4, 6, 8], [0] * 4], jnp.int32)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, 48))

    @partial(jax.jit, compiler_options=QUICKLY_COMPILED)
    def step(pools: Any, slot: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        meta = make_metadata(slot, position, table[None], config, 16, dtype=jnp.dtype(jnp.float32),
                             cache_dtype=jnp.dtype(page_dtype), **path)
        logits: jax.Array
        logits, pools = module(ids[position], jnp.arange(slot.size), pools, meta)
        return logits, pools

    pools = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache.shapes(9))
    logits = []
    for slot, position in (([0] * 19 + [1] * 15, [*range(19), *range(15)]),
                           ([1] * 1 + [0] * 22 + [2] * 11, [15, *range(19, 41), *[0] * 11]), ([0, 1], [41, 16])):
        found, pools = step(pools, jnp.array(slot), jnp.array(position))
        logits.append(np.asarray(found)[np.array(slot) < 2])
    return np.concatenate(logits)


@pytest.mark.parametrize(("config", "page_dtype"), [
    (SPECIAL, jnp.int8), (CONFIG, jnp.float32), (SPECIAL, jnp.float32),
    (with_attention(CONFIG, alibi=True, rope=None), jnp.float32), (CONFIG, jnp.int8), (CONFIG, jnp.float8_e4m3fn),
])
@pytest.mark.slow
def test_a_model_gives_the_same_logits_on_either_path(config: ModelConfig, page_dtype: Any) -> None:
    """XLA's path, and the kernel called as on a GPU."""
    by_xla, by_kernel = (model_logits(config, page_dtype, target=target) for target in (None, TARGET))
    np.testing.assert_allclose(by_kernel, by_xla, atol=2e-4 if page_dtype == jnp.float32 else 2e-2)
    assert np.std(by_xla) > 0.1


def test_reference_follows_the_rule() -> None:
    """The plain specification, with everything at once, against float64."""
    variant = GpuVariant(window=40, softcap=3.0, alibi=True, sinks=True, page_dtype=jnp.int8)
    chunks = [Chunk(70, 20), Chunk(1), Chunk(64), Chunk(17, 2)]
    batch = make_batch(SMALL, chunks, np.random.default_rng(0))
    pages = stored(batch, variant)
    found = reference.paged_attention(jnp.asarray(batch.q), pages, jnp.asarray(batch.block_table),
                                      jnp.asarray(batch.slot), jnp.asarray(batch.position),
                                      variant.rule(SCALE), variant.bias(4))
    wanted = variant.expected(batch, chunks, SCALE)
    np.testing.assert_allclose(np.asarray(found)[:24], wanted[:24], rtol=1e-5, atol=4e-6)
