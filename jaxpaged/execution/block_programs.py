"""Programs that move whole blocks, in all layers at once: inside the pools, out of them, and into them.

`by_slices` moves block by block: XLA's CPU backend runs gathers and scatters of narrow floats in float32, for which it
copies the whole pool. On a GPU that would be a kernel per block and layer.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.models.transformer import Pools


def copy_blocks(pools: Pools, source: jax.Array, target: jax.Array, *, by_slices: bool) -> Pools:
    """Copy blocks `source` [n] to `target` [n]; all are read before any is written."""
    content = lax.optimization_barrier(gather_blocks(pools, source, by_slices=by_slices))
    return scatter_blocks(pools, content, target, by_slices=by_slices)


def gather_blocks(pools: Pools, source: jax.Array, *, by_slices: bool) -> Pools:
    """The content of blocks `source` [n], in a tree like the pools with n blocks."""
    def take(pool: jax.Array) -> jax.Array:
        if not by_slices:
            return pool[source]
        return jnp.concatenate([_block(pool, source[index]) for index in range(source.shape[0])])

    return jax.tree.map(take, pools)


def scatter_blocks(pools: Pools, content: Pools, target: jax.Array, *, by_slices: bool) -> Pools:
    """Write the content of n blocks to `target` [n]."""
    if not by_slices:
        return jax.tree.map(lambda pool, blocks: pool.at[target].set(blocks), pools, content)

    def write(index: jax.Array, pools: Pools) -> Pools:
        return jax.tree.map(
            lambda pool, blocks: lax.dynamic_update_slice_in_dim(pool, _block(blocks, index), target[index], axis=0),
            pools, content)

    return lax.fori_loop(0, target.shape[0], write, pools)


def _block(pool: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(pool, index, 1, axis=0)
