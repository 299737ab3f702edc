"""Rotates queries and keys and writes keys and values into their pages, in one kernel that works in place.

One program per (tile of tokens, kv head): it reads the tile's angles once, rotates the query heads of its group and
the key, and writes key and value to their pages. Rows of padding have page -1 and write nothing.

No value in a page is NaN or infinite. Attention multiplies the values of a whole block with the weights of a whole tile
of queries, and a weight of zero times such a value would still reach queries that do not see it. A token whose key or
value is not finite gets a value of zeros and a key of NaN, which makes the scores, and with them the results, NaN of
exactly those queries that see it.

Axis letters: T tokens, N query heads, K kv heads, G query heads per kv head, H head dim, P pages, S page size, R tokens
of a tile.
"""

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.kv_pages import LARGEST, KVPages
from jaxpaged.pallas_kernels.lowering import GpuTarget, launch, load, store
from jaxpaged.pallas_kernels.tiles import ROTARY, RotaryTiles

Parts = list[tuple[jax.Array, jax.Array]]  # lanes of H, and rows [R, lanes] of them


def rotary_kv_write(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    cos: jax.Array,  # [T, H // 2] float32
    sin: jax.Array,  # [T, H // 2] float32
    page: jax.Array,  # [T] int32, -1 in rows that write nothing
    offset: jax.Array,  # [T] int32, 0 to S - 1
    pages: KVPages,
    *,
    target: GpuTarget,
) -> tuple[jax.Array, KVPages]:
    """The rotated queries [T, N, H], and the pools with the rows written; all rows differ in page or offset."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    assert k.shape == v.shape == (tokens, kv_heads, head_dim) and heads % kv_heads == 0, (q.shape, k.shape, v.shape)
    assert cos.shape == sin.shape == (tokens, head_dim // 2), (q.shape, cos.shape)
    assert pages.k.dtype != jnp.float8_e4m3fn or target.has_fp8, f"no float8_e4m3fn on {target.compute_capability}"
    tiles = choose_tiles(target, tokens, head_dim)
    arrays = [q, *[pool for pool in pages if pool is not None]]
    first = [q, k, v, cos, sin, page, offset]
    turned, *pools = launch(
        partial(_kernel, group=heads // kv_heads, rows=tiles.rows, is_scaled=pages.k_scale is not None),
        *first, *pages,
        name="rotary_kv_write",
        grid=(tokens // tiles.rows, kv_heads),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        aliases={0: 0} | {len(first) + index: 1 + index for index in range(len(arrays) - 1)},
        num_warps=tiles.num_warps,
        interpret=target.interpret,
    )
    return turned, KVPages(*pools)


def choose_tiles(target: GpuTarget, tokens: int, head_dim: int) -> RotaryTiles:
    """The tile of a step of `tokens` rows, from the table of the GPU's generation; the table is for heads of 128."""
    tile = next(tile for tile in ROTARY[target.generation] if tokens <= tile.max_tokens)
    rows = tile.rows * 64 // (1 << (head_dim // 2).bit_length() - 1)
    return replace(tile, rows=min(max(1, rows), tokens & -tokens))  # no tile is part empty


