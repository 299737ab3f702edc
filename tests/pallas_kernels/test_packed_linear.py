"""The GPU's products with packed weights: the layout, the kernel interpreted, and its PTX emulated, against NumPy."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpaged.pallas_kernels import packed_linear, packed_numbers, reference
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.packed_layout import (
    BITS,
    PackedLayout,
    PackedWeight,
    dequantize,
    pack,
    pack_words,
)
from tests.pallas_kernels.test_paged_attention import QUICKLY_COMPILED
from tests.support import ptx

# A GPU of 4 multiprocessors: weights of several hundred rows are split into parts.
TARGET = GpuTarget((9, 0), 4, interpret=True)
ALL_ROWS = 10**6
FLOATS = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint quantizes: see `pack`; `zero` may be "points" or "minimums", one per group and column."""

    kind: str
    group: int
    zero: str | int = 0
    scale_columns: int = 1
    scale_dtype: Any = np.float16


SCHEMES = {
    "awq-128": Scheme("int4", 128, "points"),
    "gptq-32": Scheme("int4", 32, "points"),
    "gptq-channel": Scheme("int4", ALL_ROWS, "points"),
    "symmetric-128": Scheme("int4", 128, 8, scale_dtype=ml_dtypes.bfloat16),
    "odd-groups": Scheme("int4", 96, "points"),
    "Q4_0": Scheme("int4", 32, 8),
    "Q4_1": Scheme("int4", 32, "minimums"),
    "Q4_K": Scheme("int4", 32, "minimums", scale_dtype=np.float32),
    "Q8_0": Scheme("int8", 32),
    "Q6_K": Scheme("int8", 16, scale_dtype=np.float32),
    "int8-channel": Scheme("int8", ALL_ROWS),
    "gptq-8-bits": Scheme("int8", 128, "points"),
    "fp8-blocks": Scheme("fp8", 128, scale_columns=128, scale_dtype=np.float32),
    "fp8-channel": Scheme("fp8", ALL_ROWS, scale_dtype=np.float32),
    "fp8-tensor": Scheme("fp8", ALL_ROWS, scale_columns=ALL_ROWS, scale_dtype=np.float32),
}


