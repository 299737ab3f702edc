"""The native CPU attention kernel against float64 NumPy and the plain specification."""

import subprocess
import sys
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

from jaxpaged.models.config import ModelConfig
from jaxpaged.pallas_kernels import native_attention, reference
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.native_build import build
from tests.pallas_kernels import test_rotary_kv_write as rotary
from tests.pallas_kernels.test_gpu_attention import CONFIG, SPECIAL, model_logits
from tests.pallas_kernels.test_native_linear import FLAGS
from tests.pallas_kernels.test_paged_attention import (
    PLAIN,
    VARIANTS,
    Batch,
    Chunk,
    Shape,
    Variant,
    hide_what_is_out_of_sight,
    make_batch,
    mixed,
    variants,
)
from tests.support.model_configs import with_attention

CHUNK = 32  # tokens of context between two updates of the kernel's softmax


@pytest.fixture(scope="module", autouse=True)
def built(native_folder: Path) -> None:
    failure = build(native_folder, [native_attention.KERNEL])
    if failure:
        pytest.skip(f"the native kernel cannot be built here: {failure}")


@cache
def compiled(scale: float, variant: Variant) -> Callable[..., jax.Array]:
    @jax.jit
    def run(q: Any, k_pool: Any, v_pool: Any, table: Any, slot: Any, position: Any) -> jax.Array:
        return native_attention.paged_attention(q, k_pool, v_pool, table, slot, position, variant.rule(scale),
                                                variant.bias(q.shape[1]))

    return run


def run(batch: Batch, scale: float, variant: Variant = PLAIN) -> np.ndarray:
    return np.asarray(compiled(scale, variant)(batch.q, batch.k_pool, batch.v_pool, batch.block_table, batch.slot,
                                               batch.position))


def check(shape: Shape, chunks: Sequence[Chunk], seed: int = 0, *, variant: Variant = PLAIN, tolerance: float = 2e-6,
          **how: Any) -> None:
    """Compare with float64; every position that must not be read holds NaN, unless `how` says otherwise."""
    assert sum(chunk.new for chunk in chunks) <= shape.tokens and len(chunks) <= shape.slots
    batch = make_batch(shape, chunks, np.random.default_rng(seed), **how)
    if variant.window is not None:
        hide_what_is_out_of_sight(batch, chunks, variant.window)
        forget_pages_out_of_sight(batch, chunks, variant.window)
    scale = shape.head_dim**-0.5
    found, wanted = run(batch, scale, variant), variant.expected(batch, chunks, scale)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=tolerance)


def forget_pages_out_of_sight(batch: Batch, chunks: Sequence[Chunk], window: int) -> None:
    """Table entries far out of the pool for blocks that lie wholly before the windows: to read one would crash."""
    row = 0
    for chunk in chunks:
        first = max(0, chunk.context - chunk.new - window + 1)
        batch.block_table[batch.slot[row], : first // batch.k_pool.shape[1]] = 2**31 - 1
        row += chunk.new


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 63, 64, 65, 96])
def test_one_row_at_every_border(context: int) -> None:
    check(Shape(tokens=1), [Chunk(context)])


@pytest.mark.parametrize("new", [2, 3, 15, 16, 17, 31, 33, 48])
@pytest.mark.parametrize("before", [0, 1, 15, 16, 17, 31, 32, 40])
def test_prefill_pieces_of_every_alignment(before: int, new: int) -> None:
    check(Shape(), [Chunk(before + new, new)])


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_group_sizes(group: int, kv_heads: int) -> None:
    check(Shape(group=group, kv_heads=kv_heads), [Chunk(40), Chunk(30, 20), Chunk(7, 7)])


@pytest.mark.parametrize("head_dim", [1, 4, 8, 16, 20, 24, 64, 80, 96, 128, 192, 256, 576])
def test_head_dims(head_dim: int) -> None:
    check(Shape(head_dim=head_dim, group=3), [Chunk(37), Chunk(50, 30)])
    check(Shape(head_dim=head_dim, group=3), [Chunk(37), Chunk(50, 30)], variant=VARIANTS["all"], tolerance=4e-6)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    chunks = [Chunk(block_size - 1), Chunk(block_size), Chunk(block_size + 1), Chunk(2 * block_size + 3, 20)]
    check(Shape(block_size=block_size), chunks)


