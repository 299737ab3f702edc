"""Rotates queries and keys and writes keys and values into their pages, in one kernel that works in place.

One program per (tile of tokens, kv head): it reads the tile's angles once, rotates the query heads of its group and
the key, and writes key and value to their pages. Rows of padding have page -1 and write nothing.

No value in a page is NaN or infinite. Attention multiplies the values of a whole block with the weights of a whole tile
of queries, and a weight of zero times such a value would still reach queries that do not see it. A token whose key or
value is not finite gets a value of zeros and a key of NaN, which makes the scores, and with them the results, NaN of
exactly those queries that see it.

Axis letters: T tokens, N query heads, K kv heads, G query heads per kv head, B rows of queries per kv head, H head dim,
P pages, S page size, R tokens of a tile.
"""

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.heads import Heads
from jaxpaged.pallas_kernels.kv_pages import LARGEST, KVPages
from jaxpaged.pallas_kernels.lowering import GpuTarget, launch, load, store
from jaxpaged.pallas_kernels.tiles import ROTARY, RotaryTiles

Parts = list[tuple[jax.Array, jax.Array]]  # lanes of H, and rows [R, lanes] of them


def rotary_kv_write(
    q: jax.Array | Heads,  # [T, N, H]
    k: jax.Array | Heads,  # [T, K, H]
    v: jax.Array | Heads,  # [T, K, H]
    cos: jax.Array,  # [T, H // 2] float32
    sin: jax.Array,  # [T, H // 2] float32
    page: jax.Array,  # [T] int32, -1 in rows that write nothing
    offset: jax.Array,  # [T] int32, 0 to S - 1
    pages: KVPages,
    *,
    target: GpuTarget,
    token_rows: int = 0,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    """Rotate, and write the pools in place; all rows that are written differ in page or offset.

    Args:
        token_rows: B, of `AttentionTiles`; 0: queries are not padded.

    Returns:
        The rotated queries [T, N, H], in place if they had an array of their own; the same padded with zeros
        [T, K, B, H], or None; and the pools.
    """
    q, k, v = Heads.of(q), Heads.of(k), Heads.of(v)
    (tokens, heads, head_dim), kv_heads = q.shape, k.count
    assert k.shape == v.shape == (tokens, kv_heads, head_dim) and heads % kv_heads == 0, (q.shape, k.shape, v.shape)
    assert cos.shape == sin.shape == (tokens, head_dim // 2), (q.shape, cos.shape)
    assert pages.k.dtype != jnp.float8_e4m3fn or target.has_fp8, f"no float8_e4m3fn on {target.compute_capability}"
    tiles = choose_tiles(target, tokens, head_dim)
    first = [q.array, k.array, v.array, cos, sin, page, offset]
    queries = [jax.ShapeDtypeStruct(q.shape, q.array.dtype)]
    if token_rows:
        queries.append(jax.ShapeDtypeStruct((tokens, kv_heads, token_rows, head_dim), q.array.dtype))
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pages if pool is not None]
    turned, *rest = launch(
        partial(_kernel, group=heads // kv_heads, firsts=(q.first, k.first, v.first), rows=tiles.rows,
                is_padded=bool(token_rows)),
        *first, *pages,
        name="rotary_kv_write",
        grid=(tokens // tiles.rows, kv_heads),
        out_shape=[*queries, *pools],
        aliases=({0: 0} if q.is_whole else {}) | {
            len(first) + index: len(queries) + index for index in range(len(pools))},
        num_warps=tiles.num_warps,
        interpret=target.interpret,
    )
    return turned, rest.pop(0) if token_rows else None, KVPages(*rest)


def choose_tiles(target: GpuTarget, tokens: int, head_dim: int) -> RotaryTiles:
    """The tile of a step of `tokens` rows, from the table of the GPU's generation; the table is for heads of 128."""
    tile = next(tile for tile in ROTARY[target.generation] if tokens <= tile.max_tokens)
    rows = tile.rows * 64 // (1 << (head_dim // 2).bit_length() - 1)
    return replace(tile, rows=min(max(1, rows), tokens & -tokens))  # no tile is part empty


def _kernel(
    q_ref: Any,  # [T, at least N, H]
    k_ref: Any,  # [T, at least K, H]
    v_ref: Any,  # [T, at least K, H]
    cos_ref: Any,  # [T, H // 2]
    sin_ref: Any,  # [T, H // 2]
    page_ref: Any,  # [T]
    offset_ref: Any,  # [T]
    k_pool: Any,  # [P, S, K, H], the memory of k_out
    v_pool: Any,  # [P, S, K, H], the memory of v_out
    k_scale: Any,  # [P, K, S], the memory of k_scale_out, or None
    v_scale: Any,  # [P, K, S], the memory of v_scale_out, or None
    turned_ref: Any,  # [T, N, H], the memory of q where q has an array of its own
    *outs: Any,  # [T, K, B, H] padded queries; the pools and their scales
    group: int,
    firsts: tuple[int, int, int],  # head of q, k and v in their arrays
    rows: int,
    is_padded: bool,
) -> None:
    padded_ref, k_out, v_out, *scale_outs = outs if is_padded else (None, *outs)
    k_scale_out, v_scale_out = scale_outs or (k_scale, v_scale)  # None without scales
    is_scaled = k_scale is not None
    half = q_ref.shape[2] // 2
    first_q, first_k, first_v = firsts
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
        for lane, part in turn(q_ref, first_q + head):
            store(turned_ref.at[token[:, None], head, lane[None, :]], part)
            if padded_ref is not None:
                store(padded_ref.at[token[:, None], kv_head, member, lane[None, :]], part)
    if padded_ref is not None:
        for member in range(group, padded_ref.shape[2]):
            for lane in (start + lane for lane, _, _ in angles for start in (0, half)):
                zeros = jnp.zeros((rows, lane.size), padded_ref.dtype)
                store(padded_ref.at[token[:, None], kv_head, member, lane[None, :]], zeros)

    page, offset = load(page_ref.at[token]), load(offset_ref.at[token])
    written = page >= 0
    page = jnp.maximum(page, 0)
    keys, values = turn(k_ref, first_k + kv_head), whole(v_ref, first_v + kv_head)
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
