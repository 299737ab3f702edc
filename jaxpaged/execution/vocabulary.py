"""Sums and maxima over a vocabulary that devices share out.

Each device has a run of neighbouring columns of an array [B, V]. What crosses between devices is one number per row, or
few, under a name that the compiled program keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How [B, V] is cut.

    Attributes:
        axis: the mesh axes that share it; None where one device has it all, and nothing here costs anything.
        shards: their size.
    """

    axis: tuple[str, ...] | None = None
    shards: int = 1

    def size(self, part: jax.Array) -> int:
        """V, of a device's part [B, V / shards]."""
        return part.shape[1] * self.shards

    def index(self, part: jax.Array) -> jax.Array:
        """Index in the whole vocabulary of each element of a part, int32 of its shape."""
        index = lax.broadcasted_iota(jnp.int32, part.shape, 1)
        return index if self.axis is None else index + lax.axis_index(self.axis) * part.shape[1]

    def sum(self, name: str, part: jax.Array) -> jax.Array:
        """Sum of what each device has found, [B] or [B, few]."""
        return self._over(name, lax.psum, part)

    def max(self, name: str, part: jax.Array) -> jax.Array:
        """Largest of what each device has found."""
        return self._over(name, lax.pmax, part)

    def min(self, name: str, part: jax.Array) -> jax.Array:
        """Smallest of what each device has found."""
        return self._over(name, lax.pmin, part)

    def hide_padding(self, logits: jax.Array, size: int) -> jax.Array:
        """Logits of the columns from `size` on, which stand for no token, as minus infinity."""
        if self.size(logits) == size:
            return logits
        return jnp.where(self.index(logits) < size, logits, -jnp.inf)

    def _over(self, name: str, reduce: Callable[..., jax.Array], part: jax.Array) -> jax.Array:
        if self.axis is None:
            return part
        with jax.named_scope(f"sampler_{name}"):
            return reduce(part, self.axis)


WHOLE = Vocabulary()
