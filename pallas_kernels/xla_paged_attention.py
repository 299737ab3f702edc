"""Paged attention in plain XLA operations: the CPU backend's path.

The rows of a step are cut into query tiles: up to `tile_rows` consecutive tokens of one slot share each read of the
context, a decode row is a tile of one. `make_tile_list` finds the tiles once per step, on the device; all layers use
the same list. Tiles of one are sorted by context and run in groups of `group`, so that a long request slows only the
members of its own group; larger tiles run one by one. Both loop over the context in chunks of pages with an online
softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), with trip counts read from the lengths. Where there is a
window, each tile starts with the chunk in which its first row's window begins.

XLA on CPU runs many tiny products far below the speed of one larger one, and copies what it has to transpose. Tiles of
one therefore lay the heads' queries out block-diagonally, [N, K * H] with zeros in the other heads' columns: one
product with the pages as they lie, whose wasted multiplications cost less than the copies. Larger tiles have rows
enough to multiply head by head.

Axis letters: T tokens, N query heads, K kv heads, G query heads per kv head, H head dim, P pages, S page size,
C pages in a chunk, W tiles in a group, Q rows in a tile.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages

MASKED = -1e30  # finite, so that a row with nothing to see stays finite


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes that trade padding against loop overhead; `*_chunk` counts tokens of context."""

    group: int = 4
    group_chunk: int = 64
    tile_rows: int = 64
    tile_chunk: int = 128
    min_tiled_rows: int = 16  # steps of fewer rows use tiles of one only


@partial(jax.tree_util.register_dataclass,
         data_fields=["row", "slot", "context", "num_single", "tile_row", "tile_len", "tile_slot", "tile_context",
                      "num_tiles"],
         meta_fields=[])
@dataclass(frozen=True)
class XlaTileList:
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