@dataclass
class Quantized:
    """A weight as a checkpoint holds it."""

    scheme: Scheme
    numbers: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | int
    minimum: np.ndarray | None

    @classmethod
    def random(cls, scheme: Scheme, rows: int, columns: int, seed: int = 0) -> "Quantized":
        random = np.random.default_rng(seed)
        groups = -(-rows // scheme.group)
        numbers = {
            "int4": lambda: random.integers(0, 16, (rows, columns), np.uint8),
            "int8": lambda: random.integers(-128, 128, (rows, columns)).astype(np.int8),
            "fp8": lambda: random.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn),
        }[scheme.kind]()
        scale = (random.random((groups, -(-columns // scheme.scale_columns))) * 0.01).astype(scheme.scale_dtype)
        zero: Any = scheme.zero if isinstance(scheme.zero, int) else 0
        if scheme.zero == "points" and scheme.kind == "int4":
            zero = random.choice([0, 7, 8, 15, 16], (groups, columns)).astype(np.uint8)
        elif scheme.zero == "points":  # the first GPTQ's zero points are one more than what is stored
            zero = random.choice([-127, -1, 0, 127, 128], (groups, columns)).astype(np.int16)
        minimum = None
        if scheme.zero == "minimums":
            minimum = (random.standard_normal((groups, columns)) * 0.05).astype(scheme.scale_dtype)
        return cls(scheme, numbers, scale, zero, minimum)

    def pack(self) -> tuple[PackedWeight, PackedLayout]:
        return pack(self.numbers, self.scale, self.zero, self.minimum, kind=self.scheme.kind, group=self.scheme.group,
                    scale_columns=self.scheme.scale_columns)

    def terms(self) -> tuple[np.ndarray, np.ndarray]:
        """Products of scales and numbers, and what is added to them: float64 [rows, columns] both."""
        rows, columns = self.numbers.shape
        group = np.arange(rows) // self.scheme.group
        scale = self.scale.astype(np.float64)[group][:, np.arange(columns) // self.scheme.scale_columns]
        if self.minimum is not None:
            return scale * self.numbers.astype(np.float64), self.minimum.astype(np.float64)[group]
        zero = self.zero.astype(np.float64)[group] if isinstance(self.zero, np.ndarray) else float(self.zero)
        return scale * self.numbers.astype(np.float64), -scale * zero


def run(x: jax.Array, weight: PackedWeight, layout: PackedLayout) -> np.ndarray:
    function = jax.jit(partial(packed_linear.product, layout=layout, target=TARGET), compiler_options=QUICKLY_COMPILED)
    return np.asarray(function(x, jax.tree.map(jnp.asarray, weight)))


def check(quantized: Quantized, height: int, dtype: Any, *, x_scale: float = 1, seed: int = 1) -> None:
    """One rounding of the result, and float32's of the sums, whose terms are as large as the offset makes them."""
    rows, columns = quantized.numbers.shape
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((height, rows)) * x_scale, dtype)
    weight, layout = quantized.pack()
    found = run(x, weight, layout)
    assert found.dtype == dtype and found.shape == (height, columns)
    exact, (products, added) = np.asarray(x, np.float64), quantized.terms()
    wanted = exact @ (products + added)
    group = np.arange(rows) // quantized.scheme.group
    scale = quantized.scale.astype(np.float64)[group][:, np.arange(columns) // quantized.scheme.scale_columns]
    lifted = scale * packed_numbers.offset(quantized.scheme.kind, dtype)
    terms = np.abs(exact) @ (np.abs(products) + np.abs(added) + lifted)
    allowed = np.abs(wanted) * float(jnp.finfo(dtype).eps) / 2 + terms * 2.0**-21 + float(jnp.finfo(dtype).tiny)
    assert (np.abs(found.astype(np.float64) - wanted) <= allowed).all()


@pytest.mark.parametrize(("name", "height", "dtype"), [
    *zip(SCHEMES, (1, 3, 16, 17, 33, 64, 5, 2, 9, 4, 70, 8, 15, 32, 7), FLOATS * 8, strict=False),
    *[pytest.param(name, height, dtype, marks=pytest.mark.slow)
      for name in SCHEMES for height in (1, 2, 15, 16, 17, 31, 33, 64, 65, 130) for dtype in FLOATS],
])
def test_the_kernel_rounds_once(name: str, height: int, dtype: Any) -> None:
    """Rows that are not whole groups or blocks, columns that are not whole tiles."""
    check(Quantized.random(SCHEMES[name], 280, 72), height, dtype)


@pytest.mark.parametrize(("name", "rows"), [("awq-128", 1664), ("gptq-channel", 1100)])
def test_parts_of_the_rows_are_added_in_order(name: str, rows: int) -> None:
    """What is added once for all rows is not added by each part."""
    quantized = Quantized.random(SCHEMES[name], rows, 64)
    _, layout = quantized.pack()
    assert packed_linear.num_parts(TARGET, layout) > 1
    check(quantized, 3, jnp.bfloat16)


def test_there_are_as_many_parts_at_any_height() -> None:
    """So that the order of a sum does not depend on how many sequences share a step."""
    layout = Quantized.random(SCHEMES["awq-128"], 4096, 64).pack()[1]
    one_wide = replace(layout, columns=4096)
    gpu = GpuTarget((9, 0), 132)
    for wide in (layout, one_wide, replace(layout, columns=28672), replace(layout, rows=14336, columns=4096)):
        parts = packed_linear.num_parts(gpu, wide)
        steps = -(-wide.blocks // parts)
        assert 1 <= parts <= packed_linear.MAX_PARTS and (parts - 1) * steps < wide.blocks <= parts * steps
        assert parts == 1 or steps * wide.block >= packed_linear.MIN_PART


@pytest.mark.parametrize(("scale", "x_scale"), [(2.0**-24, 1.0), (65504.0, 2.0**-20), (1e-30, 1e10), (3e30, 1e-10)])
def test_extreme_scales(scale: float, x_scale: float) -> None:
    """Float16's smallest and largest, and what only float32 holds."""
    scheme = replace(SCHEMES["awq-128"], scale_dtype=np.float16 if 2.0**-24 <= scale <= 65504 else np.float32)
    quantized = Quantized.random(scheme, 256, 64)
    quantized.scale[:] = scale
    check(quantized, 2, jnp.bfloat16, x_scale=x_scale)


@pytest.mark.parametrize("zero", [0, 15, 16])
def test_extreme_zero_points(zero: int) -> None:
    quantized = Quantized.random(replace(SCHEMES["awq-128"], zero="points"), 256, 64)
    quantized.zero = np.full_like(quantized.zero, zero)
    quantized.numbers[:, :3] = [0, 15, zero % 16]
    check(quantized, 2, jnp.float16)


def test_rows_do_not_touch_each_other() -> None:
    weight, layout = Quantized.random(SCHEMES["gptq-32"], 256, 64).pack()
    x = np.random.default_rng(2).standard_normal((18, 256)).astype(ml_dtypes.bfloat16)
    clean = run(jnp.asarray(x), weight, layout)
    x[[0, 16]] = np.nan
    spoiled = run(jnp.asarray(x), weight, layout)
    assert np.isnan(spoiled[[0, 16]]).all()
    np.testing.assert_array_equal(np.delete(spoiled, [0, 16], 0), np.delete(clean, [0, 16], 0))


def test_many_rows_are_multiplied_with_the_dequantized_weight() -> None:
    """Which rounds its values to 16 bits first."""
    quantized = Quantized.random(SCHEMES["Q4_1"], 96, 72)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((packed_linear.DEQUANTIZED_ROWS, 96)), jnp.bfloat16)
    found = run(x, *quantized.pack())
    dense = sum(quantized.terms()).astype(ml_dtypes.bfloat16).astype(np.float64)  # type: ignore[union-attr]
    wanted = np.asarray(x, np.float64) @ dense
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2**-8, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", SCHEMES)
def test_the_layout_means_what_was_packed(name: str) -> None:
    quantized = Quantized.random(SCHEMES[name], 280, 200)
    weight, layout = quantized.pack()
    plain = PackedWeight(jnp.asarray(weight.words), jnp.ones((layout.groups, 1)))
    as_stored = replace(layout, zero=0, scale_columns=layout.padded_columns)
    np.testing.assert_array_equal(dequantize(plain, as_stored), quantized.numbers.astype(np.float32))
    leaves = jax.tree.map(jnp.asarray, weight)
    products, added = quantized.terms()
    # Exact but for the rounding of a product and a sum; scales of 11 bits times numbers have no rounding at all.
    np.testing.assert_allclose(dequantize(leaves, layout), products + added, rtol=2**-23,
                               atol=2.0**-23 * np.abs(products).max())
    x = jnp.asarray(np.random.default_rng(4).standard_normal((3, 280)), jnp.float32)
    np.testing.assert_allclose(reference.packed_linear(x, leaves, layout), np.asarray(x) @ (products + added),
                               rtol=1e-4, atol=1e-4)
    packed_bits = 8 * weight.words.nbytes / (layout.blocks * layout.block * layout.padded_columns)
    assert packed_bits == BITS[layout.numbers]


@pytest.mark.parametrize("name", ["awq-128", "Q8_0", "fp8-blocks"])
def test_jax_packs_as_numpy_does(name: str) -> None:
    _, layout = Quantized.random(SCHEMES[name], 256, 128).pack()
    stored = np.random.default_rng(5).integers(0, 16, (256, 128), np.uint8)
    by_jax = jax.jit(partial(pack_words, layout=layout))(stored)
    np.testing.assert_array_equal(by_jax, pack_words(stored, layout))


def test_what_cannot_be_packed_is_refused() -> None:
    numbers, scale = np.zeros((200, 64), np.uint8), np.ones((2, 64), np.float16)
    with pytest.raises(ValueError, match=r"groups of 100 rows.*at least 16 with 128"):
        pack(numbers, scale, kind="int4", group=100)
    with pytest.raises(ValueError, match=r"scales of shape \(2, 64\) for 200 rows in groups of 64.*must be \(4, 64\)"):
        pack(numbers, scale, kind="int4", group=64)
    with pytest.raises(ValueError, match=r"minimums of shape \[\(1, 64\)\]; they must be \(2, 64\)"):
        pack(numbers, scale, minimum=scale[:1], kind="int4", group=128)
    with pytest.raises(ValueError, match="not both"):
        pack(numbers, scale, 8, scale, kind="int4", group=128)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", BITS)
def test_the_ptx_unpacks_every_word(kind: str, dtype: Any) -> None:
    """The instructions of the compiled kernel on all words, in both halves of a register."""
    low = np.arange(65536, dtype=np.uint32)
    registers = low | (low[::-1] ^ 0x5A5A) << 16
    words = registers.view(np.uint16)
    bits = BITS[kind]
    for field in range(16 // bits):
        stored = (words >> bits * field & (1 << bits) - 1).astype(np.uint8)
        if kind == "int4":
            wanted = stored.astype(np.float32) + (1024 if dtype == jnp.float16 else 128)
        elif kind == "int8":
            wanted = stored.astype(np.float32) - 128
        else:
            wanted = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        wanted = np.where(np.isnan(wanted), np.where(stored < 128, 480, -480), wanted)
        emulated = ptx.run(packed_numbers.ptx(field, kind, dtype == jnp.float16), a1=registers).view(dtype)
        np.testing.assert_array_equal(emulated.astype(np.float32), wanted)
        interpreted = packed_numbers.unpack(jnp.asarray(words.view(np.int16)), field, kind, dtype, interpret=True)
        finite = np.abs(wanted) != 480
        np.testing.assert_array_equal(np.asarray(interpreted, np.float32)[finite], wanted[finite])
