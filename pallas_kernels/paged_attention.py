"""Ragged paged attention for GPUs: decode rows and chunks of prompts in one launch.

One program per (kv head, item of the work list). All query heads of a kv head share a tile, so that each key and value
is read once; row r of a tile is token r // G, head r % G, for any G. A program walks its chunk of the context with an
online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022) in base 2. A tile whose context is one chunk is written
at once; what is split goes to partial results, merged by a second kernel (flash-decoding; Dao et al., 2023).

The page ids of the next iteration are loaded one iteration ahead and carried by the loop. Loaded inside the iteration
that needs them, they would take up the stages of Triton's pipeline, and no load of keys would overlap with arithmetic.

Axis letters: T tokens, N query heads, K kv heads, G query heads per kv head, H head dim, P pages, S page size, W items,
Z partial results, R rows of a tile.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels import mosaic_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages, max_addressable
from jaxpaged.pallas_kernels.lowering import GpuTarget, dot, launch, load, store
from jaxpaged.pallas_kernels.tiles import ATTENTION, COMBINE, MANY_TOKENS, MOSAIC, WIDENING, AttentionTiles
from jaxpaged.pallas_kernels.work_list import GpuWorkList, WorkSizes, max_tiles

MASKED = -1e30  # finite, so that a row with nothing to see stays finite
LOG2E = math.log2(math.e)
MIN_CHUNK = 256  # tokens; a split's partial results are then 3 % of the bytes of what it reads


def choose_tiles(
    target: GpuTarget, tokens: int, group: int, head_dim: int, dtype: jnp.dtype, page_dtype: jnp.dtype, *,
    is_biased: bool = False,
) -> AttentionTiles:
    """The tiles of a step of `tokens` rows, from the table of the GPU's generation.

    Args:
        dtype, page_dtype: of the queries, and of the pages.
        is_biased: there is a `HeadBias`.
    """
    dtype, page_dtype = jnp.dtype(dtype), jnp.dtype(page_dtype)
    if target.mosaic and tokens < MANY_TOKENS and not is_biased and dtype == page_dtype and \
            mosaic_attention.supports(group, head_dim, dtype):
        return replace(MOSAIC, token_rows=mosaic_attention.rows_per_token(group))
    if dtype == jnp.float32 and page_dtype != jnp.float32:
        return replace(WIDENING, rows=(max(*WIDENING.rows, _power_of_two(group)),))
    table = ATTENTION[target.generation][page_dtype.itemsize]
    tiles = table.few if tokens < MANY_TOKENS else table.many
    rows = tuple(sorted({max(count, _power_of_two(group)) for count in tiles.rows}))
    block = tiles.block if head_dim <= 128 else max(tiles.block // 2, 16)
    # With more threads than this a block of keys gives each of them less than 16 bytes to load.
    max_warps = max(block * _power_of_two(head_dim) * page_dtype.itemsize // (16 * 32), 1)
    num_warps = min(tiles.num_warps, _power_of_two(max_warps + 1) // 2)
    return AttentionTiles(rows, block, num_warps, tiles.num_stages, tiles.programs_per_sm)


def work_sizes(
    target: GpuTarget, tiles: AttentionTiles, tokens: int, slots: int, heads: int, kv_heads: int
) -> WorkSizes:
    """Sizes of the work of a step of `tokens` rows over `slots` slots.

    Splitting aims at two waves of programs: enough that the last ones to end leave little of the GPU idle.
    """
    tile_tokens = tiles.rows[-1] // max(heads // kv_heads, tiles.token_rows)
    fill = -(-2 * target.num_sms * tiles.programs_per_sm // kv_heads)
    return WorkSizes(tile_tokens, max_tiles(tokens, slots, tile_tokens), fill, MIN_CHUNK)


def paged_attention(
    q: jax.Array,  # [T, N, H]
    pages: KVPages,  # of float16, bfloat16, float32, or int8 and float8_e4m3fn with scales
    block_table: jax.Array,  # [slots + 1, width] int32; stale entries are fine
    work: GpuWorkList,
    rule: AttentionRule,
    bias: HeadBias,
    *,
    tiles: AttentionTiles,
    target: GpuTarget,
    padded: jax.Array | None = None,
) -> jax.Array:  # [T, N, H]
    """Attention of each row to its slot's positions 0 to its own; rows of padding are finite but arbitrary.

    Keys and values are read only at positions that some row of a tile sees; by Mosaic, in all of the pages in which
    these are, so that values have to be finite there.

    Args:
        padded: the queries as `rotary_kv_write` pads them to `tiles.token_rows`; only Mosaic reads them.
    """
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = pages.k.shape[1:3]
    group, sizes, row_count = heads // kv_heads, work.sizes, tiles.rows[-1]
    assert heads % kv_heads == 0 and pages.k.shape == pages.v.shape, (q.shape, pages.k.shape, pages.v.shape)
    assert page_size & (page_size - 1) == 0, f"the page size must be a power of two, not {page_size}"
    assert sizes.tile_tokens * group <= row_count, (sizes.tile_tokens, group, row_count)
    assert pages.k.dtype != jnp.float8_e4m3fn or target.has_fp8, f"no float8_e4m3fn on {target.compute_capability}"
    num_pages = pages.k.shape[0]
    assert max_addressable(num_pages, pages.k.size // num_pages, pages.k.dtype) == num_pages, pages.k.shape

    if tiles.mosaic:
        out, partials, logsums = mosaic_attention.attend(q, padded, pages, block_table, work, rule,
                                                         interpret=target.interpret)
    else:
        out, partials, logsums = _attend(q, pages, block_table, work, rule, bias, tiles, target)
    merging = COMBINE[target.generation]
    result: jax.Array = launch(
        partial(combine_kernel, group=group, token_rows=max(group, tiles.token_rows), head_dim=head_dim,
                rows=merging.rows),
        out, partials, logsums, bias.sinks, work.splits,
        name="paged_attention_combine",
        grid=(kv_heads, sizes.num_extra, row_count // merging.rows),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        aliases={0: 0},
        num_warps=merging.many_warps if q.dtype.itemsize == 4 or head_dim > 128 else merging.few_warps,
        interpret=target.interpret,
    )
    return result


def _attend(
    q: jax.Array, pages: KVPages, block_table: jax.Array, work: GpuWorkList, rule: AttentionRule, bias: HeadBias,
    tiles: AttentionTiles, target: GpuTarget,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Results [T, N, H] of tiles that are not split, partial results [Z, K, R, H] and their log2 sums [Z, K, R]."""
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = pages.k.shape[1:3]
    group, sizes, row_count = heads // kv_heads, work.sizes, tiles.rows[-1]
    out, partials, logsums = launch(
        partial(_attention_kernel, rule=rule, group=group, head_dim=head_dim, page_size=page_size, tiles=tiles),
        q, *pages, *bias, block_table, work.items,
        name="paged_attention",
        grid=(kv_heads, sizes.num_items),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((sizes.num_partials, kv_heads, row_count, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((sizes.num_partials, kv_heads, row_count), jnp.float32),
        ),
        aliases={0: 0},  # a program reads no other rows than those it writes; rows of padding stay finite
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=target.interpret,
    )
    return out, partials, logsums


def _attention_kernel(
    q_ref: Any,  # [T, N, H]
    k_ref: Any,  # [P, S, K, H]
    v_ref: Any,  # [P, S, K, H]
    k_scale_ref: Any,  # [P, K, S] or None
    v_scale_ref: Any,  # [P, K, S] or None
    slopes_ref: Any,  # [N] or None
    sinks_ref: Any,  # [N] or None
    table_ref: Any,  # [slots + 1, width]
    items_ref: Any,  # [W, 8]
    out_ref: Any,  # [T, N, H], the memory of q
    partials_ref: Any,  # [Z, K, R, H]
    logsums_ref: Any,  # [Z, K, R]
    *,
    rule: AttentionRule,
    group: int,
    head_dim: int,
    page_size: int,
    tiles: AttentionTiles,
) -> None:
    kv_head = pl.program_id(0)
    # The last items first: a prompt's later tiles see more context, and long programs should not start last.
    item = items_ref.shape[0] - 1 - pl.program_id(1)
    first_row, tokens, slot, first_position, start, end, part = (items_ref[item, field] for field in range(7))
    page_bits = page_size.bit_length() - 1
    lane = jnp.arange(_power_of_two(head_dim))
    block = jnp.arange(tiles.block)
    compute_dtype = q_ref.dtype

    def page_ids(key_pos: jax.Array) -> jax.Array:
        return load(table_ref.at[slot, key_pos >> page_bits], key_pos < end, 0)

    def attend(rows: int) -> None:
        row = jnp.arange(rows)
        token, head = row // group, kv_head * group + row % group
        position = first_position + token
        valid = token < tokens
        row_mask = _with_lanes(valid, lane, head_dim)
        q_index = ((first_row + token)[:, None], head[:, None], lane[None, :])
        q = load(q_ref.at[q_index], row_mask, 0)
        slope = None if slopes_ref is None else load(slopes_ref.at[head], valid, 0) * LOG2E

        def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            page, highest, total, weighted = carry
            key_pos = start + index * tiles.block + block
            real = key_pos < end
            next_page = page_ids(key_pos + tiles.block)
            inside = key_pos & (page_size - 1)
            at = (page[:, None], inside[:, None], kv_head, lane[None, :])
            mask = _with_lanes(real, lane, head_dim)
            keys = load(k_ref.at[at], mask, jnp.zeros((), k_ref.dtype))
            values = load(v_ref.at[at], mask, jnp.zeros((), v_ref.dtype))
            scores = dot(q, keys.astype(compute_dtype).T)
            if k_scale_ref is not None:
                scores = scores * load(k_scale_ref.at[page, kv_head, inside], real, 0)[None, :]
            scores = _in_base_two(scores, rule)
            if slope is not None:
                scores = scores + slope[:, None] * (key_pos[None, :] - position[:, None]).astype(jnp.float32)
            visible = real[None, :] & (key_pos[None, :] <= position[:, None])
            if rule.window is not None:
                visible = visible & (key_pos[None, :] > position[:, None] - rule.window)
            scores = jnp.where(visible, scores, MASKED)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
            fade = jnp.exp2(highest - new_highest)
            weights = jnp.exp2(scores - new_highest[:, None])
            if rule.window is not None:  # a block may show a row nothing before it has seen anything
                weights = jnp.where(visible, weights, 0)
            total = total * fade + jnp.sum(weights, axis=1)
            scale = None if v_scale_ref is None else load(v_scale_ref.at[page, kv_head, inside], real, 0)
            new = _weighted_sum(weights, values, scale, compute_dtype)
            return next_page, new_highest, total, weighted * fade[:, None] + new

        highest, total = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
        if sinks_ref is not None:  # whole tiles count the sink here, split ones in the second kernel
            sink = load(sinks_ref.at[head], valid, 0) * LOG2E
            highest = jnp.where(part < 0, sink, highest)
            total = jnp.where(part < 0, jnp.ones_like(total), total)
        weighted = jnp.zeros((rows, lane.size), jnp.float32)
        trips = (end - start + tiles.block - 1) // tiles.block
        carry = (page_ids(start + block), highest, total, weighted)
        _, highest, total, weighted = lax.fori_loop(0, trips, step, carry)
        safe = jnp.where(total > 0, total, 1)
        result = weighted / safe[:, None]
        logsum = jnp.where(total > 0, highest + jnp.log2(safe), MASKED)
        store(out_ref.at[q_index], result.astype(out_ref.dtype), row_mask & (part < 0))
        store(partials_ref.at[part, kv_head, row[:, None], lane[None, :]], result, row_mask & (part >= 0))
        store(logsums_ref.at[part, kv_head, row], logsum, valid & (part >= 0))

    fewer = 0
    for rows in tiles.rows:
        used = tokens * group
        pl.when((used > fewer) & (used <= rows))(partial(attend, rows))
        fewer = rows


def combine_kernel(
    _: Any,  # [T, N, H], the memory of the output
    partials_ref: Any,  # [Z, K, R, H]
    logsums_ref: Any,  # [Z, K, R]
    sinks_ref: Any,  # [N] or None
    splits_ref: Any,  # [X, 4]
    out_ref: Any,  # [T, N, H]
    *,
    group: int,
    token_rows: int,
    head_dim: int,
    rows: int,
) -> None:
    """Merge the partial results of one split tile, of 16 or so of its rows."""
    kv_head, split = pl.program_id(0), pl.program_id(1)
    first_row, tokens, first_part, count = (splits_ref[split, field] for field in range(4))
    first = pl.program_id(2) * rows

    @pl.when(first < tokens * token_rows)
    def _merge() -> None:
        row = first + jnp.arange(rows)
        lane = jnp.arange(_power_of_two(head_dim))
        token = row // token_rows
        head = kv_head * group + row % token_rows
        valid = token < tokens
        if token_rows > group:
            valid = valid & (row % token_rows < group)
        mask = _with_lanes(valid, lane, head_dim)

        def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, weighted = carry
            part = first_part + index
            result = load(partials_ref.at[part, kv_head, row[:, None], lane[None, :]], mask, 0)
            logsum = load(logsums_ref.at[part, kv_head, row], valid, MASKED)
            new_highest = jnp.maximum(highest, logsum)
            fade = jnp.exp2(highest - new_highest)
            weight = jnp.where(logsum > MASKED, jnp.exp2(logsum - new_highest), 0)
            return new_highest, total * fade + weight, weighted * fade[:, None] + result * weight[:, None]

        highest, total = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
        if sinks_ref is not None:
            highest, total = load(sinks_ref.at[head], valid, 0) * LOG2E, jnp.ones_like(total)
        weighted = jnp.zeros((rows, lane.size), jnp.float32)
        _, total, weighted = lax.fori_loop(0, count, step, (highest, total, weighted))
        result = weighted / jnp.where(total > 0, total, 1)[:, None]
        target = ((first_row + token)[:, None], head[:, None], lane[None, :])
        store(out_ref.at[target], result.astype(out_ref.dtype), mask)


def _weighted_sum(
    weights: jax.Array,  # [R, C] float32, at most 1
    values: jax.Array,  # [C, H] as stored
    scale: jax.Array | None,  # [C] float32, of the values
    dtype: jnp.dtype,
) -> jax.Array:  # [R, H] float32
    if scale is None:
        return dot(weights.astype(dtype), values.astype(dtype))
    if dtype != jnp.float16:
        return dot((weights * scale[None, :]).astype(dtype), values.astype(dtype))
    # The smallest float16 is 6e-8, and a weight times a scale may be less; beside the largest scale that is little.
    largest = jnp.max(scale)
    return dot((weights * (scale / largest)[None, :]).astype(dtype), values.astype(dtype)) * largest


def _in_base_two(products: jax.Array, rule: AttentionRule) -> jax.Array:
    """Scores in units of log2, so that weights are powers of two, which the hardware has."""
    if rule.softcap is None:
        return products * (rule.scale * LOG2E)
    power = jnp.exp2(products * (2 * LOG2E * rule.scale / rule.softcap))
    return rule.softcap * LOG2E * (1 - 2 / (power + 1))  # tanh


def _with_lanes(rows: jax.Array, lane: jax.Array, head_dim: int) -> jax.Array:
    """[rows, lanes] mask: Triton's arrays are powers of two long, a head need not be."""
    mask = jnp.broadcast_to(rows[:, None], (rows.size, lane.size))
    return mask if lane.size == head_dim else mask & (lane < head_dim)[None, :]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
