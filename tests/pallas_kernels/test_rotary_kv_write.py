"""Rotary embedding and KV write in one kernel, interpreted, against float64; and what the compiler makes of it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu_code import analyze
from jaxpaged.execution.aot import dump_options, no_persistent_cache
from jaxpaged.pallas_kernels import reference
from jaxpaged.pallas_kernels.heads import Heads
from jaxpaged.pallas_kernels.kv_pages import KVPages, is_scaled
from jaxpaged.pallas_kernels.lowering import GpuTarget, lowering_for
from jaxpaged.pallas_kernels.rotary_kv_write import rotary_kv_write
from tests.support.compile_only import OTHER_GPU, QUICK_GPU, compile_only_device

INTERPRET = GpuTarget((9, 0), 132, interpret=True)
PAGES, SIZE = 9, 16


@jax.jit
def run(case: dict[str, Any], pages: KVPages) -> tuple[jax.Array, KVPages]:
    q, _, pages = rotary_kv_write(**case, pages=pages, target=INTERPRET)
    return q, pages


def make_case(tokens: int, heads: int, kv_heads: int, head_dim: int, seed: int, *, padding: int = 0) -> dict[str, Any]:
    """Rows at distinct pages and offsets, the last `padding` of them without a page.

    Page 0 stays free, as in the engine: interpreting writes back there what it finds, for rows without a page.
    """
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 6.3, (tokens, head_dim // 2))
    where = SIZE + rng.permutation((PAGES - 1) * SIZE)[:tokens]
    page = where // SIZE
    page[tokens - padding :] = -1
    return {
        "q": rng.standard_normal((tokens, heads, head_dim), np.float32),
        "k": rng.standard_normal((tokens, kv_heads, head_dim), np.float32),
        "v": rng.standard_normal((tokens, kv_heads, head_dim), np.float32),
        "cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32),
        "page": page.astype(np.int32), "offset": (where % SIZE).astype(np.int32),
    }


def make_pages(kv_heads: int, head_dim: int, dtype: Any, seed: int = 0) -> KVPages:
    """Pools full of numbers, so that a write too many shows."""
    rng = np.random.default_rng(seed)
    pool = [jnp.asarray(rng.integers(-9, 9, (PAGES, SIZE, kv_heads, head_dim)), dtype) for _ in "kv"]
    scale = [jnp.asarray(rng.random((PAGES, kv_heads, SIZE)), jnp.float32) if is_scaled(dtype) else None for _ in "kv"]
    return KVPages(*pool, *scale)


def turned(x: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    """In float64."""
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = (case[name].astype(np.float64)[:, None] for name in ("cos", "sin"))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def check(case: dict[str, Any], pages: KVPages, tolerance: float, run: Callable[..., Any] = run) -> None:
    """Queries, the rows in the pools, and that everything else is unchanged."""
    before = [np.asarray(pool, np.float64) for pool in (pages.k, pages.v)]
    q, found = run(case, pages)
    np.testing.assert_allclose(np.asarray(q, np.float64), turned(case["q"], case), rtol=tolerance, atol=tolerance)
    wanted = turned(case["k"], case), case["v"].astype(np.float64)
    real = case["page"] >= 0
    at = case["page"][real], case["offset"][real]
    for pool, scale, old, rows in zip(found[:2], found[2:], before, wanted, strict=True):
        new = np.asarray(pool, np.float64)
        stored = new[at]
        if scale is not None:
            stored = stored * np.asarray(scale, np.float64).swapaxes(1, 2)[at][..., None]
        np.testing.assert_allclose(stored, rows[real], rtol=tolerance,
                                   atol=np.abs(rows).max() / 250 if scale is not None else tolerance)
        new[at] = old[at]
        np.testing.assert_array_equal(new, old)


@settings(max_examples=12)
@given(st.sampled_from([(1, 4, 2, 64), (6, 7, 1, 16), (8, 3, 3, 80)]),
       st.integers(0, 2**31), st.integers(0, 5))
def test_against_float64(sizes: tuple[int, int, int, int], seed: int, padding: int) -> None:
    case = make_case(*sizes, seed, padding=min(padding, sizes[0]))
    check(case, make_pages(sizes[2], sizes[3], jnp.float32), 1e-5)


def in_one_array(case: dict[str, Any]) -> dict[str, Any]:
    """Queries, keys and values as heads of one array, in another order, with heads between that nobody asks for."""
    tokens, count, head_dim = case["k"].shape
    other = np.full((tokens, 2, head_dim), np.nan, np.float32)
    array = jnp.concatenate([other, case["v"], case["q"], other, case["k"]], axis=1)
    heads = case["q"].shape[1]
    return case | {"q": Heads(array, 2 + count, heads), "k": Heads(array, 4 + count + heads, count),
                   "v": Heads(array, 2, count)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_heads_of_one_array(dtype: Any) -> None:
    case = make_case(6, 4, 2, 64, 3, padding=2)
    wanted = run(case, make_pages(2, 64, dtype))
    jax.tree.map(np.testing.assert_array_equal, run(in_one_array(case), make_pages(2, 64, dtype)), wanted)


def test_queries_padded_for_mosaic() -> None:
    case = make_case(6, 6, 2, 64, 3, padding=2)
    wanted, pages = run(case, make_pages(2, 64, jnp.int8))
    q, padded, found = jax.jit(partial(rotary_kv_write, target=INTERPRET, token_rows=8))(
        **in_one_array(case), pages=make_pages(2, 64, jnp.int8))
    jax.tree.map(np.testing.assert_array_equal, (q, found), (wanted, pages))
    rows = np.asarray(padded)
    np.testing.assert_array_equal(rows[:, :, :3].reshape(q.shape), wanted)
    assert rows.shape == (6, 2, 8, 64) and not rows[:, :, 3:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (jnp.bfloat16, 0.01), (jnp.float16, 0.002), (jnp.int8, 1e-5), (jnp.float8_e4m3fn, 0.07)])
def test_page_dtypes(dtype: Any, tolerance: float) -> None:
    case = make_case(6, 2, 1, 64, 1, padding=2)
    check(case, make_pages(1, 64, dtype), tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_the_specification_says_the_same(dtype: Any) -> None:
    """Also that a row of zeros gets the scale 1."""
    case = make_case(6, 2, 1, 64, 2, padding=2)
    case["v"][3] = 0
    pages = make_pages(1, 64, dtype)
    wanted_q, wanted = reference.rotary_kv_write(**{name: jnp.asarray(x) for name, x in case.items()}, pages=pages)
    q, found = run(case, pages)
    np.testing.assert_allclose(q, wanted_q, atol=1e-5)
    for pool, expected in zip(found, wanted, strict=True):
        if pool is not None:
            np.testing.assert_allclose(np.asarray(pool, np.float32), np.asarray(expected, np.float32),
                                       atol=1.01 if pool.dtype == jnp.int8 else 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int8])
def test_no_value_in_a_page_is_infinite_or_nan(dtype: Any) -> None:
    """A token with one gets a value of zeros and a key of NaN for every query that sees it; heads are independent."""
    case = make_case(6, 2, 2, 16, 4)
    case["v"][1, 0, 3], case["v"][2, 1, 15], case["k"][3, 0, 0] = np.nan, np.inf, -np.inf
    case["v"][4, 1, 0] = 1e5 if dtype == jnp.float16 else 3e38  # too much for float16; much, but not for float32
    q, pages = run(case, make_pages(2, 16, dtype))
    _, wanted = reference.rotary_kv_write(
        **{name: jnp.asarray(x) for name, x in case.items()}, pages=make_pages(2, 16, dtype))
    at = case["page"], case["offset"]
    bad = np.zeros((6, 2), bool)
    bad[1, 0] = bad[2, 1] = bad[3, 0] = True
    bad[4, 1] = dtype == jnp.float16
    for found in (pages, wanted):
        k, v = (np.asarray(pool, np.float32)[at] for pool in found[:2])
        if is_scaled(dtype):
            k, v = (rows * np.asarray(scale).swapaxes(1, 2)[at][..., None]
                    for rows, scale in zip((k, v), found[2:], strict=True))
        assert (np.isnan(k).all(axis=-1) == bad).all() and (np.isnan(k).any(axis=-1) == bad).all()
        assert np.isfinite(v).all() and ((v == 0).all(axis=-1) == bad).all()
    assert np.isfinite(q).all()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_rows_of_the_smallest_numbers_become_zeros(dtype: Any) -> None:
    """Their scale would be less than any number that devices count with; what it divides would be infinite."""
    case = make_case(6, 2, 1, 64, 5)
    for name in ("k", "v"):
        case[name] *= np.float32(1e-37) / np.abs(case[name]).max(axis=-1, keepdims=True)
    _, pages = run(case, make_pages(1, 64, dtype))
    at = case["page"], case["offset"]
    for pool, scale in zip(pages[:2], pages[2:], strict=True):
        assert not np.asarray(pool, np.float32)[at].any()
        assert (np.asarray(scale).swapaxes(1, 2)[at] == 1).all()


@pytest.mark.parametrize(("gpu", "tokens", "head_dim", "dtype", "apart"), [
    (QUICK_GPU, 64, 128, jnp.bfloat16, False), (QUICK_GPU, 8192, 128, jnp.int8, False),
    (QUICK_GPU, 256, 80, jnp.float8_e4m3fn, True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (QUICK_GPU, 8192, 64, jnp.bfloat16, False), (OTHER_GPU, 64, 64, jnp.bfloat16, True),
        (OTHER_GPU, 8192, 128, jnp.int8, False), (OTHER_GPU, 1, 96, jnp.float16, False))),
])
def test_compiled_for_gpus(gpu: str, tokens: int, head_dim: int, dtype: Any, apart: bool, tmp_path: Path) -> None:
    """One launch, in place, 16 bytes at a time, nothing spilled; queries, keys and values in one array, or apart."""
    device = compile_only_device(gpu)
    target, sharding = GpuTarget.of(device), jax.sharding.SingleDeviceSharding(device)
    case = make_case(tokens=1, heads=1, kv_heads=1, head_dim=head_dim, seed=0)
    heads = {"q": 32, "k": 8, "v": 8}
    shapes = {name: jax.ShapeDtypeStruct((tokens, heads[name], head_dim) if name in heads else (tokens, *x.shape[1:]),
                                         jnp.bfloat16 if name in heads else x.dtype, sharding=sharding)
              for name, x in case.items()}
    pool = jax.ShapeDtypeStruct((4096, 16, 8, head_dim), dtype, sharding=sharding)
    scale = jax.ShapeDtypeStruct((4096, 8, 16), jnp.float32, sharding=sharding) if is_scaled(dtype) else None
    pages = KVPages(pool, pool, scale, scale)  # type: ignore[arg-type]
    array = jax.ShapeDtypeStruct((tokens, sum(heads.values()), head_dim), jnp.bfloat16, sharding=sharding)
    where = {"q": 0, "k": heads["q"], "v": heads["q"] + heads["k"]}

    def write(q: Any, rest: Any, pages: KVPages) -> Any:
        if not apart:
            rest = rest | {name: Heads(q, first, heads[name]) for name, first in where.items()}
        return rotary_kv_write(**{"q": q} | rest, pages=pages, target=target)

    queries = shapes.pop("q")
    with lowering_for(device):
        lowered = jax.jit(write, donate_argnums=(0, 2) if apart else 2).lower(
            queries if apart else array, shapes, pages)
    with no_persistent_cache():
        facts = analyze(lowered.compile(compiler_options=dump_options(tmp_path)), tmp_path, kernels="rotary")
    leaves = jax.tree.leaves(pages)
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert facts.alias_bytes == pool_bytes + apart * tokens * 32 * head_dim * 2 and not facts.temporary_bytes
    assert [launch.name for launch in facts.work] == ["rotary_kv_write"]
    kernel = facts.kernel("rotary_kv_write")
    assert not kernel.spill_bytes and kernel.registers <= 128
    if head_dim in (64, 128):  # others are cut into runs, some of them narrower
        assert kernel.wide_loads >= kernel.loads - 6 and kernel.wide_stores >= 8
