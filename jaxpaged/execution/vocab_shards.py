"""Sums and maxima over a vocabulary that is sharded over devices.

Each device has a run of neighboring columns of an array [B, V]. One or a few numbers per row cross between devices,
under a name that the compiled program keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True)
class VocabShards:
    """How [B, V] is sharded.

    Attributes:
        axis: the mesh axes that shard it; None for one device, where nothing here costs anything.
        count: the number of devices.
    """

    axis: tuple[str, ...] | None = None
    count: int = 1

    def size(self, part: jax.Array) -> int:
        """V, of a device's part [B, V / count]."""
        return part.shape[1] * self.count

    def first(self, part: jax.Array) -> jax.Array | int:
        """Index in the whole vocabulary of a part's first column."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * part.shape[1]

    def index(self, part: jax.Array) -> jax.Array:
        """Index in the whole vocabulary of each element of a part, int32 of its shape."""
        return lax.broadcasted_iota(jnp.int32, part.shape, 1) + self.first(part)

    def column(self, part: jax.Array, ids: jax.Array) -> jax.Array:
        """Columns of a part that these ids have; those of other devices lie beyond its end."""
        if self.axis is None:
            return ids
        column = ids - self.first(part)
        return jnp.where((column >= 0) & (column < part.shape[1]), column, part.shape[1])

    def sum(self, name: str, part: jax.Array) -> jax.Array:
        """Sum over the devices, [B] or [B, few]."""
        return self._over(name, lax.psum, part)

    def max(self, name: str, part: jax.Array) -> jax.Array:
        """Maximum over the devices."""
        return self._over(name, lax.pmax, part)

    def min(self, name: str, part: jax.Array) -> jax.Array:
        """Minimum over the devices."""
        return self._over(name, lax.pmin, part)

    def gather(self, name: str, part: jax.Array) -> jax.Array:
        """[B, few] of each device, side by side."""
        return self._over(name, partial(lax.all_gather, axis=1, tiled=True), part)

    def hide_padding(self, logits: jax.Array, size: int) -> jax.Array:
        """The logits with padding, the columns from `size` on, as minus infinity."""
        if self.size(logits) == size:
            return logits
        return jnp.where(self.index(logits) < size, logits, -jnp.inf)

    def _over(self, name: str, reduce: Callable[..., jax.Array], part: jax.Array) -> jax.Array:
        if self.axis is None:
            return part
        with jax.named_scope(f"sampler_{name}"):
            return reduce(part, self.axis)


ONE_SHARD = VocabShards()
