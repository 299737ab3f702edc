"""The best tokens of each row without a sort, for log probabilities and their alternatives.

One program per (row, run of columns) holds its run in registers and removes the largest, `count` times. The
results of a row's runs are cut into runs again, until one is left. Ties are in index order, as with `lax.top_k`.

Axis letters: B rows, V columns, C runs of a row, N best of each.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import GpuTarget, launch, load
from jaxpaged.pallas_kernels.tiles import TOP_TOKENS

_TAKEN = -(2**31)  # below every number that a float becomes


def top_tokens(
    logits: jax.Array,  # [B, V] float32
    count: int,
    wanted: jax.Array,  # [B] bool; other rows are arbitrary
    *,
    target: GpuTarget,
) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row in order, and their columns: [B, count] float32 and int32."""
    rows, vocab = logits.shape
    assert count <= vocab and wanted.shape == (rows,), (logits.shape, count, wanted.shape)
    tiles = TOP_TOKENS[target.generation]
    block = max(tiles.block, 1 << (2 * count - 1).bit_length())  # each pass leaves at most half
    values, ids = logits, None
    flags = wanted.astype(jnp.int32)
    while True:
        width = values.shape[1]
        runs = -(-width // block)
        shape = (rows, runs, count)
        values, ids = launch(
            partial(_kernel, block=min(block, max(16, 1 << (width - 1).bit_length()))),
            values, ids, flags,
            name="top_tokens",
            grid=(rows, runs),
            out_shape=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
            num_warps=tiles.num_warps,
            interpret=target.interpret,
        )
        values, ids = values.reshape(rows, -1), ids.reshape(rows, -1)
        if runs == 1:
            return values, ids


def _kernel(
    values_ref: Any,  # [B, V]
    ids_ref: Any,  # [B, V], or None where a column is its own id
    wanted_ref: Any,  # [B]
    best_ref: Any,  # [B, C, N]
    best_ids_ref: Any,  # [B, C, N]
    *,
    block: int,
) -> None:
    row, run = pl.program_id(0), pl.program_id(1)
    lanes = jnp.arange(block)
    column = run * block + lanes
    valid = column < values_ref.shape[1]
    values = load(values_ref.at[row, column], valid, -jnp.inf)
    order = jnp.where(valid, _ordered(lax.bitcast_convert_type(values, jnp.int32)), _TAKEN)

    def take_best(index: jax.Array, order: jax.Array) -> jax.Array:
        best = jnp.max(order)
        lane = jnp.min(jnp.where(order == best, lanes, block - 1))
        value = lax.bitcast_convert_type(_ordered(best), jnp.float32)
        # A run may have fewer than `count`; it is then the last one of its row.
        best_ref[row, run, index] = jnp.where(best == _TAKEN, -jnp.inf, value)
        index_in_row = run * block + lane
        best_ids_ref[row, run, index] = index_in_row if ids_ref is None else \
            load(ids_ref.at[row, jnp.minimum(index_in_row, values_ref.shape[1] - 1)])
        return jnp.where(lanes == lane, _TAKEN, order)

    trips = jnp.where(wanted_ref[row] != 0, jnp.int32(best_ref.shape[2]), jnp.int32(0))
    lax.fori_loop(0, trips, take_best, order)


def _ordered(bits: jax.Array) -> jax.Array:
    """int32 numbers in the order of the floats whose bits they are; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
