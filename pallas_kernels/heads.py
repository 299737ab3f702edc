"""Heads inside a larger array, as one product gives queries, keys and values: kernels read them where they are.

Axis letters: T tokens, H head dim.
"""

from dataclasses import dataclass
from functools import partial

import jax


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["first", "count"])
@dataclass(frozen=True)
class Heads:
    """`count` neighboring heads of an array [T, heads, H], from `first` on."""

    array: jax.Array
    first: int
    count: int

    @classmethod
    def of(cls, heads: "jax.Array | Heads") -> "Heads":
        """All heads of an array; Heads stay as they are."""
        return heads if isinstance(heads, Heads) else cls(heads, 0, heads.shape[1])

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.array.shape[0], self.count, self.array.shape[2]

    @property
    def is_whole(self) -> bool:
        """Whether the array has no other heads."""
        return self.count == self.array.shape[1]

    def apart(self) -> jax.Array:
        """[T, count, H], a copy unless they are the whole array."""
        return self.array[:, self.first : self.first + self.count]
