"""Paged attention in plain XLA operations: the CPU backend's path.

The rows of a step are cut into query tiles: up to `tile_rows` consecutive tokens of one slot share each read of the
context, a decode row is a tile of one. `make_work_list` finds the tiles once per step, on the device; all layers use the
same list. Tiles of one are sorted by context and run in groups of `group`, so that a long request slows only the
members of its own group; larger tiles run one by one. Both loop over the context in chunks of pages with an online
softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), with trip counts read from the lengths.

Axis letters: T tokens, N query heads, K kv heads, G query heads per kv head, H head dim, P pages, S page size,
C pages in a chunk, W tiles in a group, Q rows in a tile.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite, so that a row with nothing to see stays finite


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes that trade padding against loop overhead; `*_chunk` counts tokens of context."""

    group: int = 8
    group_chunk: int = 128
    tile_rows: int = 32
    tile_chunk: int = 256
    least_tiled: int = 16  # steps of fewer rows run all of them as tiles of one


@partial(jax.tree_util.register_dataclass,
         data_fields=["row", "slot", "context", "num_single", "tile_row", "tile_len", "tile_slot", "tile_context",
                      "num_tiles"],
         meta_fields=[])
@dataclass(frozen=True)
class WorkList:
    """The tiles of one step; the first `num_single` and `num_tiles` entries count.

    Attributes:
        row, slot, context: [T] tiles of one, longest context first: row in the step, slot, tokens to see.
        tile_row, tile_len, tile_slot, tile_context: [T // 2] tiles of several rows: first row, number of rows, slot,
            tokens that the first row sees.
    """

    row: jax.Array
    slot: jax.Array
    context: jax.Array
    num_single: jax.Array
    tile_row: jax.Array
    tile_len: jax.Array
    tile_slot: jax.Array
    tile_context: jax.Array
    num_tiles: jax.Array


