"""Ragged paged attention for Hopper by Mosaic GPU: pages by TMA, products by wgmma. For decode first.

The same work list, partial results and merging kernel as `paged_attention`, whose wrapper chooses this one where
`GpuTarget.mosaic` says so. One warp group per (kv head, item). It keeps a ring of blocks of keys and values in shared
memory, `STAGES - 1` of them under way while one is computed; a block is as many TMA boxes as it has pages, and the ids
of the pages of the next are loaded one iteration ahead. Whole pages are read, also beyond a sequence's end: what must
not be seen is masked in the scores, and values are finite in all pages (see `rotary_kv_write`).

A wgmma has 64 rows, and TMA fills shared memory 8 rows at a time, from rows of the queries that are multiples of 8:
queries are padded to B per kv head, the group's size rounded up to a power of two of at least 8, which in the engine
`rotary_kv_write` does. Row r of a tile is token r // B, query head r % B of the group.

What has been shown without a GPU: the results, interpreted, against float64, without races; and that it compiles for
Hopper without spills. How the interpreted kernel differs from the compiled one: see `mosaic`. No GPU has run it, which
is why the engine tries it on the GPU at its start before it uses it: see `jaxpaged.engine.mosaic_check`.

Axis letters: as in `paged_attention`; B rows per token, R = 64 rows of a tile.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels import mosaic
from jaxpaged.pallas_kernels.attention_rule import AttentionRule
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.tiles import MOSAIC
from jaxpaged.pallas_kernels.work_list import GpuWorkList

ROWS, BLOCK, STAGES = MOSAIC.rows[0], MOSAIC.block, MOSAIC.num_stages
MASKED = -1e30
LOG2E = math.log2(math.e)


def rows_per_token(group: int) -> int:
    """B."""
    return max(8, 1 << (group - 1).bit_length())


def supports(group: int, head_dim: int, dtype: jnp.dtype) -> bool:
    """Whether this kernel computes such attention, without head biases: 16-bit pages, heads of 64 or 128."""
    return head_dim in (64, 128) and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and rows_per_token(group) <= ROWS


def attend(
    q: jax.Array,  # [T, N, H]; the memory of the results
    padded: jax.Array | None,  # [T, K, B, H], the same padded, which the kernel reads; None: they are padded here
    pages: KVPages,
    block_table: jax.Array,  # [slots + 1, width] int32
    work: GpuWorkList,
    rule: AttentionRule,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whole tiles' results [T, N, H], queries elsewhere; partial results [Z, K, R, H] and their log2 sums [Z, K, R]."""
    (page_size, kv_heads, head_dim), dtype, sizes = pages.k.shape[1:], pages.k.dtype, work.sizes
    group = q.shape[1] // kv_heads
    spread = rows_per_token(group)
    if padded is None:
        padded = jnp.pad(q.reshape(-1, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, spread - group), (0, 0)))
    assert padded.shape == (q.shape[0], kv_heads, spread, head_dim), (q.shape, padded.shape)
    assert q.dtype == padded.dtype == dtype, (q.dtype, padded.dtype, dtype)
    assert sizes.tile_tokens * spread <= ROWS, (sizes.tile_tokens, spread)
    boxes = max(BLOCK // page_size, 1)
    ring = (STAGES, BLOCK, head_dim)
    staging = (mosaic.operand((head_dim, BLOCK), dtype), mosaic.operand((ROWS, BLOCK), dtype)) if interpret else ()
    out = mosaic.written_in_place(q)
    partials, logsums = mosaic.launch(
        partial(_kernel, rule=rule, group=group, spread=spread, page_size=page_size, tile_tokens=sizes.tile_tokens,
                tensors=mosaic.Tensors(interpret)),
        padded, pages.k, pages.v, block_table, work.items, out,
        name="paged_attention_mosaic",
        grid=(kv_heads, sizes.num_items),
        out_shape=(
            jax.ShapeDtypeStruct((sizes.num_partials, kv_heads, ROWS, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((sizes.num_partials, kv_heads, ROWS), jnp.float32),
        ),
        scratch=(
            mosaic.operand((ROWS, head_dim), dtype), mosaic.operand(ring, dtype), mosaic.operand(ring, dtype),
            mosaic.plain((ROWS, head_dim), dtype), mosaic.plain((ROWS, head_dim), jnp.float32),
            mosaic.plain((ROWS,), jnp.float32),
            mosaic.Barrier(num_arrivals=sizes.tile_tokens),
            mosaic.Barrier(num_arrivals=boxes, num_barriers=STAGES),
            mosaic.Barrier(num_arrivals=boxes, num_barriers=STAGES), *staging,
        ),
        interpret=interpret,
    )
    return out[...], partials, logsums


def _kernel(
    q_ref: Any,  # [T, K, B, H]
    k_ref: Any,  # [P, S, K, H]
    v_ref: Any,  # [P, S, K, H]
    table_ref: Any,  # [slots + 1, width]
    items_ref: Any,  # [W, 8]
    out_ref: Any,  # [T, N, H]
    partials_ref: Any,  # [Z, K, R, H]
    logsums_ref: Any,  # [Z, K, R]
    q_tile: Any,  # [R, H] in shared memory, as all from here on
    k_ring: Any,  # [STAGES, BLOCK, H]
    v_ring: Any,  # [STAGES, BLOCK, H]
    out_tile: Any,  # [R, H]
    partial_tile: Any,  # [R, H] float32
    logsum_tile: Any,  # [R] float32
    q_here: Any,
    k_here: Any,  # one barrier per stage
    v_here: Any,
    *staging: Any,
    rule: AttentionRule,
    group: int,
    spread: int,
    page_size: int,
    tile_tokens: int,
    tensors: mosaic.Tensors,
) -> None:
    kv_head = lax.axis_index("x0")
    item = items_ref.shape[0] - 1 - lax.axis_index("x1")  # the last items first, as in `paged_attention`
    first_row, tokens, slot, first_position, start, end, part = (items_ref[item, field] for field in range(7))
    head_dim = q_ref.shape[3]
    box = min(page_size, BLOCK)  # rows of one TMA box
    boxes = BLOCK // box
    base = lax.div(start, jnp.int32(box)) * box
    last = lax.div(end - 1, jnp.int32(page_size))

    def page_ids(block: Any) -> tuple[jax.Array, ...]:
        """Pages of a block's boxes; beyond the context's end the last one again, which is in the cache."""
        positions = (base + block * BLOCK + index * box for index in range(boxes))
        return tuple(table_ref[slot, jnp.minimum(lax.div(first, jnp.int32(page_size)), last)] for first in positions)

    def load_block(block: Any, ids: tuple[jax.Array, ...]) -> None:
        stage = lax.rem(block, jnp.int32(STAGES))
        for index, page in enumerate(ids):
            inside = lax.rem(base + block * BLOCK + index * box, jnp.int32(page_size)) if box < page_size else 0
            for pool, ring, here in ((k_ref, k_ring, k_here), (v_ref, v_ring, v_here)):
                mosaic.load_tile(pool.at[page, pl.ds(inside, box), kv_head],
                                 ring.at[stage, pl.ds(index * box, box)], here.at[stage])

    @pl.when(tokens > 0)
    def _attend() -> None:
        trips = lax.div(end - base + (BLOCK - 1), jnp.int32(BLOCK))
        # Rows without a token repeat the last one that has one.
        for token in range(tile_tokens):
            row = first_row + jnp.minimum(token, tokens - 1)
            mosaic.load_tile(q_ref.at[row, kv_head], q_tile.at[pl.ds(token * spread, spread)], q_here)
        for block in range(STAGES - 1):
            @pl.when(block < trips)
            def _fill(block: int = block) -> None:
                load_block(jnp.int32(block), page_ids(jnp.int32(block)))
        mosaic.barrier_wait(q_here)

        def step(index: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            ids, highest, total, weighted = carry
            stage, ahead = lax.rem(index, jnp.int32(STAGES)), index + (STAGES - 1)

            @pl.when(ahead < trips)
            def _load() -> None:
                load_block(ahead, ids)

            next_ids = page_ids(ahead + 1)
            mosaic.barrier_wait(k_here.at[stage])
            scores = _in_base_two(tensors.multiply_transposed(q_tile, k_ring.at[stage], *staging[:1] or (None,)), rule)
            key_pos = tensors.index((ROWS, BLOCK), 1) + (base + index * BLOCK)
            position = lax.div(tensors.index((ROWS, BLOCK), 0), jnp.int32(spread)) + first_position
            visible = (key_pos <= position) & (key_pos >= start) & (key_pos < end)
            if rule.window is not None:
                visible = visible & (key_pos > position - rule.window)
            scores = jnp.where(visible, scores, MASKED)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
            fade = jnp.exp2(highest - new_highest)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_highest, scores.shape, (0,)))
            total = total * fade + jnp.sum(weights, axis=1)
            mosaic.barrier_wait(v_here.at[stage])
            new = tensors.multiply(weights.astype(q_tile.dtype), v_ring.at[stage], *staging[1:] or (None,))
            weighted = weighted * lax.broadcast_in_dim(fade, weighted.shape, (0,)) + new
            return next_ids, new_highest, total, weighted

        _, highest, total, weighted = lax.fori_loop(0, trips, step, (
            page_ids(jnp.int32(STAGES - 1)), tensors.full((ROWS,), MASKED), tensors.full((ROWS,), 0.0),
            tensors.full((ROWS, head_dim), 0.0)))
        result = weighted / lax.broadcast_in_dim(total, weighted.shape, (0,))

        @pl.when(part >= 0)
        def _keep_part() -> None:
            partial_tile[...] = result
            logsum_tile[...] = highest + jnp.log(total) * LOG2E
            mosaic.commit_smem()
            mosaic.store_tile(partial_tile, partials_ref.at[part, kv_head])
            mosaic.store_tile(logsum_tile, logsums_ref.at[part, kv_head])

        @pl.when(part < 0)
        def _finish() -> None:
            out_tile[...] = result.astype(out_tile.dtype)
            mosaic.commit_smem()
            for token in range(tile_tokens):
                @pl.when(token < tokens)
                def _store(token: int = token) -> None:
                    heads = out_ref.at[first_row + token, pl.ds(kv_head * group, group)]
                    mosaic.store_tile(out_tile.at[pl.ds(token * spread, group)], heads)

        mosaic.wait_for_stores(0)


def _in_base_two(products: jax.Array, rule: AttentionRule) -> jax.Array:
    """As in `paged_attention`."""
    if rule.softcap is None:
        return products * (rule.scale * LOG2E)
    power = jnp.exp2(products * (2 * LOG2E * rule.scale / rule.softcap))
    return rule.softcap * LOG2E * (1 - 2 / (power + 1))
