"""x @ weight with a weight that stays packed: numbers of 4 or 8 bits become 16-bit floats in registers.

The transposed weight is the left operand of the tensor cores, which take that one from registers (mma, and wgmma on
Hopper): words come to shared memory 16 bytes at a time, are unpacked in registers and multiplied from there. A group's
product is scaled in float32. Zero points and minimums never touch a number: they multiply the sums of x's groups,

    y = scale * (x @ (number + offset)) + sum(x) * (minimum - scale * offset)        minimum = -scale * zero

so an int4 costs two instructions for two numbers. Few columns are split by rows too, to give every multiprocessor
work; the parts are added in their order, and how many there are depends on the weight and the GPU alone.

Axis letters: M rows of x, K rows and N columns of the weight, G groups of K, C columns of scales, P words of a tile's
column, Z parts.
"""

from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import GpuTarget, dot, inline_asm, launch, load, store
from jaxpaged.pallas_kernels.packed_layout import TILE, PackedLayout, PackedWeight, dequantize
from jaxpaged.pallas_kernels.packed_numbers import offset, unpack
from jaxpaged.pallas_kernels.tiles import PACKED_LINEAR, PACKED_SHORT_GROUPS, PackedTiles

MIN_PART = 512  # rows of the weight; partial sums are then little beside what a part reads
MAX_PARTS = 8
# Unpacking costs each 64 rows the same; from about here on writing and reading 16-bit weights once costs less. By
# counting instructions and bytes: no GPU has timed it.
DEQUANTIZED_ROWS = 1024


