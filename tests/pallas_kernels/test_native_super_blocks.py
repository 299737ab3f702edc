"""Native products with GGUF's blocks of 256: bitwise those of their weights as the gguf package widens them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.pallas_kernels import native_linear, native_packed
from jaxpaged.pallas_kernels.native_build import build
from tests.pallas_kernels.test_native_linear import FLAGS
from tests.pallas_kernels.test_native_packed import check

SIZES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
pytestmark = pytest.mark.slow  # a library is compiled for each


@pytest.fixture
def built(kind: str, native_folder: Path) -> None:
    failure = build(native_folder, [native_linear.KERNEL, native_packed.kernel_for(kind)])
    if failure:
        pytest.skip(f"the native kernel cannot be built here: {failure}")


def blocks(kind: str, size_out: int, count: int, seed: int = 0) -> np.ndarray:
    """Any bytes, but scales that are finite numbers."""
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, (size_out, count, SIZES[kind]), np.uint8)
    scales = (rng.standard_normal((size_out, count, 2)) / 64).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        found[..., 208:] = scales[..., :2]
    else:
        found[..., :4] = scales
    return found


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", SIZES)
def test_numbers_of_rows(kind: str) -> None:
    for rows in (1, 3, 8, 9, 17, 40):
        check(kind, blocks(kind, 48, 2, rows), rows)
    check(kind, blocks(kind, 32, 5), 3)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", SIZES)
def test_any_blocks(kind: str) -> None:
    @given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32))
    @settings(max_examples=20, deadline=None)
    def run(panels: int, count: int, rows: int, seed: int) -> None:
        check(kind, blocks(kind, 16 * panels, count, seed), rows, seed)

    run()


@pytest.mark.parametrize("vectors", FLAGS)
def test_narrower_vectors(vectors: str, tmp_path: Path) -> None:
    """What this machine compiles for CPUs that have less, in a process of its own."""
    code = f"""
import jax
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
from tests.pallas_kernels.test_native_super_blocks import SIZES, blocks, build, check, native_linear, native_packed
kernels = [native_linear.KERNEL, *map(native_packed.kernel_for, SIZES)]
assert build(Path({str(tmp_path)!r}), kernels, {FLAGS[vectors]!r}) is None
for kind in SIZES:
    for rows in (1, 3, 5, 40):
        check(kind, blocks(kind, 48, 3), rows)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
