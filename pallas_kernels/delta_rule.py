"""The gated delta rule over the ragged rows of a step, in XLA: prompts in chunks, decoding one token at a time.

A sequence has, per value head, a state S [dk, dv]. A token decays it, corrects what it says of the token's key, and
reads it (Yang et al., "Gated Delta Networks", 2024):

    S = exp(g) S;  S = S + k (beta (v - k S));  y = q S

Queries, keys and values come out of a causal convolution over the sequence, whose last inputs belong to the state, too.
Several tokens of a sequence are computed together: what each adds depends on those before it by a triangular system.
Everything is float32.

Axis letters: T tokens, C rows of a tile, Hk key heads, Hv value heads, W width of the convolution.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.state_pages import read_state, write_state

TILE_ROWS = 64
EPS = 1e-6  # of the length of queries and keys

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class DeltaShape(NamedTuple):
    """Sizes of the states that a device holds."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def split(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rows [C, channels] as queries and keys [Hv, C, dk], of length 1 and dk ** -0.5, and values [Hv, C, dv]."""
        keys = self.key_heads * self.key_dim
        q, k = (_unit(part.reshape(-1, self.key_heads, self.key_dim)) for part in (mixed[:, :keys],
                                                                                 mixed[:, keys : 2 * keys]))
        repeats = self.value_heads // self.key_heads
        q, k = (jnp.repeat(part, repeats, axis=1).swapaxes(0, 1) for part in (q * self.key_dim**-0.5, k))
        return q, k, mixed[:, 2 * keys :].reshape(-1, self.value_heads, self.value_dim).swapaxes(0, 1)


@partial(jax.tree_util.register_dataclass, data_fields=["first", "count", "num"], meta_fields=["rows"])
@dataclass(frozen=True)
class StateTiles:
    """Tiles of a step: up to `rows` consecutive rows of one slot.

    Attributes:
        first: [T] the first row of each tile.
        count: [T] its number of rows.
        num: number of tiles; what follows is padding.
    """

    first: jax.Array
    count: jax.Array
    num: jax.Array
    rows: int


class DeltaInputs(NamedTuple):
    """What the rows of a step bring.

    Attributes:
        mixed: [T, channels] queries, keys and values of all heads before the convolution.
        decay: [T, Hv] g, at most 0.
        beta: [T, Hv] from 0 to 1.
    """

    mixed: jax.Array
    decay: jax.Array
    beta: jax.Array


def make_state_tiles(slot: jax.Array, null_slot: int, rows: int = TILE_ROWS) -> StateTiles:
    """Tiles of the rows of a step, of which those of one slot follow each other; padding, at the end, has none."""
    size, index = slot.shape[0], jnp.arange(slot.shape[0])
    begins = jnp.concatenate([jnp.ones(1, jnp.bool_), slot[1:] != slot[:-1]])
    start = lax.cummax(jnp.where(begins, index, 0))
    rows = min(rows, size)
    valid = slot != null_slot
    is_first = valid & ((index - start) % rows == 0)
    num = jnp.sum(is_first)
    first = jnp.nonzero(is_first, size=size + 1, fill_value=0)[0]
    first = jnp.where(jnp.arange(size + 1) < num, first, jnp.sum(valid))
    return StateTiles(first[:-1], first[1:] - first[:-1], num, rows)


