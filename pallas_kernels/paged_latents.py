"""Multi-head latent attention for GPUs, over pages of latents: ragged, split and merged as `paged_attention` is.

A query has been multiplied with its head's key matrix before, and the result is multiplied with the value matrix
after. So all heads share one key, of L + O numbers, and one value, the first L of these: a block of pages is read once,
into shared memory, and used twice. 576 is no power of two, and Triton's arrays are: the 512 numbers of a latent and the
64 that carry the position are loaded apart.

Axis letters: T tokens, N query heads, L latent, O rotated, P pages, S page size, W items, Z partial results, R rows of
a program, B programs of a tile, which follow one another and find the context in the second-level cache.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import GpuTarget, dot, launch, load, store
from jaxpaged.pallas_kernels.paged_attention import LOG2E, MASKED, combine_kernel
from jaxpaged.pallas_kernels.tiles import LATENTS, MANY_TOKENS, LatentTiles
from jaxpaged.pallas_kernels.work_list import GpuWorkList, WorkSizes, max_tiles

MIN_CHUNK = 512  # tokens; the partial result of 128 heads is as many bytes as 230 tokens of context
_MERGED = 16  # rows of a program that merges


def supports(latent_dim: int, rotary_dim: int, dtype: jnp.dtype, page_dtype: jnp.dtype) -> bool:
    """Whether the kernel computes attention over such latents."""
    sizes = all(size >= 16 and size & (size - 1) == 0 for size in (latent_dim, rotary_dim))
    return sizes and jnp.dtype(dtype) == jnp.dtype(page_dtype) and jnp.dtype(dtype).itemsize == 2


def choose_tiles(target: GpuTarget, tokens: int, heads: int) -> LatentTiles:
    """The tiles of a step of `tokens` rows."""
    table = LATENTS[target.generation]
    return table.few if heads <= table.few.rows and tokens < MANY_TOKENS else table.many


def work_sizes(target: GpuTarget, tiles: LatentTiles, tokens: int, slots: int, heads: int) -> WorkSizes:
    """Sizes of the work of a step of `tokens` rows over `slots` slots."""
    tile_tokens = max(tiles.rows // heads, 1)
    fill = -(-2 * target.num_sms * tiles.programs_per_sm // -(-tile_tokens * heads // tiles.rows))
    return WorkSizes(tile_tokens, max_tiles(tokens, slots, tile_tokens), fill, MIN_CHUNK)


def paged_latents(
    q: jax.Array,  # [T, N, L + O]
    pool: jax.Array,  # [P, S, 1, L + O]
    block_table: jax.Array,  # [slots + 1, width] int32; stale entries are fine
    work: GpuWorkList,
    *,
    scale: float,
    latent_dim: int,
    tiles: LatentTiles,
    target: GpuTarget,
) -> jax.Array:  # [T, N, L]
    """Each row's weighted sum of the latents of its slot's positions 0 to its own; padding is arbitrary."""
    tokens, heads, size = q.shape
    sizes, row_count = work.sizes, work.sizes.tile_tokens * heads
    page_size = pool.shape[1]
    assert page_size & (page_size - 1) == 0, f"the page size must be a power of two, not {page_size}"
    out, partials, logsums = launch(
        partial(_kernel, heads=heads, latent_dim=latent_dim, rotary_dim=size - latent_dim, scale=scale, tiles=tiles),
        q, pool, block_table, work.items,
        name="paged_latents",
        grid=(-(-row_count // tiles.rows), sizes.num_items),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, latent_dim), q.dtype),
            jax.ShapeDtypeStruct((sizes.num_partials, 1, row_count, latent_dim), jnp.float32),
            jax.ShapeDtypeStruct((sizes.num_partials, 1, row_count), jnp.float32),
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=target.interpret,
    )
    result: jax.Array = launch(
        partial(combine_kernel, group=heads, token_rows=heads, head_dim=latent_dim, rows=_MERGED),
        out, partials, logsums, None, work.splits,
        name="paged_latents_combine",
        grid=(1, sizes.num_extra, -(-row_count // _MERGED)),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        aliases={0: 0},
        num_warps=8,
        interpret=target.interpret,
    )
    return result


def _kernel(
    q_ref: Any,  # [T, N, L + O]
    pool_ref: Any,  # [P, S, 1, L + O]
    table_ref: Any,  # [slots + 1, width]
    items_ref: Any,  # [W, 8]
    out_ref: Any,  # [T, N, L]
    partials_ref: Any,  # [Z, 1, B R, L]
    logsums_ref: Any,  # [Z, 1, B R]
    *,
    heads: int,
    latent_dim: int,
    rotary_dim: int,
    scale: float,
    tiles: LatentTiles,
) -> None:
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    # The last items first: a prompt's later tiles see more context, and long programs should not start last.
    item = items_ref.shape[0] - 1 - pl.program_id(1)
    first_row, tokens, slot, first_position, start, end, part = (items_ref[item, field] for field in range(7))
    page_size = pool_ref.shape[1]
    page_bits = int(math.log2(page_size))
    latent, rotary, block = jnp.arange(latent_dim), jnp.arange(rotary_dim), jnp.arange(tiles.block)

    @pl.when(tokens * heads > pl.program_id(0) * tiles.rows)
    def _attend() -> None:
        token, head = row // heads, row % heads
        valid = token < tokens
        position = first_position + token
        at = (first_row + token)[:, None], head[:, None]
        q_latent = load(q_ref.at[*at, latent[None, :]], _wide(valid, latent), 0)
        q_rotary = load(q_ref.at[*at, latent_dim + rotary[None, :]], _wide(valid, rotary), 0)

        def page_ids(key_pos: jax.Array) -> jax.Array:
            return load(table_ref.at[slot, key_pos >> page_bits], key_pos < end, 0)

        def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            page, highest, total, weighted = carry
            key_pos = start + index * tiles.block + block
            real = key_pos < end
            next_page = page_ids(key_pos + tiles.block)  # one iteration ahead, see `paged_attention`
            here = page[:, None], (key_pos & (page_size - 1))[:, None], 0
            values = load(pool_ref.at[*here, latent[None, :]], _wide(real, latent), 0)
            keys = load(pool_ref.at[*here, latent_dim + rotary[None, :]], _wide(real, rotary), 0)
            scores = (dot(q_latent, values.T) + dot(q_rotary, keys.T)) * (scale * LOG2E)
            visible = real[None, :] & (key_pos[None, :] <= position[:, None])
            scores = jnp.where(visible, scores, MASKED)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
            fade = jnp.exp2(highest - new_highest)
            weights = jnp.exp2(scores - new_highest[:, None])
            total = total * fade + jnp.sum(weights, axis=1)
            weighted = weighted * fade[:, None] + dot(weights.astype(values.dtype), values)
            return next_page, new_highest, total, weighted

        none = jnp.full(tiles.rows, MASKED, jnp.float32), jnp.zeros(tiles.rows, jnp.float32)
        carry = page_ids(start + block), *none, jnp.zeros((tiles.rows, latent_dim), jnp.float32)
        _, highest, total, weighted = lax.fori_loop(0, (end - start + tiles.block - 1) // tiles.block, step, carry)
        safe = jnp.where(total > 0, total, 1)
        result = weighted / safe[:, None]
        logsum = jnp.where(total > 0, highest + jnp.log2(safe), MASKED)
        store(out_ref.at[*at, latent[None, :]], result.astype(out_ref.dtype), _wide(valid & (part < 0), latent))
        split = valid & (part >= 0)
        store(partials_ref.at[part, 0, row[:, None], latent[None, :]], result, _wide(split, latent))
        store(logsums_ref.at[part, 0, row], logsum, split)


def _wide(rows: jax.Array, lane: jax.Array) -> jax.Array:
    return jnp.broadcast_to(rows[:, None], (rows.size, lane.size))