def product(x: jax.Array, weight: PackedWeight, layout: PackedLayout, *, target: GpuTarget) -> jax.Array:
    """x [M, K] of bfloat16 or float16 times the weight: [M, N] of the same.

    The kernel is made for M up to 64 and reads the weight again for each 64 rows. Many rows are multiplied with the
    dequantized weight instead, which takes its 16-bit size as temporary memory, and rounds each of its values.
    """
    rows, depth = x.shape
    assert depth == layout.rows, (x.shape, layout)
    assert x.dtype in (jnp.bfloat16, jnp.float16), x.dtype
    assert weight.words.shape == (layout.padded_columns // TILE, layout.blocks, TILE, layout.words), layout
    if rows >= DEQUANTIZED_ROWS:
        return x @ dequantize(weight, layout, x.dtype)
    tiles = choose_tiles(target, layout, rows)
    parts = num_parts(target, layout)
    sums = group_sums(x, layout) if _has_sums(weight, layout) else None
    shape = (rows, layout.padded_columns)
    out = launch(
        partial(_kernel, layout=layout, rows=rows, tiles=tiles, parts=parts, interpret=target.interpret),
        x, *weight, sums,
        name="packed_linear",
        grid=(-(-rows // tiles.rows), layout.padded_columns // tiles.columns, parts),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype) if parts == 1 else
        jax.ShapeDtypeStruct((parts, *shape), jnp.float32),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=target.interpret,
    )
    if parts > 1:
        out = reduce(add, [out[part] for part in range(parts)]).astype(x.dtype)
    result: jax.Array = out[:, : layout.columns]
    return result


def choose_tiles(target: GpuTarget, layout: PackedLayout, rows: int) -> PackedTiles:
    """The table's tiles for products of `rows` rows; fewer columns where theirs do not divide the weight or its scales.

    Fewer than 256 also where there would be less than a program for each multiprocessor.
    """
    table = PACKED_LINEAR[target.generation][layout.numbers]
    tiles = next((tiles for tiles in table if rows <= tiles.rows), table[-1])
    if layout.group < layout.block and tiles.rows == PACKED_SHORT_GROUPS.rows:
        tiles = PACKED_SHORT_GROUPS
    columns = tiles.columns
    if layout.padded_columns * num_parts(target, layout) < columns * target.num_sms:
        columns = min(columns, 2 * TILE)
    while layout.padded_columns % columns or (layout.scale_columns > 1 and layout.scale_columns % columns):
        columns //= 2
    return PackedTiles(tiles.rows, columns, max(tiles.num_warps * columns // tiles.columns, 4), tiles.num_stages)


def num_parts(target: GpuTarget, layout: PackedLayout) -> int:
    """Programs that share a column's rows, so that each multiprocessor has two; the same for products of any height."""
    wanted = -(-2 * target.num_sms * 2 * TILE // layout.padded_columns)
    most = max(min(wanted, MAX_PARTS, layout.rows // MIN_PART), 1)
    steps = -(-layout.blocks // most)
    return -(-layout.blocks // steps)


def group_sums(x: jax.Array, layout: PackedLayout) -> jax.Array:
    """Sums [G, M] in float32 of each group of x's columns; the compiler computes equal ones once."""
    rows, depth = x.shape
    wide = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, layout.groups * layout.group - depth)))
    return wide.reshape(rows, layout.groups, layout.group).sum(axis=2).T


def _has_sums(weight: PackedWeight, layout: PackedLayout) -> bool:
    """Whether anything but numbers and scales takes part; always with int4, whose floats have an offset."""
    return layout.numbers == "int4" or layout.zero != 0 or weight.zero is not None or weight.minimum is not None


def _kernel(
    x_ref: Any,  # [M, K]
    words_ref: Any,  # [N / TILE, blocks, TILE, P]
    scale_ref: Any,  # [G, C]
    zero_ref: Any,  # [G, N] or None
    minimum_ref: Any,  # [G, N] or None
    sums_ref: Any,  # [G, M] or None
    out_ref: Any,  # [M, N], or [Z, M, N] float32
    *,
    layout: PackedLayout,
    rows: int,
    tiles: PackedTiles,
    parts: int,
    interpret: bool,
) -> None:
    first, part = pl.program_id(1) * tiles.columns, pl.program_id(2)
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    local, word = jnp.arange(tiles.columns), jnp.arange(layout.words)
    column = first + local
    tile, inside = first // TILE + local // TILE, local % TILE
    real = row < rows
    shape = (tiles.columns, tiles.rows)
    more = offset(layout.numbers, x_ref.dtype)
    per_group = min(layout.group // layout.words, layout.fields)  # fields that share scales
    is_whole = layout.groups == 1

    def of_columns(ref: Any, group: Any) -> jax.Array:  # [columns, 1]
        return _as_float32(load(ref.at[group, column]))[:, None]

    def scaled(products: jax.Array, group: Any, total: jax.Array) -> jax.Array:
        """total plus what a group adds."""
        if scale_ref.shape[1] == layout.padded_columns and layout.scale_columns == 1:
            scale = of_columns(scale_ref, group)
        else:
            scale = jnp.full((1, 1), _as_float32(load(scale_ref.at[group, first // layout.scale_columns])))
        total = _multiply_add(products, scale, total, interpret)
        if sums_ref is None:
            return total
        if minimum_ref is not None:
            least = of_columns(minimum_ref, group) - scale * more
        else:
            least = -scale * (more + (layout.zero if zero_ref is None else of_columns(zero_ref, group)))
        once = real & (part == 0) if is_whole else real
        sums = load(sums_ref.at[group, row], once, 0)[None, :]
        return _multiply_add(sums, least, total, interpret)

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, products = carry
        block = part * steps + index
        words = load(words_ref.at[tile[:, None], block, inside[:, None], word[None, :]])
        for field in range(layout.fields):
            k = block * layout.block + field * layout.words
            mask = jnp.broadcast_to(real[None, :], (layout.words, tiles.rows))
            if layout.rows % layout.block:
                mask = mask & (k + word < layout.rows)[:, None]
            x = load(x_ref.at[row[None, :], (k + word)[:, None]], mask, jnp.zeros((), x_ref.dtype))
            products += dot(unpack(words, field, layout.numbers, x_ref.dtype, interpret=interpret), x)
            if not is_whole and (field + 1) % per_group == 0:
                total, products = scaled(products, k // layout.group, total), jnp.zeros(shape, jnp.float32)
        return total, products

    steps = -(-layout.blocks // parts)
    trips = steps if parts * steps == layout.blocks else jnp.minimum(steps, layout.blocks - part * steps)
    zeros = jnp.zeros(shape, jnp.float32)
    total, products = lax.fori_loop(0, trips, step, (zeros, zeros))
    if is_whole:
        total = scaled(products, jnp.zeros((), jnp.int32), total)
    at = (row[None, :], column[:, None])
    mask = jnp.broadcast_to(real[None, :], shape)
    store(out_ref.at[at] if parts == 1 else out_ref.at[(part, *at)], total.astype(out_ref.dtype), mask)


def _as_float32(values: jax.Array) -> jax.Array:
    return values.astype(jnp.int32).astype(jnp.float32) if jnp.issubdtype(values.dtype, jnp.integer) else \
        values.astype(jnp.float32)


def _multiply_add(a: jax.Array, b: jax.Array, total: jax.Array, interpret: bool) -> jax.Array:
    """a * b + total in one instruction and one rounding: Triton would not contract them."""
    if interpret:
        return a * b + total
    a, b = jnp.broadcast_to(a, total.shape), jnp.broadcast_to(b, total.shape)
    return inline_asm("fma.rn.f32 $0, $1, $2, $3;", a, b, total, constraints="=f,f,f,f", pack=1,
                      result=jax.ShapeDtypeStruct(total.shape, jnp.float32))
