"""How the weights of products lie in memory: in the dtype of the activations, or as their checkpoint stores them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Stored types that weights keep in memory, where the native CPU kernels compute the products.
HALVES = ("bfloat16", "float16")
# Types of GGUF's blocks, and how many numbers along the depth a 32-bit word holds.
BLOCKS = {"Q4_0": 8, "Q4_1": 8, "Q8_0": 4}
BLOCK = 32  # numbers along the depth that share a scale
PANEL = 16  # columns that lie side by side


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
    def blocks(self) -> dict[str, str]:
        """The type of the blocks of each module that keeps them, by its path."""
        return {path: kind for path, kind in self.stored if kind in BLOCKS}

    @property
    def kept_dtypes(self) -> dict[str, np.dtype]:
        """The dtype of each parameter that stays in it, by its path."""
        found: dict[str, np.dtype] = {}
        for path, kind in self.stored:
            for name in WEIGHTS:
                found |= ({f"{path}.{name}": jnp.dtype(kind)} if kind in HALVES else
                          {f"{path}.{name}.{leaf}": dtype for leaf, dtype in PACKED_DTYPES.items()})
        return found

    def held(self, shapes: Mapping[Any, Any]) -> dict[Any, Any]:
        """Shapes of the parameters, each in the dtype that it is kept in."""
        kept = self.kept_dtypes

        def walk(tree: Mapping[Any, Any], path: tuple[str, ...]) -> dict[Any, Any]:
            return {key: walk(value, (*path, str(key))) if isinstance(value, Mapping) else
                    jax.ShapeDtypeStruct(value.shape, kept.get(".".join((*path, str(key))), value.dtype))
                    for key, value in tree.items()}

        return walk(shapes, ())

    def num_parameters(self, shapes: Mapping[Any, Any]) -> int:
        """The number of weights that parameters of these shapes hold."""
        def count(tree: Mapping[Any, Any], path: tuple[str, ...]) -> int:
            kind = self.blocks.get(".".join(path[:-1]))
            if kind is not None and path[-1] in WEIGHTS:
                return tree["q"].size // 4 * BLOCKS[kind]
            return sum(count(value, (*path, str(key))) if isinstance(value, Mapping) else value.size
                       for key, value in tree.items())

        return count(shapes, ())


WEIGHTS = ("kernel", "table")  # the parameters that hold a product's weights
PACKED_DTYPES: dict[str, np.dtype] = {"q": np.dtype(np.uint8), "d": np.dtype(np.float16), "m": np.dtype(np.float16)}

DENSE = QuantScheme()


def packed_shapes(kind: str, size_in: int, size_out: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of weights [in, out] in blocks of this type; native/packed_linear.cc says how they lie.

    q [out / 16, in / 8 or 4, 64] are words, d [out / 16, in / 32, 16] scales and, for Q4_1, m minimums.
    """
    panels, scales = size_out // PANEL, (size_out // PANEL, size_in // BLOCK, PANEL)
    shapes = {"q": (panels, size_in // BLOCKS[kind], 64), "d": scales} | ({"m": scales} if kind == "Q4_1" else {})
    return {name: jax.ShapeDtypeStruct(shape, PACKED_DTYPES[name]) for name, shape in shapes.items()}


def kept_as_stored(
    sources: Mapping[str, Sequence[str]], stored_type: Callable[[str], str], packable: Callable[[str], bool]
) -> QuantScheme:
    """The scheme that keeps what can be kept.

    Args:
        sources: the tensors that the weights at each module's path are made from.
        stored_type: of a tensor; see `Checkpoint.stored_type`.
        packable: whether blocks of the weights at a module's path can stay whole.
    """
    found = []
    for path, tensors in sources.items():
        kinds = {stored_type(name) for name in tensors}
        if len(kinds) == 1 and (kinds <= set(HALVES) or (kinds <= BLOCKS.keys() and packable(path))):
            found.append((path, kinds.pop()))
    return QuantScheme(tuple(sorted(found)))