def test_a_group_larger_than_a_tile() -> None:
    check(Shape(tokens=8, kv_heads=1, group=130), [Chunk(20, 3), Chunk(40)])


def test_one_more_row_than_a_tile_holds() -> None:
    check(Shape(tokens=256, group=3, width=20), [Chunk(290, 193), Chunk(100)])


def test_mixed_batch_with_shared_pages() -> None:
    check(Shape(tokens=64, group=3), [Chunk(40), Chunk(64, 20), Chunk(33), Chunk(96, 31)], share=True)


def test_long_context() -> None:
    shape = Shape(tokens=64, group=3, width=256, num_pages=600)
    check(shape, [Chunk(4096), Chunk(4080, 40)], tolerance=5e-6)


def test_large_scores() -> None:
    """Far beyond what exp can hold without the highest score taken off."""
    check(Shape(), [Chunk(90), Chunk(60, 30)], scale=20.0, tolerance=2e-3)


def test_padding_gives_zeros_whatever_the_queries_hold() -> None:
    shape = Shape(tokens=32)
    batch = make_batch(shape, [Chunk(20, 3)], np.random.default_rng(0))
    batch.q[3:] = np.nan
    assert not run(batch, 0.25)[3:].any()
    batch.slot[:] = shape.slots
    assert not run(batch, 0.25).any()


