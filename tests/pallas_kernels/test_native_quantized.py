"""Native products with integers and 8-bit floats in groups: bitwise those of the same weights widened."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import native_linear, native_packed
from jaxpaged.pallas_kernels.native_build import build
from tests.pallas_kernels.test_native_linear import FLAGS
from tests.pallas_kernels.test_native_packed import compare_products

KINDS = [f"{kind}_{scale}" for kind in ("I4", "I8", "F8") for scale in ("F16", "BF16", "F32")]
SCALES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
pytestmark = pytest.mark.slow  # a library is compiled for each


@pytest.fixture
def built(kind: str, native_folder: Path) -> None:
    failure = build(native_folder, [native_linear.KERNEL, native_packed.kernel_for(kind)])
    if failure:
        pytest.skip(f"the native kernel cannot be built here: {failure}")


def lanes(codes: np.ndarray, bits: int) -> np.ndarray:
    """[out / 16, words of an output, 64] of numbers [out, in], one word after the other."""
    size_out, size_in = codes.shape
    count = 32 // bits
    places = [0, 8, 16, 24] if bits == 8 else [0, 8, 16, 24, 4, 12, 20, 28]
    found = np.zeros((size_out // 16, size_in // count, 16), np.uint32)
    for row in range(size_out):
        for column in range(size_in):
            found[row // 16, column // count, row % 16] |= np.uint32(codes[row, column]) << np.uint32(
                places[column % count])
    return found.view(np.uint8).reshape(*found.shape[:2], 64)


def check(kind: str, size_out: int, size_in: int, group: int, rows: int, zeros: bool, seed: int = 0) -> None:
    """All products of some rows with weights of any numbers, and the rows of a table."""
    rng = np.random.default_rng(seed)
    name, _, scale = kind.partition("_")
    bits, groups = int(name[1]), size_in // group
    codes = rng.integers(0, 1 << bits, (size_out, size_in), np.uint8)
    scales = (rng.standard_normal((size_out, groups)) * 2.0 ** rng.integers(-8, 4)).astype(SCALES[scale])
    zero = rng.integers(0, 1 << bits, (size_out, groups), np.uint8)
    if name == "F8":
        codes[(codes & 127) == 127] = 0  # no number
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        less = zero.astype(np.float64) if zeros else np.full(zero.shape, 2.0 ** (bits - 1))
        values = codes - np.repeat(less, group, 1)
    wide = (values * np.repeat(scales.astype(np.float64), group, 1)).astype(np.float32)

    def panels(numbers: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(numbers.reshape(size_out // 16, 16, groups).transpose(0, 2, 1))

    weights = [jnp.asarray(leaf) for leaf in (lanes(codes, bits), panels(scales), *[panels(zero)] * zeros)]
    compare_products(kind, weights, wide, rows, rng)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_rows_and_groups(kind: str) -> None:
    """Groups as long as blocks of sums, longer, and all of the inputs; few rows and many."""
    zeros = not kind.startswith("F8")
    for rows in (1, 3, 8, 9, 17, 40):
        check(kind, 48, 416, 416, rows, False)
        check(kind, 32, 832, 64, rows, zeros)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
def test_any_numbers(kind: str) -> None:
    @given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32))
    @settings(max_examples=20, deadline=None)
    def run(panels: int, blocks: int, groups: int, rows: int, seed: int) -> None:
        check(kind, 16 * panels, 32 * blocks * groups, 32 * blocks, rows, kind[0] == "I" and seed % 2 == 0, seed)

    run()


@pytest.mark.parametrize("vectors", FLAGS)
def test_narrower_vectors(vectors: str, tmp_path: Path) -> None:
    """What this machine compiles for CPUs that have less, in a process of its own."""
    code = f"""
import jax
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
from tests.pallas_kernels.test_native_quantized import KINDS, build, check, native_linear, native_packed
kernels = [native_linear.KERNEL, *map(native_packed.kernel_for, KINDS)]
assert build(Path({str(tmp_path)!r}), kernels, {FLAGS[vectors]!r}) is None
for kind in KINDS:
    for rows in (1, 3, 5, 40):
        check(kind, 48, 416, 32, rows, kind[0] == "I")
        check(kind, 16, 832, 416, rows, False)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
