"""How the weights of products lie in memory: in the dtype of the activations, or as their checkpoint stores them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels.native_packed import PER_WORD

# Stored types that weights keep in memory, where the native CPU kernels compute the products.
HALVES = ("bfloat16", "float16")
# Types of GGUF's blocks among those that native products have, and the numbers of a block.
GGUF_BLOCKS = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
_HIGH_BITS = {"Q4_K": 0, "Q5_K": 1, "Q6_K": 2}  # of each number, those beyond four
BLOCK = 32  # groups of numbers along the depth that share a scale are a multiple of this
PANEL = 16  # columns that lie side by side


@dataclass(frozen=True, slots=True, order=True)
class PackedType:
    """A type of weights of 4 or 8 bits.

    Attributes:
        name: a key of `native_packed.PER_WORD`.
        group: inputs that share a scale, a multiple of `BLOCK`; 0: all, before it is known how many there are.
        zeros: each group has zero points, too.
        order: the groups are not runs of inputs: these are put into an order first. Equal texts are equal orders.
    """

    name: str
    group: int = BLOCK
    zeros: bool = False
    order: str = ""

    @property
    def per_word(self) -> int:
        """How many numbers along the depth a 32-bit word holds."""
        return PER_WORD[self.name]

    def split(self, depth: int) -> "PackedType | None":
        """The same for a shard of so many inputs, whose scales may be repeated; None if there is none."""
        if self.name in GGUF_BLOCKS:
            return None if depth % GGUF_BLOCKS[self.name] else self
        group = math.gcd(self.group, depth)
        return None if group % BLOCK else replace(self, group=group)

    def shapes(self, size_in: int, size_out: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of weights [in, out]; native/packed_types.h says how they lie.

        q [out / 16, in / per word, 64] are words, d [out / 16, G, 16] scales of G groups, m of the same shape minimums
        or zero points, order [in] which input each row of the weights multiplies. s and h are of GGUF's blocks of 256.
        """
        if self.name in _HIGH_BITS:
            return self._super_shapes(size_in, size_out)
        panels, groups = size_out // PANEL, (size_out // PANEL, size_in // self.group, PANEL)
        found: dict[str, tuple[tuple[int, ...], Any]] = {
            "q": ((panels, size_in // self.per_word, 64), np.uint8),
            "d": (groups, _SCALE_DTYPES.get(self.name.rpartition("_")[2], np.float16))}
        if self.zeros or self.name == "Q4_1":
            found["m"] = groups, np.uint8 if self.zeros else np.float16
        if self.order:
            found["order"] = (size_in,), np.int32
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in found.items()}


    def _super_shapes(self, size_in: int, size_out: int) -> dict[str, jax.ShapeDtypeStruct]:
        panels, blocks, high = size_out // PANEL, size_in // BLOCK, _HIGH_BITS[self.name]
        minimums = high < 2
        found: dict[str, tuple[tuple[int, ...], Any]] = {
            "q": ((panels, 4 * blocks, 64), np.uint8), "d": ((panels, blocks * (2 - minimums), PANEL), np.uint8)}
        if minimums:
            found["m"] = (panels, blocks, PANEL), np.uint8
        found["s"] = (panels, size_in // 256, PANEL * (1 + minimums)), np.float16
        if high:
            found["h"] = (panels, blocks * high, 64), np.uint8
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in found.items()}


StoredType = str | PackedType  # a dtype's name, or another that the format has, or a type that may stay packed

_SCALE_DTYPES: dict[str, Any] = {"F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32}
# The arrays of `PackedType.shapes`.
LEAVES = ("q", "d", "m", "s", "h", "order")
WEIGHTS = ("kernel", "table")  # the parameters that hold a product's weights


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """The stored type of the weights of each product that keeps it, by the module's path, such as layers.0.attn.qkv.

    Results are those of the same weights in float32. Weights of other modules lie in the dtype of the activations.
    """

    stored: tuple[tuple[str, StoredType], ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The names of all stored types."""
        return tuple(sorted({kind.name if isinstance(kind, PackedType) else kind for _, kind in self.stored}))

    @property
    def packed(self) -> dict[str, PackedType]:
        """The type of each module's weights that stay packed, by its path."""
        return {path: kind for path, kind in self.stored if isinstance(kind, PackedType)}

    @property
    def kept_dtypes(self) -> dict[str, np.dtype]:
        """The dtype of each parameter that stays in it, by its path."""
        found: dict[str, np.dtype] = {}
        for path, kind in self.stored:
            for name in WEIGHTS:
                found |= ({f"{path}.{name}.{leaf}": shape.dtype for leaf, shape in kind.shapes(BLOCK, PANEL).items()}
                          if isinstance(kind, PackedType) else {f"{path}.{name}": jnp.dtype(kind)})
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
        packed = self.packed

        def count(tree: Mapping[Any, Any], path: tuple[str, ...]) -> int:
            kind = packed.get(".".join(path[:-1]))
            if kind is not None and path[-1] in WEIGHTS:
                return int(tree["q"].size) // 4 * kind.per_word
            return sum(count(value, (*path, str(key))) if isinstance(value, Mapping) else value.size
                       for key, value in tree.items())

        return count(shapes, ())


DENSE = QuantScheme()


def kept_as_stored(
    sources: Mapping[str, Sequence[str]], stored_type: Callable[[str], StoredType],
    packable: Callable[[str, PackedType], PackedType | None],
) -> QuantScheme:
    """The scheme that keeps what can be kept.

    Args:
        sources: the tensors that the weights at each module's path are made from.
        stored_type: of a tensor; see `Checkpoint.stored_type`.
        packable: of weights at a module's path, and of their type, the type in which the devices' shards stay packed.
    """
    found: list[tuple[str, StoredType]] = []
    for path, tensors in sources.items():
        kinds = {stored_type(name) for name in tensors}
        kind = kinds.pop() if len(kinds) == 1 else ""
        if isinstance(kind, PackedType):
            kept = packable(path, kind)
            if kept is not None:
                # Which order it is matters to no program.
                found.append((path, replace(kept, order="own" if kept.order else "")))
        elif kind in HALVES:
            found.append((path, kind))
    return QuantScheme(tuple(sorted(found, key=lambda item: item[0])))
