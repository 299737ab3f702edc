"""Quantized weights as the GPU's packed kernel reads them: numbers of 4 or 8 bits in 16-bit words, scales beside them.

A weight [K, N] is a matrix of stored numbers, and scales for groups of its rows:

    scale * (number - zero)        zero points per group and column, or one constant (symmetric: AWQ, GPTQ, Q4_0, int8)
    scale * number + minimum       GGUF's Q4_1 and Q4_K

Tiles of TILE columns and `layout.block` rows lie one after another, and row r of a tile's column is a bit field of the
word r % P: of its field r // P, counted from the lowest bits. One load of P words hence brings the same P rows of each
field, and a field is unpacked by the same instruction in all words.

Axis letters: K rows (inputs), N columns (outputs), G groups of rows, C columns of scales, P words of a tile's column.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TILE = 64  # columns
BLOCK = 128  # rows of a tile, at most
MIN_GROUP = 16  # the shortest product that tensor cores compute

BITS = {"int4": 4, "int8": 8, "fp8": 8}  # fp8 is float8_e4m3fn
_BIASED = {"int4": 0, "int8": 128, "fp8": 0}  # the field of a word is the number plus this


class PackedWeight(NamedTuple):
    """Leaves of a weight; columns and rows of padding hold zeros.

    Attributes:
        words: [N / TILE, K / block, TILE, P] int16.
        scale: [G, C] float16, bfloat16 or float32.
        zero: [G, N] of a type of integers, or None.
        minimum: [G, N] like `scale`, or None.
    """

    words: Any
    scale: Any
    zero: Any = None
    minimum: Any = None


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """What the leaves of a `PackedWeight` mean; hashable, so that it can be a static argument.

    Attributes:
        numbers: "int4" (0 to 15), "int8" (-128 to 127) or "fp8" (float8_e4m3fn).
        rows, columns: of the weight.
        group: rows that share scales: divides or is a multiple of `block`, or covers all rows.
        scale_columns: columns that share a scale: 1, or a multiple of TILE.
        zero: the number that stands for 0 where the weight has neither zero points nor minimums.
    """

    numbers: str
    rows: int
    columns: int
    group: int
    scale_columns: int = 1
    zero: int = 0

    @property
    def fields(self) -> int:
        """Numbers in a word."""
        return 16 // BITS[self.numbers]

    @property
    def words(self) -> int:
        """P: words of a tile's column."""
        return min(BLOCK // self.fields, self.group)

    @property
    def block(self) -> int:
        """Rows of a tile."""
        return self.fields * self.words

    @property
    def blocks(self) -> int:
        """Tiles of a column."""
        return -(-self.rows // self.block)

    @property
    def padded_columns(self) -> int:
        return -(-self.columns // TILE) * TILE

    @property
    def groups(self) -> int:
        """G, groups of padding included."""
        return -(-self.blocks * self.block // self.group)


def pack(
    numbers: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | int = 0,
    minimum: np.ndarray | None = None,
    *,
    kind: str,
    group: int,
    scale_columns: int = 1,
) -> tuple[PackedWeight, PackedLayout]:
    """Lay out a weight that is given as numbers and scales.

    Args:
        numbers: [K, N] uint8 ("int4"), int8 ("int8") or float8_e4m3fn without NaN ("fp8").
        scale: [ceil(K / group), ceil(N / scale_columns)].
        zero: [ceil(K / group), N] integers, or the same for all.
        minimum: [ceil(K / group), N], instead of `zero`.
        kind: see `PackedLayout.numbers`.
        group: rows that share scales; any other than all rows needs a common divisor of at least MIN_GROUP with BLOCK.

    Raises:
        ValueError: the groups are too short or of too odd a size for the kernel, or an array has another shape.
    """
    rows, columns = numbers.shape
    if numbers.dtype.itemsize != 1:
        raise ValueError(f"numbers are {numbers.dtype}, and not of one byte each")
    wanted = (-(-rows // group), -(-columns // scale_columns))
    if scale.shape != wanted:
        raise ValueError(f"scales of shape {scale.shape} for {rows} rows in groups of {group} and {columns} columns "
                         f"in groups of {scale_columns}; they must be {wanted}")
    per_group = [array for array in (zero, minimum) if isinstance(array, np.ndarray)]
    if any(array.shape != (wanted[0], columns) for array in per_group):
        raise ValueError(f"zero points or minimums of shape {[array.shape for array in per_group]}; they must be "
                         f"{(wanted[0], columns)}")
    if len(per_group) > 1 or (minimum is not None and zero):
        raise ValueError("a weight has zero points or minimums, not both")
    if scale_columns > 1 and scale_columns % TILE and scale_columns < columns:
        scale, scale_columns = scale.repeat(scale_columns, axis=1)[:, :columns], 1
    if scale_columns >= columns:
        scale_columns = -(-columns // TILE) * TILE
    if group >= rows:
        finer = -(-rows // BLOCK) * BLOCK
    else:
        finer = group if group % BLOCK == 0 else math.gcd(group, BLOCK)
        if finer < MIN_GROUP:
            raise ValueError(f"groups of {group} rows: all groups but one of all rows must have a common divisor of "
                             f"at least {MIN_GROUP} with {BLOCK}")
    layout = PackedLayout(kind, rows, columns, finer, scale_columns, 0 if per_group else int(zero))
    spread = scale.shape[1] == columns and scale_columns == 1

    def laid_out(array: np.ndarray, whole_columns: bool) -> np.ndarray:
        if finer < group:
            array = array.repeat(group // finer, axis=0)[: -(-rows // finer)]
        missing = layout.padded_columns - columns if whole_columns else 0
        return np.pad(array, ((0, layout.groups - len(array)), (0, missing)))

    stored = numbers.view(np.uint8)
    if kind == "int8":
        stored = stored ^ np.uint8(_BIASED[kind])  # + 128, modulo 256
    words = pack_words(np.pad(stored, ((0, layout.blocks * layout.block - rows), (0, layout.padded_columns - columns))),
                       layout)
    zeros = laid_out(zero, True) if isinstance(zero, np.ndarray) else None
    least = None if minimum is None else laid_out(minimum, True)
    return PackedWeight(words, laid_out(scale, spread), zeros, least), layout


def pack_words(stored: Any, layout: PackedLayout) -> Any:
    """Words of numbers that are padded already.

    Args:
        stored: [K, N] uint8: int4 as it is, int8 plus 128, the bits of fp8. Of NumPy, or of JAX inside a jitted
            function, which is the faster way.
    """
    bits = BITS[layout.numbers]
    parts = stored.reshape(layout.blocks, layout.fields, layout.words, -1, TILE).astype(np.uint16)
    words = parts[:, 0]
    for field in range(1, layout.fields):
        words = words | parts[:, field] << np.uint16(bits * field)
    tiled = words.transpose(2, 0, 3, 1)
    return np.ascontiguousarray(tiled).view(np.int16) if isinstance(tiled, np.ndarray) else tiled.view(jnp.int16)


def dequantize(weight: PackedWeight, layout: PackedLayout, dtype: Any = jnp.float32) -> jax.Array:
    """The weight [rows, columns], computed in float32: what its leaves mean. fp8's NaN becomes 480.

    The last step is the transposition, so that XLA makes one kernel of all.
    """
    field = jnp.arange(layout.blocks)[:, None] * layout.block + jnp.arange(layout.fields) * layout.words
    group = field // layout.group  # [blocks, fields]

    def of_tiles(array: jax.Array, columns: int = 1) -> jax.Array:  # [N / TILE, blocks, TILE, 1, fields]
        wide = array.astype(jnp.float32)[group]
        wide = jnp.repeat(wide, columns, axis=2)[..., : layout.padded_columns]
        return wide.reshape(*group.shape, -1, TILE).transpose(2, 0, 3, 1)[:, :, :, None]

    numbers, scale = _unpack(weight.words, layout), of_tiles(weight.scale, layout.scale_columns)
    if weight.minimum is not None:
        tiles = scale * numbers + of_tiles(weight.minimum)
    else:
        tiles = scale * (numbers - (layout.zero if weight.zero is None else of_tiles(weight.zero)))
    dense = tiles.astype(dtype).transpose(1, 4, 3, 0, 2).reshape(layout.blocks * layout.block, -1)
    return dense[: layout.rows, : layout.columns]


def _unpack(words: jax.Array, layout: PackedLayout) -> jax.Array:
    """The numbers [N / TILE, blocks, TILE, P, fields] of a weight as float32."""
    bits = BITS[layout.numbers]
    stored = (words[..., None].astype(jnp.int32) >> bits * jnp.arange(layout.fields)) & ((1 << bits) - 1)
    if layout.numbers == "fp8":  # by hand: compiling a conversion for a GPU without fp8 ends the process
        half = (stored & 128) << 8 | (stored & 127) << 7
        return jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32) * 256
    return (stored - _BIASED[layout.numbers]).astype(jnp.float32)