def make_tile_list(slot: jax.Array, position: jax.Array, null_slot: int, sizes: TileSizes) -> XlaTileList:
    """Cut a step into tiles.

    Args:
        slot: [T] int32; the tokens of one slot are neighbors, in order; padding rows have `null_slot`.
        position: [T] int32.
    """
    tokens = slot.shape[0]
    index = jnp.arange(tokens, dtype=jnp.int32)
    valid = slot != null_slot
    rows = sizes.tile_rows if tokens >= sizes.min_tiled_rows else 1
    starts_chunk = (index == 0) | (slot != jnp.roll(slot, 1))
    chunk_start = lax.cummax(jnp.where(starts_chunk, index, 0))
    starts_tile = valid & (starts_chunk | ((index - chunk_start) % rows == 0))
    tile = jnp.cumsum(starts_tile) - 1
    rows_in_tile = jnp.zeros(tokens, jnp.int32).at[tile].add(valid.astype(jnp.int32), mode="drop")[tile]
    single = starts_tile & (rows_in_tile == 1)
    several = starts_tile & (rows_in_tile > 1)
    order = jnp.argsort(jnp.where(single, -position, 1), stable=True).astype(jnp.int32)
    num_single = jnp.sum(single, dtype=jnp.int32)
    tile_row = jnp.nonzero(several, size=max(tokens // 2, 1), fill_value=0)[0].astype(jnp.int32)
    return XlaTileList(
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
    pages: KVPages,
    block_table: jax.Array,  # [slots + 1, width] int32; stale entries are fine, out of range ones are not
    work: XlaTileList,
    rule: AttentionRule,
    bias: HeadBias,
    sizes: TileSizes,
) -> jax.Array:  # [T, N, H]
    """Causal attention of each row to its slot's positions 0 to its own; padding rows give zeros."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = pages.k.shape[1], pages.k.shape[2]
    q = (q * rule.scale).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    out = jnp.zeros_like(q)
    if tokens >= sizes.min_tiled_rows:
        chunk = max(1, sizes.tile_chunk // page_size)
        out = _several_rows(q, pages, _pad_columns(block_table, chunk), work, rule, bias, chunk, sizes.tile_rows)
    chunk = max(1, sizes.group_chunk // page_size)
    single = _single_rows(q, pages, _pad_columns(block_table, chunk), work, rule, bias, chunk,
                          min(sizes.group, tokens))
    out = out.at[work.row].set(single, mode="drop")
    return out.reshape(tokens, heads, head_dim)


def _pad_columns(block_table: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % multiple)))


def _read_chunk(pool: jax.Array, pages: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Tokens [..., C * S, K * H] of the pages [..., C]; zeros where not `valid` [..., C * S].

    Positions past the end may be arbitrary, NaN included, and zero times NaN is NaN: what multiplies the softmax's
    weights is blanked. Keys need none of it, since their scores are replaced.
    """
    num_pages, page_size, kv_heads, head_dim = pool.shape
    flat = pool.reshape(num_pages, page_size, kv_heads * head_dim)
    rows = flat.at[pages].get(mode="promise_in_bounds")
    rows = rows.reshape(*pages.shape[:-1], pages.shape[-1] * page_size, kv_heads * head_dim)
    return rows if valid is None else jnp.where(valid[..., None], rows, 0)


def _read_scales(scales: jax.Array | None, pages: jax.Array) -> jax.Array | None:
    """Scales [..., K, C * S] of the tokens of the pages [..., C]."""
    if scales is None:
        return None
    rows = jnp.moveaxis(scales.at[pages].get(mode="promise_in_bounds"), -3, -2)  # [..., K, C, S]
    return rows.reshape(*rows.shape[:-2], -1)


def _scored(
    products: jax.Array,  # [..., rows, tokens] of scaled queries with stored keys
    scales: jax.Array | None,  # of the keys, broadcasts against the products; so does all below
    distance: jax.Array,  # key's position minus query's
    slopes: jax.Array | None,
    rule: AttentionRule,
) -> jax.Array:
    """Scores, by the rule."""
    scores = products if scales is None else products * scales
    if rule.softcap is not None:
        scores = rule.softcap * jnp.tanh(scores / rule.softcap)
    return scores if slopes is None else scores + slopes * distance.astype(jnp.float32)


def _first_seen(context: jax.Array, rule: AttentionRule) -> jax.Array:
    """First position that a row with this many tokens to see looks at."""
    return jnp.zeros_like(context) if rule.window is None else jnp.maximum(context - rule.window, 0)


def _online_softmax(
    highest: jax.Array,  # [..., rows] highest score so far
    scores: jax.Array,  # [..., rows, tokens] float32
    visible: jax.Array,  # broadcasts against the scores
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The new highest score, the weights of these tokens, and the factor by which earlier sums fade."""
    scores = jnp.where(visible, scores, MASKED)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - new_highest[..., None]), 0)
    return new_highest, weights, jnp.exp(highest - new_highest)


def _single_rows(
    q: jax.Array,  # [T, K, G, H]
    pages: KVPages,
    block_table: jax.Array,
    work: XlaTileList,
    rule: AttentionRule,
    bias: HeadBias,
    chunk: int,
    group: int,
) -> jax.Array:  # [T, K, G, H] in the work list's order
    tokens, kv_heads, per_head, head_dim = q.shape
    heads, width = kv_heads * per_head, kv_heads * head_dim
    spare = -tokens % group
    rows = jnp.pad(work.row, (0, spare), constant_values=tokens)
    slots = jnp.pad(work.slot, (0, spare), constant_values=block_table.shape[0] - 1)
    context = jnp.pad(work.context, (0, spare))
    sorted_q = q.at[rows].get(mode="fill", fill_value=0)
    own_head = jnp.eye(kv_heads, dtype=q.dtype)
    diagonal = jnp.einsum("tkgh,kj->tkgjh", sorted_q, own_head).reshape(-1, heads, width)

    slopes = None if bias.slopes is None else bias.slopes[:, None]  # [N, 1]

    def by_head(scales: jax.Array | None) -> jax.Array | None:  # [W, K, C * S] -> [W, N, C * S]
        return None if scales is None else jnp.repeat(scales, per_head, axis=1)

    def run_group(index: jax.Array, out: jax.Array) -> jax.Array:
        first = index * group
        part = lax.dynamic_slice_in_dim(diagonal, first, group)  # [W, N, K * H]
        columns = block_table[lax.dynamic_slice_in_dim(slots, first, group)]
        seen = lax.dynamic_slice_in_dim(context, first, group)
        begin = _first_seen(seen, rule)
        page_size, chunk_tokens = pages.k.shape[1], chunk * pages.k.shape[1]
        first_chunk = begin // chunk_tokens  # [W]

        def run_chunk(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, weighted = carry
            column = (first_chunk[:, None] + step) * chunk + jnp.arange(chunk)  # [W, C]
            here = jnp.take_along_axis(columns, column, axis=1, mode="clip")
            key_pos = (column[..., None] * page_size + jnp.arange(page_size)).reshape(group, chunk_tokens)
            visible = (key_pos < seen[:, None]) & (key_pos >= begin[:, None])  # [W, C * S]
            keys, values = _read_chunk(pages.k, here, None), _read_chunk(pages.v, here, visible)
            products = jnp.einsum("wnd,wcd->wnc", part, keys.astype(part.dtype), preferred_element_type=jnp.float32)
            scores = _scored(products, by_head(_read_scales(pages.k_scale, here)),
                             (key_pos - (seen[:, None] - 1))[:, None], slopes, rule)
            highest, weights, fade = _online_softmax(highest, scores, visible[:, None])
            total = total * fade + jnp.sum(weights, axis=-1)
            value_scales = by_head(_read_scales(pages.v_scale, here))
            if value_scales is not None:  # in float32: weights times scales may be too small for float16
                values = values.astype(jnp.float32)
                weights = jnp.where(visible[:, None], weights * value_scales, 0)
            new = jnp.einsum("wnc,wcd->wnd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return highest, total, weighted * fade[..., None] + new

        start = _start((group, heads), bias.sinks, width)
        trips = jnp.max((seen + chunk_tokens - 1) // chunk_tokens - first_chunk)
        _, total, weighted = lax.fori_loop(0, trips, run_chunk, start)
        weighted = (weighted / jnp.maximum(total, 1e-30)[..., None]).reshape(group, kv_heads, per_head, kv_heads, -1)
        own = jnp.stack([weighted[:, head, :, head] for head in range(kv_heads)], axis=1)
        return lax.dynamic_update_slice_in_dim(out, own.astype(q.dtype), first, 0)

    trips = (work.num_single + group - 1) // group
    return lax.fori_loop(0, trips, run_group, jnp.zeros_like(sorted_q))[:tokens]


def _several_rows(
    q: jax.Array,  # [T, K, G, H]
    pages: KVPages,
    block_table: jax.Array,
    work: XlaTileList,
    rule: AttentionRule,
    bias: HeadBias,
    chunk: int,
    tile_rows: int,
) -> jax.Array:  # [T, K, G, H], zeros in rows that belong to no tile
    tokens, kv_heads, per_head, head_dim = q.shape
    padded = jnp.pad(q, ((0, tile_rows), (0, 0), (0, 0), (0, 0)))
    chunk_tokens = chunk * pages.k.shape[1]

    def by_row(per_query_head: jax.Array | None) -> jax.Array | None:  # [N] -> [K, Q * G]
        return None if per_query_head is None else jnp.tile(per_query_head.reshape(kv_heads, per_head), (1, tile_rows))

    slopes = by_row(bias.slopes)

    def run_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        first = work.tile_row[index]
        own = jnp.arange(tile_rows) < work.tile_len[index]
        seen = jnp.where(own, work.tile_context[index] + jnp.arange(tile_rows), 0)  # [Q]
        longest, begin = jnp.max(seen), _first_seen(work.tile_context[index], rule)
        part = lax.dynamic_slice_in_dim(padded, first, tile_rows).swapaxes(0, 1)  # [K, Q, G, H]
        part = part.reshape(kv_heads, tile_rows * per_head, head_dim)
        columns = block_table[work.tile_slot[index]]

        def run_chunk(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, weighted = carry
            here = lax.dynamic_slice_in_dim(columns, step * chunk, chunk)
            key_pos = step * chunk_tokens + jnp.arange(chunk_tokens)
            valid = (key_pos < longest) & (key_pos >= begin)
            keys = _read_chunk(pages.k, here, None).reshape(chunk_tokens, kv_heads, head_dim).astype(part.dtype)
            values = _read_chunk(pages.v, here, valid).reshape(chunk_tokens, kv_heads, head_dim)
            products = jnp.einsum("kxh,ckh->kxc", part, keys, preferred_element_type=jnp.float32)
            key_scales, value_scales = (_read_scales(scales, here) for scales in (pages.k_scale, pages.v_scale))
            row_seen = jnp.repeat(seen, per_head)[:, None]
            scores = _scored(products, None if key_scales is None else key_scales[:, None], key_pos - (row_seen - 1),
                             None if slopes is None else slopes[..., None], rule)
            visible = (key_pos < row_seen) & (key_pos >= _first_seen(row_seen, rule))
            highest, weights, fade = _online_softmax(highest, scores, visible)
            total = total * fade + jnp.sum(weights, axis=-1)
            if value_scales is not None:
                values = values.astype(jnp.float32)
                weights = jnp.where(valid, weights * value_scales[:, None], 0)
            new = jnp.einsum("kxc,ckh->kxh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return highest, total, weighted * fade[..., None] + new

        start = _start(part.shape[:2], by_row(bias.sinks), head_dim)
        trips = (longest + chunk_tokens - 1) // chunk_tokens
        _, total, weighted = lax.fori_loop(begin // chunk_tokens, trips, run_chunk, start)
        result = weighted / jnp.maximum(total, 1e-30)[..., None]
        result = result.reshape(kv_heads, tile_rows, per_head, head_dim).swapaxes(0, 1).astype(q.dtype)
        before = lax.dynamic_slice_in_dim(out, first, tile_rows)
        result = jnp.where(own[:, None, None, None], result, before)
        return lax.dynamic_update_slice_in_dim(out, result, first, 0)

    return lax.fori_loop(0, work.num_tiles, run_tile, jnp.zeros_like(padded))[:tokens]


def _start(shape: tuple[int, ...], sinks: jax.Array | None, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Highest score, sum of weights and weighted sum before the first chunk; a sink has been seen by then."""
    weighted = jnp.zeros((*shape, width), jnp.float32)
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), weighted
    return jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape, jnp.float32), weighted
