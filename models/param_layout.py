"""Where the numbers of a parameter lie on its devices, which may hold more than the checkpoint has, in another order.

An axis with a logical name is rounded up to what the devices divide; the rest is zeros. A fused axis becomes two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import numpy as np

Part = tuple[slice, ...]  # of an array, from start to stop on each axis


@dataclass(frozen=True, slots=True)
class FusedAxis:
    """Several parameters along one axis, as stored one after the other.

    A device holds its shard of each, one after the other, so that one product gives all of them. On devices the axis
    is two, [devices, width]: no array in one order can be taken for one in the other.

    Attributes:
        sizes: of each as stored.
        shards: the number of different shards of each; neighbouring devices hold the same one.
    """

    sizes: tuple[int, ...]
    shards: tuple[int, ...]
    devices: int

    @property
    def width(self) -> int:
        """Of a device's shard."""
        return sum(-(-size // shards) for size, shards in zip(self.sizes, self.shards, strict=True))

    def sources(self, device: int) -> Iterator[tuple[slice, slice]]:
        """What a device's shard is copied from: where in the shard, and where in the axis as stored."""
        to = first = 0
        for size, shards in zip(self.sizes, self.shards, strict=True):
            width = -(-size // shards)
            start = min(device * shards // self.devices * width, size)
            stop = min(start + width, size)
            yield slice(to, to + stop - start), slice(first + start, first + stop)
            to, first = to + width, first + size


ParamAxes = tuple[str | FusedAxis | None, ...]  # logical names of a parameter's axes; None, or left out: whole


def shard_sources(part: Part, shape: tuple[int, ...], axes: ParamAxes) -> Iterator[tuple[tuple[Any, ...], Part]]:
    """What a shard is copied from: index into the shard, and part of the parameter as stored. The rest is zeros.

    Args:
        part: the shard, of the array on all devices.
        shape: as stored.
    """
    bounds = iter(part)
    choices: list[list[tuple[tuple[Any, ...], slice]]] = []
    for axis, size in enumerate(shape):
        name, item = axes[axis] if axis < len(axes) else None, next(bounds)
        if isinstance(name, FusedAxis):
            assert item.stop - item.start == 1, f"devices {item} in one shard"
            assert sum(name.sizes) == size, f"parts of {name.sizes} in an axis of {size}"
            next(bounds)
            choices.append([((0, to), source) for to, source in name.sources(item.start)])
        else:
            inside = slice(min(item.start, size), min(item.stop, size))
            choices.append([((slice(inside.stop - inside.start),), inside)])
    for chosen in product(*choices):
        # The dots make it a view, of scalars too.
        yield (*(entry for index, _ in chosen for entry in index), ...), tuple(source for _, source in chosen)


def put_sharded(array: np.ndarray, wanted: Any, axes: ParamAxes) -> jax.Array:
    """A host array on its devices, each with its own shard only.

    Args:
        array: as stored, or as the devices hold it.
        wanted: shape and sharding on the devices.
    """
    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        part = tuple(slice(*item.indices(size)[:2]) for item, size in zip(index, wanted.shape, strict=True))
        found = np.zeros([item.stop - item.start for item in part], array.dtype)
        for inside, source in shard_sources(part, array.shape, () if array.shape == wanted.shape else axes):
            found[inside] = array[source]
        return found

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)
