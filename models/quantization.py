"""How the weights of products lie in memory: in the dtype of the activations, or as their checkpoint stores them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Stored types that weights keep in memory, where the native CPU kernels compute the products.
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """The stored type of the weights of each product that keeps it, by the module's path, such as layers.0.attn.qkv.

    Results are those of the same weights in float32. Weights of other modules lie in the dtype of the activations.
    """

    stored: tuple[tuple[str, str], ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """All stored types."""
        return tuple(sorted({kind for _, kind in self.stored}))

    @property
    def kept_dtypes(self) -> dict[str, np.dtype]:
        """The dtype of each parameter that stays in it, by its path."""
        return {f"{path}.{name}": jnp.dtype(kind) for path, kind in self.stored for name in WEIGHTS}

    def held(self, shapes: Mapping[Any, Any]) -> dict[Any, Any]:
        """Shapes of the parameters, each in the dtype that it is kept in."""
        kept = self.kept_dtypes

        def walk(tree: Mapping[Any, Any], path: tuple[str, ...]) -> dict[Any, Any]:
            return {key: walk(value, (*path, str(key))) if isinstance(value, Mapping) else
                    jax.ShapeDtypeStruct(value.shape, kept.get(".".join((*path, str(key))), value.dtype))
                    for key, value in tree.items()}

        return walk(shapes, ())


WEIGHTS = ("kernel", "table")  # the parameters that hold a product's weights

DENSE = QuantScheme()


def kept_as_stored(sources: Mapping[str, Sequence[str]], stored_type: Callable[[str], str]) -> QuantScheme:
    """The scheme that keeps what can be kept.

    Args:
        sources: the tensors that the weights at each module's path are made from.
        stored_type: of a tensor; see `Checkpoint.stored_type`.
    """
    found = []
    for path, tensors in sources.items():
        kinds = {stored_type(name) for name in tensors}
        if len(kinds) == 1 and kinds <= set(HALVES):
            found.append((path, kinds.pop()))
    return QuantScheme(tuple(sorted(found)))