def _kernel(
    q_ref: Any,  # [T, N, H]
    k_ref: Any,  # [T, K, H]
    v_ref: Any,  # [T, K, H]
    cos_ref: Any,  # [T, H // 2]
    sin_ref: Any,  # [T, H // 2]
    page_ref: Any,  # [T]
    offset_ref: Any,  # [T]
    k_pool: Any,  # [P, S, K, H], the memory of k_out
    v_pool: Any,  # [P, S, K, H], the memory of v_out
    k_scale: Any,  # [P, K, S], the memory of k_scale_out, or None
    v_scale: Any,  # [P, K, S], the memory of v_scale_out, or None
    turned_ref: Any,  # [T, N, H], the memory of q
    k_out: Any,  # [P, S, K, H]
    v_out: Any,  # [P, S, K, H]
    k_scale_out: Any = None,  # [P, K, S]
    v_scale_out: Any = None,  # [P, K, S]
    *,
    group: int,
    rows: int,
    is_scaled: bool,
) -> None:
    half = q_ref.shape[2] // 2
    kv_head = pl.program_id(1)
    token = pl.program_id(0) * rows + jnp.arange(rows)
    angles = []
    for lane in _lanes(half):
        at = token[:, None], lane[None, :]
        angles.append((lane, load(cos_ref.at[at]), load(sin_ref.at[at])))

    def read(ref: Any, head: Any, lane: jax.Array) -> jax.Array:
        return load(ref.at[token[:, None], head, lane[None, :]]).astype(jnp.float32)

    def turn(ref: Any, head: Any) -> Parts:
        parts = []
        for lane, cos, sin in angles:
            first, second = read(ref, head, lane), read(ref, head, half + lane)
            parts += [(lane, (first * cos - second * sin).astype(ref.dtype)),
                      (half + lane, (second * cos + first * sin).astype(ref.dtype))]
        return parts

    def whole(ref: Any, head: Any) -> Parts:
        return [(start + lane, read(ref, head, start + lane)) for lane, _, _ in angles for start in (0, half)]

    for member in range(group):
        head = kv_head * group + member
        for lane, part in turn(q_ref, head):
            store(turned_ref.at[token[:, None], head, lane[None, :]], part)

    page, offset = load(page_ref.at[token]), load(offset_ref.at[token])
    written = page >= 0
    page = jnp.maximum(page, 0)
    keys, values = turn(k_ref, kv_head), whole(v_ref, kv_head)
    sound = _are_finite(keys + values, v_ref.dtype if is_scaled else v_out.dtype)
    values = [(lane, jnp.where(sound[:, None], part, 0)) for lane, part in values]
    if not is_scaled:  # else the scale shows it
        keys = [(lane, jnp.where(sound[:, None], part.astype(jnp.float32), jnp.nan)) for lane, part in keys]
    for parts, out, scale_out in ((keys, k_out, k_scale_out), (values, v_out, v_scale_out)):
        if is_scaled:
            parts, scale = _quantized(parts, out.dtype)
            if out is k_out:
                scale = jnp.where(sound, scale, jnp.nan)
            store(scale_out.at[page, kv_head, offset], scale, written)
        for lane, part in parts:
            mask = jnp.broadcast_to(written[:, None], part.shape)
            store(out.at[page[:, None], offset[:, None], kv_head, lane[None, :]], part.astype(out.dtype), mask)


def _are_finite(parts: Parts, dtype: jnp.dtype) -> jax.Array:
    """[R] whether all of a row's numbers are still finite in `dtype`."""
    stored = [part.astype(dtype).astype(jnp.float32) for _, part in parts]
    # NaN, which maxima may pass over, shows as infinity; so does what rounds to it.
    wide = [jnp.where(part == part, jnp.abs(part), jnp.inf) for part in stored]
    return functools.reduce(jnp.maximum, (jnp.max(part, axis=1) for part in wide)) < jnp.inf


def _quantized(parts: Parts, dtype: jnp.dtype) -> tuple[Parts, jax.Array]:
    """As `kv_pages.quantize`, for rows in parts."""
    wide = [(lane, part.astype(jnp.float32)) for lane, part in parts]
    highest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(part), axis=1) for _, part in wide))
    scale = highest / LARGEST[jnp.dtype(dtype)]
    scale = jnp.where(scale > 0, scale, 1.0)  # it may have become zero only now
    stored = [(lane, part / scale[:, None]) for lane, part in wide]
    if jnp.issubdtype(dtype, jnp.integer):
        stored = [(lane, jnp.floor(part + 0.5)) for lane, part in stored]  # Triton has no rounding to even
    return stored, scale


def _lanes(count: int) -> list[jax.Array]:
    """0 to count - 1 in runs of powers of two, the only sizes that Triton has: 40 is 32 and 8."""
    runs, start = [], 0
    for bit in reversed(range(count.bit_length())):
        if count >> bit & 1:
            runs.append(start + jnp.arange(1 << bit))
            start += 1 << bit
    return runs