def delta_rule(
    inputs: DeltaInputs, conv: jax.Array, pages: KVPages, table: jax.Array, slot: jax.Array, position: jax.Array,
    tiles: StateTiles, shape: DeltaShape,
) -> tuple[jax.Array, KVPages]:
    """What each row reads of its sequence's state.

    Args:
        conv: [channels, W] weights of the convolution.
        table: [slots + 1, n] pages of each slot's state.
        slot, position: [T]; a sequence begins, with a state of zeros, at position 0.

    Returns:
        [T, Hv, dv] float32, and the pages with the new states. Rows of padding have any values.
    """
    rows, width = tiles.rows, conv.shape[1]
    num_rows, channels = inputs.mixed.shape
    tail_size = (width - 1) * channels
    state_shape = (shape.value_heads, shape.key_dim, shape.value_dim)
    size = tail_size + shape.value_heads * shape.key_dim * shape.value_dim
    padded = DeltaInputs(*(jnp.pad(part.astype(jnp.float32), ((0, rows), (0, 0))) for part in inputs))
    conv = conv.astype(jnp.float32)

    def compute(index: jax.Array, carry: tuple[jax.Array, KVPages]) -> tuple[jax.Array, KVPages]:
        y, pages = carry
        first, count = tiles.first[index], tiles.count[index]
        units = table[slot[first]]
        state = read_state(pages, units, size)
        state = jnp.where(position[first] == 0, 0, state)
        tail, matrix = state[:tail_size].reshape(width - 1, channels), state[tail_size:].reshape(state_shape)
        here = DeltaInputs(*(lax.dynamic_slice_in_dim(part, first, rows) for part in padded))
        found, tail, matrix = lax.cond(count == 1, partial(_one_row, shape=shape),
                                       partial(_chunk, count=count, shape=shape), here, conv, tail, matrix)
        pages = write_state(pages, units, jnp.concatenate([tail.reshape(-1), matrix.reshape(-1)]))
        # Rows past the tile's own are written again by the tiles that follow.
        return lax.dynamic_update_slice_in_dim(y, found, first, axis=0), pages

    y = jnp.zeros((num_rows + rows, shape.value_heads, shape.value_dim), jnp.float32)
    y, pages = lax.fori_loop(0, tiles.num, compute, (y, pages))
    return y[:num_rows], pages


def _one_row(
    here: DeltaInputs, conv: jax.Array, tail: jax.Array, state: jax.Array, *, shape: DeltaShape
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first row of a tile: y [C, Hv, dv], of which one row counts, the new tail and state."""
    seen = jnp.concatenate([tail, here.mixed[:1]])
    q, k, v = (part[:, 0] for part in shape.split(jax.nn.silu(jnp.sum(seen * conv.T, axis=0, keepdims=True))))
    state = state * jnp.exp(here.decay[0])[:, None, None]
    added = here.beta[0][:, None] * (v - jnp.sum(state * k[:, :, None], axis=1))
    state = state + k[:, :, None] * added[:, None, :]
    y = jnp.sum(state * q[:, :, None], axis=1)
    return jnp.pad(y[None], ((0, here.mixed.shape[0] - 1), (0, 0), (0, 0))), seen[1:], state


def _chunk(
    here: DeltaInputs, conv: jax.Array, tail: jax.Array, state: jax.Array, *, count: jax.Array, shape: DeltaShape
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first `count` rows of a tile, as `_one_row`."""
    rows, width = here.mixed.shape[0], conv.shape[1]
    # Rows past the tile's own belong to others, and must not be seen, not even times zero.
    mixed, decay, beta = (jnp.where((jnp.arange(rows) < count)[:, None], part, 0) for part in here)
    seen = jnp.concatenate([tail, mixed])
    q, k, v = shape.split(jax.nn.silu(sum(seen[at : at + rows] * conv[:, at] for at in range(width))))
    total = jnp.cumsum(decay, axis=0).T  # [Hv, C]
    beta, fade = beta.T[:, :, None], jnp.exp(total)[:, :, None]
    earlier = jnp.tri(rows, dtype=jnp.bool_)
    between = jnp.exp(jnp.where(earlier, total[:, :, None] - total[:, None, :], -jnp.inf))  # from column to row
    system = jnp.eye(rows) + jnp.tril(beta * between * _einsum("hck,hdk->hcd", k, k), -1)
    added = lax.linalg.triangular_solve(system, beta * (v - fade * _einsum("hck,hkv->hcv", k, state)), left_side=True,
                                        lower=True, unit_diagonal=True)
    y = fade * _einsum("hck,hkv->hcv", q, state) + _einsum(
        "hcd,hdv->hcv", between * _einsum("hck,hdk->hcd", q, k), added)
    state = fade[:, -1:] * state + _einsum("hck,hcv->hkv", k * jnp.exp(total[:, -1:] - total)[:, :, None], added)
    return y.swapaxes(0, 1), lax.dynamic_slice_in_dim(seen, count, width - 1), state


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)
