"""The native CPU products against float64 NumPy, for every kind of vector that this CPU has."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import native_linear
from jaxpaged.pallas_kernels.native_build import build

DTYPES = ("float32", "bfloat16", "float16")
FLAGS = {"AVX2": ("-mno-avx512f",), "SSE": ("-mno-avx",)}  # what the compiler may not use


@pytest.fixture(scope="module", autouse=True)
def built(native_folder: Path) -> None:
    failure = build(native_folder, [native_linear.kernel_for(dtype) for dtype in DTYPES])
    if failure:
        pytest.skip(f"the native kernel cannot be built here: {failure}")


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


linear = jax.jit(native_linear.linear)
gated = jax.jit(native_linear.gated)
transposed = jax.jit(native_linear.transposed)
rms_norm = jax.jit(native_linear.rms_norm, static_argnums=2)


def check(rows: int, size_in: int, size_out: int, seed: int = 0) -> None:
    """Every kernel on one shape."""
    x, w, up = draw((rows, size_in), seed), draw((size_in, size_out), seed + 1), draw((size_in, size_out), seed + 2)
    narrow = draw((size_in, max(1, size_out // 3)), seed + 3)
    w /= np.float32(size_in**0.5)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    wanted = x64 @ w64
    close = {"rtol": 1e-5, "atol": 1e-5 * size_in**0.5}
    np.testing.assert_allclose(linear(x, w), wanted, **close)
    np.testing.assert_allclose(linear(x, narrow), x64 @ narrow, **close)
    np.testing.assert_allclose(transposed(x, np.ascontiguousarray(w.T)), wanted, **close)
    np.testing.assert_allclose(gated(x, np.hstack([w, up])), wanted / (1 + np.exp(-wanted)) * (x64 @ up), **close)
    normed = x64 / np.sqrt(np.mean(x64 * x64, axis=1, keepdims=True) + 0.1)
    np.testing.assert_allclose(rms_norm(x, w[:, 0], 0.1), normed * w[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 257, 300])
def test_numbers_of_rows(rows: int) -> None:
    check(rows, 65, 100)


@pytest.mark.parametrize("size_in", [1, 2, 3, 383, 384, 385, 769, 1536])
@pytest.mark.parametrize("rows", [3, 40])
def test_depths(rows: int, size_in: int) -> None:
    check(rows, size_in, 49)


@pytest.mark.parametrize("size_out", [1, 15, 16, 17, 47, 48, 49, 255, 257, 1000])
@pytest.mark.parametrize("rows", [3, 40])
def test_widths(rows: int, size_out: int) -> None:
    check(rows, 20, size_out)


@settings(max_examples=20)
@given(rows=st.integers(1, 300), size_in=st.integers(1, 900), size_out=st.integers(1, 700), seed=st.integers(0, 999))
def test_any_shape(rows: int, size_in: int, size_out: int, seed: int) -> None:
    check(rows, size_in, size_out, seed)


@cache
def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return draw((300, 400), 0), draw((400, 200), 1), draw((400, 200), 2), draw((200, 400), 3)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 32, 33, 100])
def test_a_row_is_bitwise_the_same_among_any_number(rows: int) -> None:
    x, w, up, table = operands()
    for run in (lambda x: linear(x, w), lambda x: gated(x, np.hstack([w, up])), lambda x: transposed(x, table),
                lambda x: rms_norm(x, table[0], 1e-5)):
        np.testing.assert_array_equal(run(x[:rows]), np.asarray(run(x))[:rows])


def check_stored(rows: int, size_in: int, size_out: int, dtype: str, seed: int = 0) -> None:
    """Products with weights in 16 bits are bitwise those of the same numbers in float32."""
    x, w = draw((rows, size_in), seed), np.array(jnp.asarray(draw((size_in, 2 * size_out), seed + 1), dtype))
    w[0, :3] = np.array([0.0, -0.0, 3e-6]).astype(w.dtype)[: 2 * size_out]  # the last has no leading one in float16
    wide = w.astype(np.float32)
    for run, turn in ((linear, False), (gated, False), (transposed, True)):
        kept, widened = (np.ascontiguousarray(item.T if turn else item) for item in (w, wide))
        np.testing.assert_array_equal(run(x, kept), run(x, widened))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rows", [1, 9, 33])
@pytest.mark.parametrize("shape", [(400, 192), (65, 100), (7, 5)], ids=str)
def test_weights_in_16_bits_give_the_results_of_float32(rows: int, shape: tuple[int, int], dtype: str) -> None:
    check_stored(rows, *shape, dtype)


def test_every_number_of_16_bits_is_widened_exactly() -> None:
    """Infinite ones as well; what is no number stays none."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(1, -1)
    one = np.ones((1, 1), np.float32)
    for dtype in DTYPES[1:]:
        values = bits.view(jnp.dtype(dtype))
        # The runtime takes float32 numbers that small for zeros, in both.
        wide = values.astype(np.float32)
        np.testing.assert_array_equal(linear(one, values), linear(one, wide))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [5, 40])
def test_what_is_not_finite_stays_in_its_row_or_column(rows: int, value: float) -> None:
    x, w, up, table = operands()
    x, bad, bad_w, bad_table = x[:rows], x[:rows].copy(), w.copy(), table.copy()
    bad[3, 7] = bad_w[5, 9] = bad_table[9, 5] = value
    for run, broken, weights in ((linear, bad_w, w),
                                 (lambda x, w: gated(x, np.hstack([w, up])), bad_w, w),
                                 (transposed, bad_table, table)):
        clean = np.asarray(run(x, weights))
        found, others = np.asarray(run(bad, weights)), np.arange(rows) != 3
        assert not np.isfinite(found[3]).any()
        np.testing.assert_array_equal(found[others], clean[others])
        found, others = np.asarray(run(x, broken)), np.arange(200) != 9
        assert not np.isfinite(found[:, 9]).all()
        np.testing.assert_array_equal(found[:, others], clean[:, others])


def test_infinite_weights_meet_zeros_as_in_ieee() -> None:
    x, w = np.zeros((2, 3), np.float32), np.full((3, 5), np.inf, np.float32)
    assert np.isnan(linear(x, w)).all() and np.isnan(transposed(x, np.ascontiguousarray(w.T))).all()


@pytest.mark.parametrize("vectors", ["AVX2", pytest.param("SSE", marks=pytest.mark.slow)])
def test_narrower_vectors(vectors: str, tmp_path: Path) -> None:
    """What this machine compiles for CPUs that have less, in a process of its own."""
    code = f"""
import jax
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
from jaxpaged.pallas_kernels import native_linear
from jaxpaged.pallas_kernels.native_build import build
kernels = [native_linear.kernel_for(dtype) for dtype in ("float32", "bfloat16", "float16")]
assert build(Path({str(tmp_path)!r}), kernels, {FLAGS[vectors]!r}) is None
from tests.pallas_kernels.test_native_linear import check, check_stored
for rows in (1, 3, 4, 32, 33, 100):
    check(rows, 400, 129)
check(70, 33, 5)
for dtype in ("bfloat16", "float16"):
    for rows in (1, 4, 33):
        check_stored(rows, 65, 100, dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
