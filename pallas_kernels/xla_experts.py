"""A mixture of experts by XLA alone, for CPUs without a compiler: tile by tile, each of one expert's rows.

A pair is a token and one of the experts it is sent to. Pairs are ordered by expert, and a loop on the device, as long
as there are tiles, multiplies `ROWS` of them at a time with their expert's weights. An expert that nobody is sent to is
not read. `jax.lax.ragged_dot` would multiply every token with all experts.

Axis letters: T tokens, k experts of a token, n = T k pairs, E experts, D model, F mlp.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

ROWS = 16


def experts(
    x: jax.Array,  # [T, D]
    expert: jax.Array,  # [T, k] int32; E: sent nowhere
    weight: jax.Array,  # [T, k] float32
    gate_up: jax.Array,  # [E, D, 2 * F], gate before up
    down: jax.Array,  # [E, F, D]
    hidden: Callable[[jax.Array, jax.Array], jax.Array],
    bias: jax.Array | None = None,  # [E, 2 * F], of gate and up
) -> jax.Array:  # [T, D] float32
    """The weighted sum of hidden(x @ gate, x @ up) @ down over each token's experts."""
    pairs, top_k, count = expert.size, expert.shape[1], gate_up.shape[0]
    chosen = expert.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    rows_of = jnp.sum(chosen[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    first = jnp.cumsum(rows_of) - rows_of
    tiles_of = -(-rows_of // ROWS)
    last_tile = jnp.cumsum(tiles_of)

    def step(tile: jax.Array, result: jax.Array) -> jax.Array:
        number = jnp.sum(last_tile <= tile)
        begin = first[number] + (tile - last_tile[number] + tiles_of[number]) * ROWS
        row = begin + jnp.arange(ROWS)
        pair = jnp.where(row < first[number] + rows_of[number], order[jnp.minimum(row, pairs - 1)], pairs)
        inputs = x[jnp.minimum(pair, pairs - 1) // top_k]
        product = inputs @ gate_up[number]
        gate, up = jnp.split(product if bias is None else product + bias[number], 2, axis=1)
        return result.at[pair].set(hidden(gate, up) @ down[number], mode="drop", unique_indices=True)

    # What no tile writes is zero: pairs that are sent nowhere add nothing.
    rows = jax.lax.fori_loop(0, last_tile[-1], step, jnp.zeros((pairs, x.shape[1]), x.dtype))
    return jnp.sum(rows.reshape(*expert.shape, -1).astype(jnp.float32) * weight[..., None], axis=1)