def test_agrees_with_the_plain_specification() -> None:
    batch = make_batch(Shape(), [Chunk(40), Chunk(60, 30)], np.random.default_rng(3), unread=0)
    q, k_pool, v_pool, table = map(jnp.asarray, (batch.q, batch.k_pool, batch.v_pool, batch.block_table))
    slot, position = jnp.asarray(batch.slot), jnp.asarray(batch.position)
    pages = KVPages(k_pool, v_pool)
    for variant in (PLAIN, VARIANTS["all"]):
        wanted = reference.paged_attention(q, pages, table, slot, position, variant.rule(0.3), variant.bias(q.shape[1]))
        np.testing.assert_allclose(run(batch, 0.3, variant)[:31], wanted[:31], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("variant", [PLAIN, Variant(window=21), VARIANTS["all"]], ids=["plain", "window", "all"])
@pytest.mark.parametrize("pool", ["keys", "values"])
@pytest.mark.parametrize("position", [0, 5, 40, 59])
def test_nan_reaches_the_rows_that_see_it_and_no_others(pool: str, position: int, variant: Variant) -> None:
    """A tile's rows read together what some of them must not notice."""
    shape = Shape(kv_heads=1, group=3)
    batch = make_batch(shape, [Chunk(60, 30), Chunk(50)], np.random.default_rng(1))
    clean = run(batch, 0.25, variant)
    array = batch.k_pool if pool == "keys" else batch.v_pool
    array[batch.block_table[batch.slot[0], position // 16], position % 16] = np.nan
    found = run(batch, 0.25, variant)
    sees = np.zeros(shape.tokens, bool)
    sees[:30] = batch.position[:30] >= position
    if variant.window is not None:
        sees[:30] &= batch.position[:30] < position + variant.window
    assert np.isnan(found[sees]).all()
    np.testing.assert_array_equal(found[~sees], clean[~sees])


def test_a_nan_query_stays_in_its_head() -> None:
    for variant in (PLAIN, VARIANTS["all"]):
        batch = make_batch(Shape(), [Chunk(60, 30)], np.random.default_rng(1))
        clean = run(batch, 0.25, variant)
        batch.q[7, 2, 3] = np.nan
        found = run(batch, 0.25, variant).copy()
        assert np.isnan(found[7, 2]).all()
        found[7, 2] = clean[7, 2]
        np.testing.assert_array_equal(found, clean)


@pytest.mark.parametrize("variant", [PLAIN, *VARIANTS.values(), Variant(window=64)], ids=str)
def test_a_row_is_bitwise_the_same_in_any_batch(variant: Variant) -> None:
    batch = make_batch(Shape(tokens=64, group=3), [Chunk(64, 40), Chunk(50), Chunk(70, 20)], np.random.default_rng(2))
    whole = run(batch, 0.25, variant)
    for row in range(61):
        alone = Batch(batch.q[row : row + 1], batch.k_pool, batch.v_pool, batch.block_table,
                      batch.slot[row : row + 1], batch.position[row : row + 1], [], [])
        np.testing.assert_array_equal(run(alone, 0.25, variant)[0], whole[row])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants(variant: Variant) -> None:
    for shape in (Shape(tokens=48, group=3), Shape(tokens=8, slots=8, group=3)):
        chunks = [Chunk(70, min(20, shape.tokens - 4)), Chunk(1), Chunk(64), Chunk(17, 2)] if shape.tokens > 8 else \
            [Chunk(1), Chunk(70), Chunk(96), Chunk(40, 3)]
        for seed in range(2):
            check(shape, chunks, seed, variant=variant, tolerance=4e-6)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 48, 63, 64, 65, 200])
def test_windows_at_every_border(window: int) -> None:
    """Of pages and chunks: decode rows and chunks of a prompt, before, at and after them."""
    for context in (1, 16, 31, 32, 33, 63, 64, 65, 80, 96):
        new = min(context, 20)
        check(Shape(tokens=32), [Chunk(context, new), Chunk(context)], variant=Variant(window=window))


def test_a_prompt_in_chunks_is_bitwise_the_prompt_at_once() -> None:
    for variant in (Variant(window=21), VARIANTS["all"]):
        batch = make_batch(Shape(tokens=90, group=3), [Chunk(90, 90)], np.random.default_rng(4))
        whole = run(batch, 0.25, variant)
        for size in (7, 16, 32):
            for start in range(0, 90, size):
                rows = slice(start, start + size)
                part = Batch(batch.q[rows], batch.k_pool, batch.v_pool, batch.block_table, batch.slot[rows],
                             batch.position[rows], [], [])
                np.testing.assert_array_equal(run(part, 0.25, variant), whole[rows])


def test_soft_cap_on_large_and_small_scores() -> None:
    for scale in (0.1, 1.0, 6.0, 30.0):
        for softcap in (0.5, 30.0, 50.0):
            check(Shape(), [Chunk(90), Chunk(60, 30)], scale=scale, variant=Variant(softcap=softcap),
                  tolerance=2e-6 * max(1.0, scale) * min(softcap, max(1.0, scale**2)))


def test_a_long_context_through_a_window() -> None:
    """What lies before it is NaN, and its table entries point nowhere."""
    shape = Shape(tokens=64, group=3, width=256, num_pages=600)
    for variant in (Variant(window=100), VARIANTS["all"], Variant(alibi=True)):
        check(shape, [Chunk(4096), Chunk(4080, 40)], variant=variant, tolerance=6e-6)


def test_sinks_far_above_and_below_the_scores() -> None:
    shape = Shape()
    batch = make_batch(shape, [Chunk(60, 30)], np.random.default_rng(1), unread=0)
    arrays = map(jnp.asarray, (batch.q, batch.k_pool, batch.v_pool, batch.block_table, batch.slot, batch.position))
    q, k_pool, v_pool, table, slot, position = arrays
    attend = jax.jit(lambda sinks: native_attention.paged_attention(
        q, k_pool, v_pool, table, slot, position, AttentionRule(0.25), HeadBias(sinks=sinks)))
    plain = run(batch, 0.25)
    np.testing.assert_allclose(attend(np.full(4, -200, np.float32)), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(attend(np.full(4, -np.inf, np.float32)), attend(np.full(4, -3e38, np.float32)))
    np.testing.assert_allclose(attend(np.full(4, -np.inf, np.float32)), plain, rtol=1e-5, atol=1e-6)
    assert np.abs(attend(np.full(4, 200, np.float32))).max() < 1e-30


@pytest.mark.parametrize("value_dim", [1, 8, 24])
def test_values_narrower_and_wider_than_keys(value_dim: int) -> None:
    chunks = [Chunk(37), Chunk(50, 30)]
    batch = make_batch(Shape(group=3), chunks, np.random.default_rng(0))
    batch.v_pool = np.repeat(batch.v_pool, 2, axis=3)[..., :value_dim].copy()
    wanted = np.repeat(VARIANTS["window"].expected(batch, chunks, 0.25), 2, axis=2)[..., :value_dim]
    np.testing.assert_allclose(run(batch, 0.25, VARIANTS["window"]), wanted, rtol=1e-5, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), share=st.booleans())
def test_random_batches(data: st.DataObject, seed: int, share: bool) -> None:
    shape = data.draw(st.sampled_from([Shape(), Shape(kv_heads=1, group=3, head_dim=64), Shape(tokens=8)]))
    chunks: list[Chunk] = []
    room = shape.tokens
    while room and len(chunks) < shape.slots and data.draw(st.booleans()):
        context = data.draw(st.integers(1, shape.block_size * shape.width))
        new = data.draw(st.integers(1, min(context, room)))
        chunks.append(Chunk(context, new))
        room -= new
    check(shape, chunks, seed, share=share)


@pytest.mark.parametrize("config", [SPECIAL, with_attention(CONFIG, alibi=True, rope=None)], ids=["special", "alibi"])
def test_a_model_gives_the_same_logits_as_on_xla(config: ModelConfig) -> None:
    by_xla = model_logits(config)
    np.testing.assert_allclose(model_logits(config, native=True), by_xla, atol=2e-5)
    assert np.std(by_xla) > 0.1


@settings(max_examples=60)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Of heads, pages and variants, and of the step."""
    shape = data.draw(st.builds(
        Shape, tokens=st.sampled_from([3, 8, 33, 48]), kv_heads=st.integers(1, 3), group=st.integers(1, 16),
        head_dim=st.integers(1, 32).map(lambda units: 8 * units), block_size=st.sampled_from([16, 32, 64])))
    variant = data.draw(variants)
    share = variant.window is None and data.draw(st.booleans())
    check(shape, data.draw(mixed(shape)), data.draw(st.integers(0, 2**31)), variant=variant, tolerance=6e-6,
          share=share)


@pytest.mark.parametrize("vectors", ["AVX2", pytest.param("SSE", marks=pytest.mark.slow)])
def test_narrower_vectors(vectors: str, tmp_path: Path) -> None:
    """What this machine compiles for CPUs that have less, in a process of its own."""
    code = f"""
import jax
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
from jaxpaged.pallas_kernels import native_attention
from jaxpaged.pallas_kernels.native_build import build
assert build(Path({str(tmp_path)!r}), [native_attention.KERNEL], {FLAGS[vectors]!r}) is None
from tests.pallas_kernels import test_native_attention as tests
for variant in (tests.PLAIN, tests.VARIANTS["window"], tests.VARIANTS["all"]):
    tests.check(tests.Shape(group=3, head_dim=20), [tests.Chunk(37), tests.Chunk(70, 40)], variant=variant,
                tolerance=4e-6)
    tests.test_a_row_is_bitwise_the_same_in_any_batch(variant)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


@jax.jit
def rotary_kv_write(case: dict[str, Any], pages: KVPages) -> tuple[jax.Array, KVPages]:
    q, k_pool, v_pool = native_attention.rotary_kv_write(**case, k_pool=pages.k, v_pool=pages.v)
    return q, KVPages(k_pool, v_pool)


@pytest.mark.parametrize("sizes", [(1, 4, 2, 64), (6, 7, 1, 16), (100, 3, 3, 80), (17, 9, 3, 6)])
def test_rotary_embedding_and_kv_write_against_float64(sizes: tuple[int, int, int, int]) -> None:
    case = rotary.make_case(*sizes, seed=4)
    rotary.check(case, rotary.make_pages(sizes[2], sizes[3], jnp.float32), 1e-5, rotary_kv_write)
    pages = [rotary.make_pages(sizes[2], sizes[3], jnp.float32) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, rotary_kv_write(rotary.in_one_array(case), pages[0]),
                 rotary_kv_write(case, pages[1]))
