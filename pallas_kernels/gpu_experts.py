"""A mixture of experts on GPUs, as two grouped products over rows in the order of their experts.

A pair is a token and one of the experts it is sent to. Pairs are ordered by expert, and every expert's rows are cut
into tiles. The first kernel gathers the tokens of a tile and computes what they are after the activation; the second
multiplies with `down` and with the router's weight, and puts each row where its pair belongs, so that a token's experts
are added up in one order whatever the batch.

One program per (columns, tile). Programs of neighboring columns start together and read neighboring memory; tiles of
one expert follow one another, so that all but the first find its weights in the second-level cache. An expert that
nobody is sent to has no tile and is not read. Nothing that depends on data is a shape.

No sort, and no scan over tiles: a tile's place in their list follows from where it begins. The one that begins at row r
of the ordered rows, of expert e, is number e + r // rows. That grows with r, so that no two tiles meet, and it is less
than experts + pairs // rows; places that no tile takes have no rows.

Axis letters: T tokens, k experts of a token, n = T k pairs, E experts, D model, F mlp, X tiles, R rows of a tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import GpuTarget, dot, launch, load, store
from jaxpaged.pallas_kernels.tiles import EXPERT_PRODUCTS, ExpertTiles, ProductTiles

RANKED_AT_ONCE = 16  # pairs of a program that ranks them
COMPARED_AT_ONCE = 128  # with so many others at a time
MANY_PAIRS = 8192  # more are ordered by XLA, block by block: comparing all with all would take longer


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """Pairs by expert.

    Attributes:
        order: [n] int32, the pair of each ordered row; pair i is of token i // k. Those sent nowhere come last.
        tiles: [X, 4] int32: expert, first ordered row, number of rows (0: no tile), 0.
    """

    order: jax.Array
    tiles: jax.Array


def choose_tiles(target: GpuTarget, pairs: int, count: int, model_dim: int, dim: int, dtype: jnp.dtype) -> ExpertTiles:
    """The tiles of both products of a step.

    Where an expert gets few rows, reading its weights is all that counts: small tiles, and many programs. Where it gets
    more, larger tiles too.
    """
    table = EXPERT_PRODUCTS[target.generation]
    if jnp.dtype(dtype).itemsize == 4:
        return table.wide
    if pairs > 96 * count:
        return table.most
    if pairs > 16 * count:
        return table.many
    places, wave = num_places(pairs, count, table.few.gated.rows[-1]), 2 * target.num_sms

    def chosen(size: int, tiles: ProductTiles) -> ProductTiles:
        return table.narrow if places * -(-size // tiles.columns) < wave else tiles

    return ExpertTiles(chosen(dim, table.few.gated), chosen(model_dim, table.few.down))


def num_places(pairs: int, count: int, rows: int) -> int:
    """Length of the list of tiles: one for each pair, or less."""
    return min(pairs, count + pairs // rows)


def experts(
    x: jax.Array,  # [T, D]
    expert: jax.Array,  # [T, k] int32; E: sent nowhere
    weight: jax.Array,  # [T, k] float32
    gate_up: jax.Array,  # [E, D, 2 * F], gate before up
    down: jax.Array,  # [E, F, D]
    hidden: Callable[[jax.Array, jax.Array], jax.Array],
    bias: jax.Array | None = None,  # [E, 2 * F], of gate and up
    *,
    target: GpuTarget,
    tiles: ExpertTiles | None = None,
) -> jax.Array:  # [T, D] float32
    """The weighted sum of hidden(x @ gate, x @ up) @ down over each token's experts.

    Args:
        hidden: of float32 [R, columns], in operations that Triton has.
        tiles: for tests; else see `choose_tiles`.
    """
    count, top_k, pairs = len(down), expert.shape[1], expert.size
    tiles = tiles or choose_tiles(target, pairs, count, x.shape[1], down.shape[1], x.dtype)
    assert tiles.gated.rows[-1] == tiles.down.rows[-1], "both products go through the same tiles"
    work = order_pairs(expert.reshape(-1), count, tiles.gated.rows[-1], target=target)
    rows = _product(partial(_gated_kernel, top_k=top_k, hidden=hidden, tiles=tiles.gated), "gated_experts",
                    (x, gate_up, bias), work, (pairs, down.shape[1]), tiles.gated, target)
    rows = _product(partial(_down_kernel, tiles=tiles.down), "down_experts", (rows, down, weight.reshape(-1)), work,
                    (pairs, x.shape[1]), tiles.down, target)
    # Nothing has been written for pairs that are sent nowhere.
    rows = jnp.where((expert < count)[:, :, None], rows.reshape(*expert.shape, -1), 0)
    return jnp.sum(rows.astype(jnp.float32), axis=1)


def order_pairs(expert: jax.Array, count: int, rows: int, *, target: GpuTarget) -> ExpertWork:
    """Order pairs by expert, in tiles of at most `rows`.

    Args:
        expert: [n] int32; `count` for a pair that is sent nowhere, which is in no tile.
    """
    pairs = len(expert)
    places = num_places(pairs, count, rows)
    empty = jnp.zeros((places, 4), jnp.int32)
    if pairs > MANY_PAIRS:
        return _by_blocks(expert, empty, count, rows)
    order, tiles = launch(
        partial(_rank_kernel, count=count, rows=rows, places=places), expert, empty,
        name="rank_experts",
        grid=(-(-pairs // RANKED_AT_ONCE),),
        out_shape=(jax.ShapeDtypeStruct((pairs,), jnp.int32), jax.ShapeDtypeStruct((places, 4), jnp.int32)),
        aliases={1: 1},
        num_warps=4,
        interpret=target.interpret,
    )
    return ExpertWork(order, tiles)


def _rank_kernel(
    expert_ref: Any,  # [n]
    _: Any,  # [X, 4] zeros, the memory of the tiles
    order_ref: Any,  # [n]
    tiles_ref: Any,  # [X, 4]
    *,
    count: int,
    rows: int,
    places: int,
) -> None:
    pairs = expert_ref.shape[0]
    pair = pl.program_id(0) * RANKED_AT_ONCE + jnp.arange(RANKED_AT_ONCE)
    real = pair < pairs
    mine = load(expert_ref.at[pair], real, count)

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        lower, before, same = carry
        other = index * COMPARED_AT_ONCE + jnp.arange(COMPARED_AT_ONCE)
        theirs = load(expert_ref.at[other], other < pairs, count + 1)
        equal = theirs[None, :] == mine[:, None]
        return (lower + jnp.sum((theirs[None, :] < mine[:, None]).astype(jnp.int32), axis=1),
                before + jnp.sum((equal & (other[None, :] < pair[:, None])).astype(jnp.int32), axis=1),
                same + jnp.sum(equal.astype(jnp.int32), axis=1))

    none = jnp.zeros(RANKED_AT_ONCE, jnp.int32)
    lower, before, same = lax.fori_loop(0, -(-pairs // COMPARED_AT_ONCE), step, (none, none, none))
    row = lower + before
    begins = real & (mine < count) & (before % rows == 0)
    # Interpreting writes back what was there where a lane is masked off, unless its place is beyond the array.
    store(order_ref.at[jnp.where(real, row, pairs)], pair, real)
    place = jnp.where(begins, row if places == pairs else mine + row // rows, places)
    for field, value in enumerate((mine, row, jnp.minimum(same - before, rows))):
        store(tiles_ref.at[place, jnp.full_like(place, field)], value, begins)


def _by_blocks(expert: jax.Array, empty: jax.Array, count: int, rows: int) -> ExpertWork:
    """As the kernel, with comparisons inside blocks of pairs only, and sums over the blocks."""
    pairs, places = len(expert), len(empty)
    padding = -pairs % COMPARED_AT_ONCE
    block = jnp.pad(expert, (0, padding), constant_values=count).reshape(-1, COMPARED_AT_ONCE)
    of_block = jnp.sum(block[:, :, None] == jnp.arange(count + 1), axis=1, dtype=jnp.int32)  # [blocks, E + 1]
    before_block = jnp.cumsum(of_block, axis=0) - of_block
    total = jnp.sum(of_block, axis=0)
    first = jnp.cumsum(total) - total
    index = jnp.arange(COMPARED_AT_ONCE)
    inside = jnp.sum((block[:, :, None] == block[:, None, :]) & (index[None, :] < index[:, None]), axis=2,
                     dtype=jnp.int32)
    before = (jnp.take_along_axis(before_block, block, axis=1) + inside).reshape(-1)[:pairs]
    row = first[expert] + before
    order = jnp.zeros(pairs, jnp.int32).at[row].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    begins = (expert < count) & (before % rows == 0)
    place = jnp.where(begins, row if places == pairs else expert + row // rows, places)
    entry = jnp.stack([expert, row, jnp.minimum(total[expert] - before, rows), jnp.zeros_like(row)], axis=1)
    return ExpertWork(order, empty.at[place].set(entry, mode="drop"))


def _product(
    kernel: Callable[..., None], name: str, args: tuple[Any, ...], work: ExpertWork, shape: tuple[int, int],
    tiles: ProductTiles, target: GpuTarget,
) -> jax.Array:
    result: jax.Array = launch(
        kernel, *args, work.order, work.tiles,
        name=name,
        grid=(-(-shape[1] // tiles.columns), len(work.tiles)),
        out_shape=jax.ShapeDtypeStruct(shape, args[0].dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=target.interpret,
    )
    return result


def _gated_kernel(
    x_ref: Any,  # [T, D]
    gate_up_ref: Any,  # [E, D, 2 * F]
    bias_ref: Any,  # [E, 2 * F] or None
    order_ref: Any,  # [n]
    tiles_ref: Any,  # [X, 4]
    out_ref: Any,  # [n, F]; rows of no tile are not written
    *,
    top_k: int,
    hidden: Callable[[jax.Array, jax.Array], jax.Array],
    tiles: ProductTiles,
) -> None:
    depth, size = gate_up_ref.shape[1], out_ref.shape[1]
    column, inside = _columns(tiles, size)

    def run(rows: int, expert: jax.Array, first: jax.Array, row: jax.Array, held: jax.Array) -> None:
        token = load(order_ref.at[first + row], held, 0) // top_k

        def step(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            k = index * tiles.depth + jnp.arange(tiles.depth)
            x = load(x_ref.at[token[:, None], k[None, :]], _both(held, k < depth), 0)
            mask = _both(k < depth, inside)
            return (sums[0] + dot(x, load(gate_up_ref.at[expert, k[:, None], column[None, :]], mask, 0)),
                    sums[1] + dot(x, load(gate_up_ref.at[expert, k[:, None], size + column[None, :]], mask, 0)))

        zeros = jnp.zeros((rows, tiles.columns), jnp.float32)
        gate, up = lax.fori_loop(0, -(-depth // tiles.depth), step, (zeros, zeros))
        if bias_ref is not None:
            gate = gate + load(bias_ref.at[expert, column], inside, 0).astype(jnp.float32)[None, :]
            up = up + load(bias_ref.at[expert, size + column], inside, 0).astype(jnp.float32)[None, :]
        result = hidden(gate, up).astype(out_ref.dtype)
        store(out_ref.at[(first + row)[:, None], column[None, :]], result, _both(held, inside))

    _for_tile(tiles_ref, tiles, run)


def _down_kernel(
    x_ref: Any,  # [n, F], ordered
    down_ref: Any,  # [E, F, D]
    weight_ref: Any,  # [n]
    order_ref: Any,  # [n]
    tiles_ref: Any,  # [X, 4]
    out_ref: Any,  # [n, D], of the pairs as they came; those that are sent nowhere are not written
    *,
    tiles: ProductTiles,
) -> None:
    depth, size = down_ref.shape[1:]
    column, inside = _columns(tiles, size)

    def run(rows: int, expert: jax.Array, first: jax.Array, row: jax.Array, held: jax.Array) -> None:
        def step(index: jax.Array, total: jax.Array) -> jax.Array:
            k = index * tiles.depth + jnp.arange(tiles.depth)
            x = load(x_ref.at[(first + row)[:, None], k[None, :]], _both(held, k < depth), 0)
            return total + dot(x, load(down_ref.at[expert, k[:, None], column[None, :]], _both(k < depth, inside), 0))

        zeros = jnp.zeros((rows, tiles.columns), jnp.float32)
        total = lax.fori_loop(0, -(-depth // tiles.depth), step, zeros)
        pair = load(order_ref.at[first + row], held, out_ref.shape[0])
        total = total * load(weight_ref.at[pair], held, 0)[:, None]
        store(out_ref.at[pair[:, None], column[None, :]], total.astype(out_ref.dtype), _both(held, inside))

    _for_tile(tiles_ref, tiles, run)


def _for_tile(tiles_ref: Any, tiles: ProductTiles, run: Callable[..., None]) -> None:
    expert, first, count = (tiles_ref[pl.program_id(1), field] for field in range(3))
    fewer = 0
    for rows in tiles.rows:
        @pl.when((count > fewer) & (count <= rows))
        def _(rows: int = rows) -> None:
            row = jnp.arange(rows)
            run(rows, expert, first, row, row < count)

        fewer = rows


def _columns(tiles: ProductTiles, size: int) -> tuple[jax.Array, jax.Array]:
    column = pl.program_id(0) * tiles.columns + jnp.arange(tiles.columns)
    return column, column < size


def _both(rows: jax.Array, columns: jax.Array) -> jax.Array:
    shape = rows.size, columns.size
    return jnp.broadcast_to(rows[:, None], shape) & jnp.broadcast_to(columns[None, :], shape)
