"""The page pools: their layout, their size in bytes, and copies of whole blocks. Axis 0 is always the block."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpaged.core.kv_groups import KVGroup, state_group
from jaxpaged.execution.sharding import pool_spec
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.transformer import Pools
from jaxpaged.pallas_kernels.kv_pages import KVPages, LatentPages, is_scaled
from jaxpaged.pallas_kernels.state_pages import units_for_state


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the pools of one model, one per strip of its `KVLayout`; the layout is that of `Pages`.

    Attributes:
        has_values: pages hold keys and values; else latents alone.
    """

    num_strips: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: jnp.dtype
    has_values: bool = True

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: jnp.dtype) -> "KVCacheSpec":
        return cls(config.kv_layout.num_strips, config.num_kv_heads, config.head_dim, block_size, jnp.dtype(dtype),
                   not config.has_latents)

    def groups(self, config: ModelConfig) -> tuple[KVGroup, ...]:
        """The KV groups of a model with these pools; that of states, if there is one, is the last."""
        layout, width = config.kv_layout, self.state_width(config)
        return (*layout.groups, state_group(width, layout.column_units)) if width else layout.groups

    def state_width(self, config: ModelConfig) -> int:
        """Units of the state of a sequence, in all layers; 0 for a model without."""
        if not config.states:
            return 0
        size = max(spec.state_size for spec in config.states)
        numbers = self.block_size * self.num_kv_heads * self.head_dim
        return config.kv_layout.state_slices * units_for_state(size, numbers, self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of one unit: keys, values and scales in all strips."""
        leaves = jax.tree.leaves(self.shapes(1))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def shapes(self, num_blocks: int) -> Pools:
        """Shapes of the pools, as the programs take them."""
        pool: Any = jax.ShapeDtypeStruct((num_blocks, self.block_size, self.num_kv_heads, self.head_dim), self.dtype)
        scale: Any = None
        if is_scaled(self.dtype):
            scale = jax.ShapeDtypeStruct((num_blocks, self.num_kv_heads, self.block_size), jnp.float32)
        pages = KVPages(pool, pool, scale, scale) if self.has_values else LatentPages(pool, scale)
        return (pages,) * self.num_strips

    def allocate(
        self, num_blocks: int, sharding: Callable[[PartitionSpec], jax.sharding.Sharding],
        settle: Callable[[jax.Array], None] = lambda pool: None,
    ) -> Pools:
        """Zeroed pools on their devices, made one by one; `settle` is called with each before the next is made."""
        def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            pool = jnp.zeros(leaf.shape, leaf.dtype, device=sharding(pool_spec(leaf)))
            settle(pool)
            return pool

        pools: Pools = jax.tree.map(zeros, self.shapes(num_blocks))
        return pools


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