def make_work_list(slot: jax.Array, position: jax.Array, null_slot: int, sizes: TileSizes) -> WorkList:
    """Cut a step into tiles.

    Args:
        slot: [T] int32; the tokens of one slot are neighbours, in order; padding rows have `null_slot`.
        position: [T] int32.
    """
    tokens = slot.shape[0]
    index = jnp.arange(tokens, dtype=jnp.int32)
    valid = slot != null_slot
    rows = sizes.tile_rows if tokens >= sizes.least_tiled else 1
    starts_piece = (index == 0) | (slot != jnp.roll(slot, 1))
    piece_start = lax.cummax(jnp.where(starts_piece, index, 0))
    starts_tile = valid & (starts_piece | ((index - piece_start) % rows == 0))
    tile = jnp.cumsum(starts_tile) - 1
    rows_in_tile = jnp.zeros(tokens, jnp.int32).at[tile].add(valid.astype(jnp.int32), mode="drop")[tile]
    single = starts_tile & (rows_in_tile == 1)
    several = starts_tile & (rows_in_tile > 1)
    order = jnp.argsort(jnp.where(single, -position, 1), stable=True).astype(jnp.int32)
    num_single = jnp.sum(single, dtype=jnp.int32)
    tile_row = jnp.nonzero(several, size=max(tokens // 2, 1), fill_value=0)[0].astype(jnp.int32)
    return WorkList(
        row=jnp.where(index < num_single, order, tokens),
        slot=jnp.where(index < num_single, slot[order], null_slot),
        context=jnp.where(index < num_single, position[order] + 1, 0),
        num_single=num_single,
        tile_row=tile_row,
        tile_len=rows_in_tile[tile_row],
        tile_slot=slot[tile_row],
        tile_context=position[tile_row] + 1,
        num_tiles=jnp.sum(several, dtype=jnp.int32),
    )


def paged_attention(
    q: jax.Array,  # [T, N, H]
    k_pool: jax.Array,  # [P, K, S, H]
    v_pool: jax.Array,  # [P, K, S, H]
    block_table: jax.Array,  # [slots + 1, width] int32; stale entries are fine, out of range ones are not
    work: WorkList,
    scale: float,
    sizes: TileSizes,
) -> jax.Array:  # [T, N, H]
    """Causal attention of each row to its slot's positions 0 to its own; padding rows give zeros."""
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = k_pool.shape[1], k_pool.shape[2]
    q = (q * scale).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    out = jnp.zeros_like(q)
    if tokens >= sizes.least_tiled:
        pages = max(1, sizes.tile_chunk // page_size)
        out = _several_rows(q, k_pool, v_pool, _pad_columns(block_table, pages), work, pages, sizes.tile_rows)
    pages = max(1, sizes.group_chunk // page_size)
    single = _single_rows(q, k_pool, v_pool, _pad_columns(block_table, pages), work, pages, min(sizes.group, tokens))
    out = out.at[work.row].set(single, mode="drop")
    return out.reshape(tokens, heads, head_dim)


def _pad_columns(block_table: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % multiple)))


def _attend_chunk(
    carry: tuple[jax.Array, jax.Array, jax.Array],  # running maximum and sum [W, K, G, Q], weighted values [..., H]
    q: jax.Array,  # [W, K, G, Q, H]
    keys: jax.Array,  # [W, C, K, S, H]
    values: jax.Array,  # [W, C, K, S, H]
    first: jax.Array,  # position of the chunk's first token
    seen: jax.Array,  # [W, Q] tokens that each row sees
) -> tuple[jax.Array, jax.Array, jax.Array]:
    highest, total, weighted = carry
    groups, chunk, _, page_size, _ = keys.shape
    place = (first + jnp.arange(chunk * page_size)).reshape(chunk, page_size)
    # Slots past the end may hold anything, NaN included, and zero times NaN is NaN: blank the values as well.
    held = place[None] < jnp.max(seen, axis=1)[:, None, None]
    values = jnp.where(held[:, :, None, :, None], values, 0)
    scores = jnp.einsum("wkgqh,wcksh->wkgqcs", q, keys,
                        preferred_element_type=jnp.float32)
    visible = place[None, None] < seen[:, :, None, None]
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=(4, 5)))
    weights = jnp.where(visible[:, None, None], jnp.exp(scores - new_highest[..., None, None]), 0)
    fade = jnp.exp(highest - new_highest)
    total = total * fade + jnp.sum(weights, axis=(4, 5))
    part = jnp.einsum("wkgqcs,wcksh->wkgqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return new_highest, total, weighted * fade[..., None] + part


def _attend(
    q: jax.Array,  # [W, K, G, Q, H]
    k_pool: jax.Array,
    v_pool: jax.Array,
    pages: jax.Array,  # [W, width]
    seen: jax.Array,  # [W, Q]
    chunk: int,
) -> jax.Array:  # [W, K, G, Q, H]
    page_size = k_pool.shape[2]
    groups = q.shape[0]
    trips = (jnp.max(seen) + chunk * page_size - 1) // (chunk * page_size)

    def body(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        here = lax.dynamic_slice(pages, (0, step * chunk), (groups, chunk))
        keys = k_pool.at[here].get(mode="promise_in_bounds")
        values = v_pool.at[here].get(mode="promise_in_bounds")
        return _attend_chunk(carry, q, keys, values, step * chunk * page_size, seen)

    start = (jnp.full(q.shape[:4], MASKED, jnp.float32), jnp.zeros(q.shape[:4], jnp.float32),
             jnp.zeros(q.shape, jnp.float32))
    _, total, weighted = lax.fori_loop(0, trips, body, start)
    return (weighted / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)


def _single_rows(
    q: jax.Array,  # [T, K, G, H]
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    work: WorkList,
    chunk: int,
    group: int,
) -> jax.Array:  # [T, K, G, H] in the work list's order
    tokens = q.shape[0]
    spare = -tokens % group
    rows = jnp.pad(work.row, (0, spare), constant_values=tokens)
    slots = jnp.pad(work.slot, (0, spare), constant_values=block_table.shape[0] - 1)
    context = jnp.pad(work.context, (0, spare))
    sorted_q = q.at[rows].get(mode="fill", fill_value=0)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        first = index * group
        part = lax.dynamic_slice_in_dim(sorted_q, first, group)[:, :, :, None]  # [W, K, G, 1, H]
        pages = block_table[lax.dynamic_slice_in_dim(slots, first, group)]
        seen = lax.dynamic_slice_in_dim(context, first, group)[:, None]
        result = _attend(part, k_pool, v_pool, pages, seen, chunk)
        return lax.dynamic_update_slice_in_dim(out, result[:, :, :, 0], first, 0)

    trips = (work.num_single + group - 1) // group
    return lax.fori_loop(0, trips, body, jnp.zeros_like(sorted_q))[:tokens]


def _several_rows(
    q: jax.Array,  # [T, K, G, H]
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    work: WorkList,
    chunk: int,
    tile_rows: int,
) -> jax.Array:  # [T, K, G, H], zeros in rows that belong to no tile
    tokens = q.shape[0]
    padded = jnp.pad(q, ((0, tile_rows), (0, 0), (0, 0), (0, 0)))

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        first = work.tile_row[index]
        part = lax.dynamic_slice_in_dim(padded, first, tile_rows)
        pages = block_table[work.tile_slot[index]][None]
        own = jnp.arange(tile_rows) < work.tile_len[index]
        seen = jnp.where(own, work.tile_context[index] + jnp.arange(tile_rows), 0)[None]
        result = _attend(part.transpose(1, 2, 0, 3)[None], k_pool, v_pool, pages, seen, chunk)[0]
        before = lax.dynamic_slice_in_dim(out, first, tile_rows)
        result = jnp.where(own[:, None, None, None], result.transpose(2, 0, 1, 3), before)
        return lax.dynamic_update_slice_in_dim(out, result, first, 0)

    return lax.fori_loop(0, work.num_tiles, body, jnp.zeros_like(padded))[:tokens]
