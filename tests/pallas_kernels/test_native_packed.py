"""Native products with GGUF's blocks: bitwise those of the same weights widened, as the gguf package widens them."""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.loading.gguf_blocks import pack
from jaxpaged.models.quantization import GGUF_BLOCKS, PackedType
from jaxpaged.pallas_kernels import native_linear, native_packed
from jaxpaged.pallas_kernels.native_build import build
from tests.pallas_kernels.test_native_linear import FLAGS

BLOCKS = ("Q4_0", "Q4_1", "Q8_0")
KERNELS = [native_linear.KERNEL, *map(native_packed.kernel_for, BLOCKS)]


@pytest.fixture(scope="module", autouse=True)
def built(native_folder: Path) -> None:
    failure = build(native_folder, KERNELS)
    if failure:
        pytest.skip(f"the native kernel cannot be built here: {failure}")


@cache
def jitted(function: Any, *kind: str, **more: bool) -> Any:
    if not kind:
        return jax.jit(function)
    return jax.jit(lambda x, *weights: function(x, kind[0], weights, **more))


def packed(blocks: np.ndarray, kind: str) -> tuple[jax.Array, ...]:
    """The arrays of blocks [out, blocks of a row, bytes]."""
    shapes = PackedType(kind, GGUF_BLOCKS[kind]).shapes(GGUF_BLOCKS[kind] * blocks.shape[1], len(blocks))
    arrays = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
    pack(blocks, kind, np.arange(len(blocks)), arrays)
    return tuple(jnp.asarray(arrays[name]) for name in "qdmsh" if name in arrays)


def compare_products(kind: str, weights: Sequence[jax.Array], wide: np.ndarray, rows: int,
                     rng: np.random.Generator) -> None:
    """All products of some rows with packed weights, and rows of a table, are bitwise those of `wide`, [out, in]."""
    size_out, size_in = wide.shape
    x, columns = rng.standard_normal((rows, size_in), np.float32), np.ascontiguousarray(wide.T)
    same = partial(np.testing.assert_array_equal, strict=True)
    same(jitted(native_packed.linear, kind)(x, *weights), jitted(native_linear.linear)(x, columns))
    same(jitted(native_packed.linear, kind, one_sum=True)(x, *weights), jitted(native_linear.transposed)(x, wide))
    if size_out % 32 == 0:
        same(jitted(native_packed.gated, kind)(x, *weights), jitted(native_linear.gated)(x, columns))
    ids = rng.integers(0, size_out, rows).astype(np.int32)
    same(jitted(native_packed.look_up, kind)(ids, *weights), wide[ids])


def check(kind: str, blocks: np.ndarray, rows: int, seed: int = 0) -> None:
    """All products of some rows with blocks [out, blocks of a row, bytes], and the rows of a table."""
    with np.errstate(all="ignore"):
        wide = dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[kind]).astype(np.float32)
    compare_products(kind, packed(blocks, kind), wide, rows, np.random.default_rng(seed))


def quantized(kind: str, size_out: int, size_in: int, seed: int = 0) -> np.ndarray:
    weights = np.random.default_rng(seed).standard_normal((size_out, size_in), np.float32) / 4
    blocks: np.ndarray = quantize(weights, GGMLQuantizationType[kind])
    return blocks.reshape(size_out, size_in // 32, -1)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 33, 100])
def test_numbers_of_rows(kind: str, rows: int) -> None:
    check(kind, quantized(kind, 96, 416), rows)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("size_out", "size_in"), [(16, 32), (48, 64), (80, 1536), (32, 2080)])
def test_sizes(kind: str, size_out: int, size_in: int) -> None:
    for rows in (2, 40):
        check(kind, quantized(kind, size_out, size_in), rows)


@given(st.sampled_from(sorted(BLOCKS)), st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=12)
def test_any_blocks(kind: str, panels: int, columns: int, rows: int, seed: int) -> None:
    """All bytes are possible: finite scales and minimums of any size and sign, subnormal ones too."""
    rng = np.random.default_rng(seed)
    size = quantized(kind, 16, 32).shape[-1]
    blocks = rng.integers(0, 256, (16 * panels, columns, size), np.uint8)
    blocks[..., 1 : 4 : 2] &= 0xFB  # no scale of all exponent bits
    check(kind, blocks, rows, seed)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_scale_that_is_not_finite_stays_in_its_column(kind: str) -> None:
    blocks = quantized(kind, 32, 64)
    weights, x = packed(blocks, kind), np.ones((3, 64), np.float32)
    clean = np.asarray(jitted(native_packed.linear, kind)(x, *weights))
    blocks[5, 1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    found = np.asarray(jitted(native_packed.linear, kind)(x, *packed(blocks, kind)))
    assert not np.isfinite(found[:, 5]).any()
    np.testing.assert_array_equal(np.delete(found, 5, 1), np.delete(clean, 5, 1))


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_rows_result_does_not_depend_on_the_others(kind: str) -> None:
    weights = packed(quantized(kind, 96, 800), kind)
    x = np.random.default_rng(1).standard_normal((90, 800), np.float32)
    for product in (native_packed.linear, native_packed.gated):
        run = jitted(product, kind)
        whole = np.asarray(run(x, *weights))
        for rows in (1, 7, 9, 40):
            np.testing.assert_array_equal(run(x[5 : 5 + rows], *weights), whole[5 : 5 + rows])


@pytest.mark.parametrize("vectors", ["AVX2", pytest.param("SSE", marks=pytest.mark.slow)])
def test_narrower_vectors(vectors: str, tmp_path: Path) -> None:
    """What this machine compiles for CPUs that have less, in a process of its own."""
    code = f"""
import jax
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
from tests.pallas_kernels.test_native_packed import BLOCKS, KERNELS, build, check, quantized
assert build(Path({str(tmp_path)!r}), KERNELS, {FLAGS[vectors]!r}) is None
for kind in BLOCKS:
    for rows in (1, 3, 5, 40):
        check(kind, quantized(kind, 48, 416), rows)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
