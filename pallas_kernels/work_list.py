"""Cut a step into work for the GPU's attention kernel: on the device, once per step, for all layers.

Query tiles: up to `tile_tokens` consecutive tokens of one slot share each read of the context; a decode row is a tile
of one. Items: a tile's context is cut into chunks, one program each (flash-decoding; Dao et al., 2023). The length
of a chunk follows from the step's total context and the number of programs that fill the GPU, so that the number of
items never exceeds the compiled grid, whatever the lengths.

No sort, no loop: on a GPU each would cost more than this whole module, and a loop would split the CUDA graph of a step.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """The static sizes of a step's work.

    Attributes:
        tile_tokens: maximum tokens in a tile.
        num_tiles: maximum tiles in a step.
        num_extra: items beyond one per tile, for splitting long contexts; also the maximum number of split tiles.
        min_chunk: contexts of fewer tokens are not split.
    """

    tile_tokens: int
    num_tiles: int
    num_extra: int
    min_chunk: int

    @property
    def num_items(self) -> int:
        return self.num_tiles + self.num_extra

    @property
    def num_partials(self) -> int:
        """Maximum items of split tiles: n // u + 1 <= 2 (n // u) where n >= u, and all n // u add up to `num_extra`."""
        return 2 * self.num_extra


def max_tiles(tokens: int, slots: int, tile_tokens: int) -> int:
    """Bound on the tiles of a step of `tokens` rows over `slots` slots; tiles begin at multiples of `tile_tokens`."""
    return min(tokens, 2 * min(tokens, slots) + tokens // tile_tokens)


@partial(jax.tree_util.register_dataclass, data_fields=["items", "splits"], meta_fields=["sizes"])
@dataclass(frozen=True)
class GpuWorkList:
    """The work of one step.

    Attributes:
        items: [W, 8] int32, one row per program: first query row, number of tokens, slot, position of the first token,
            first and one past the last context position, index of the partial result or -1 for none, and 0. Rows
            without work have no tokens.
        splits: [X, 4] int32, one row per split tile: first query row, number of tokens, first partial result, number
            of partial results; 0 tokens where there is none.
    """

    items: jax.Array
    splits: jax.Array
    sizes: WorkSizes


def make_work_list(
    slot: jax.Array, position: jax.Array, null_slot: int, sizes: WorkSizes, window: int | None = None
) -> GpuWorkList:
    """Cut a step.

    Args:
        slot: [T] int32; the tokens of one slot are neighbors, in order; padding rows have `null_slot`.
        position: [T] int32.
        window: see `AttentionRule`; context that no token of a tile sees is left out.
    """
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    valid = slot != null_slot
    # Tiles end at multiples of their size, so that a row's tile does not depend on how a prompt was cut into steps.
    starts = valid & ((index == 0) | (slot != jnp.roll(slot, 1)) | (position % sizes.tile_tokens == 0))
    tile_of_token = jnp.cumsum(starts, dtype=jnp.int32) - 1
    tile = jnp.arange(sizes.num_tiles, dtype=jnp.int32)
    row = _first_at_least(tile_of_token, tile)
    tokens = jnp.sum((tile_of_token == tile[:, None]) & valid, axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, slot.shape[0] - 1)
    first = position[row]
    end = jnp.where(tokens > 0, first + tokens, 0)
    begin = jnp.zeros_like(end) if window is None else jnp.where(tokens > 0, jnp.maximum(first - window + 1, 0), 0)

    length = end - begin
    # In units of the minimum chunk, fewer than 2^31 even where there are more tokens than that: a chunk of u
    # cuts a tile of n whole units into at most n // u + 1, and sum(n // u) <= sum(n) / u <= extra.
    units = jnp.sum(length // sizes.min_chunk)
    chunk = jnp.maximum(-(-units // sizes.num_extra), 1) * sizes.min_chunk
    count = -(-length // chunk)
    last_item = jnp.cumsum(count)
    parts = jnp.where(count > 1, count, 0)
    first_part = jnp.cumsum(parts) - parts

    item = jnp.arange(sizes.num_items, dtype=jnp.int32)
    of = jnp.minimum(_first_at_least(last_item, item + 1), sizes.num_tiles - 1)
    nth = item - (last_item[of] - count[of])
    real = item < last_item[-1]
    start = begin[of] + nth * chunk
    items = jnp.stack([
        row[of],
        jnp.where(real, tokens[of], 0),
        slot[row[of]],
        first[of],
        start,
        jnp.minimum(start + chunk, end[of]),
        jnp.where(count[of] > 1, first_part[of] + nth, -1),
        jnp.zeros_like(start),
    ], axis=1)

    last_split = jnp.cumsum(count > 1, dtype=jnp.int32)
    split = jnp.arange(sizes.num_extra, dtype=jnp.int32)
    of = jnp.minimum(_first_at_least(last_split, split + 1), sizes.num_tiles - 1)
    real = split < last_split[-1]
    splits = jnp.stack([row[of], jnp.where(real, tokens[of], 0), first_part[of], jnp.where(real, count[of], 0)], axis=1)
    return GpuWorkList(items.astype(jnp.int32), splits.astype(jnp.int32), sizes)


def _first_at_least(ascending: jax.Array, wanted: jax.Array) -> jax.Array:
    """Index of the first entry that is at least `wanted`; the length where there is none. One comparison per pair."""
    return jnp.sum(ascending < wanted[:, None], axis=1, dtype=jnp.int32)
