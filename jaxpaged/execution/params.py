"""Weights as nested dicts of arrays: compared with what is wanted, and put on their devices."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.core.errors import ConfigError
from jaxpaged.execution.sharding import Placement
from jaxpaged.execution.step_functions import Params
from jaxpaged.models.param_layout import ParamAxes

_MAX_DIFFERENCES = 8  # that an error lists


def plain_tree(params: Mapping[Any, Any]) -> Params:
    """Nested dicts whose keys of layers are integers.

    Args:
        params: such dicts, an `nnx.State`, or either with the keys of layers as text, as checkpoints restore them.
    """
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {int(key) if isinstance(key, str) and key.isdecimal() else key:
            plain_tree(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def leaf_names(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name, such as layers.0.mlp.down.kernel."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaf_names(value, (*path, key))
        else:
            yield ".".join(map(str, (*path, key))), value


def check_params(params: Params, *wanted: Params, what: str, hint: str = "", but_dtypes: bool = False) -> None:
    """Check that weights have the tree, the shapes and the dtypes of one of some others.

    Args:
        what: how errors call them.
        hint: what errors say besides.
        but_dtypes: any dtype will do.

    Raises:
        ConfigError: with what differs from the first of those.
    """
    differences = [_differences(params, other, but_dtypes) for other in wanted]
    if not all(differences):
        return
    first = differences[0]
    more = len(first) - _MAX_DIFFERENCES
    listed = [*first[:_MAX_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])]
    raise ConfigError("\n  ".join([f"{what} differ from the model's{hint}:", *listed]))


def part_of(tree: Mapping[Any, Any], params: Mapping[Any, Any]) -> Params:
    """A tree cut to the keys of another one; keys that only that one has are left out."""
    both = {key: (tree[key], value) for key, value in params.items() if key in tree}
    return {key: part_of(*pair) if all(isinstance(item, Mapping) for item in pair) else pair[0]
            for key, pair in both.items()}


def merged(tree: Mapping[Any, Any], params: Mapping[Any, Any]) -> Params:
    """A tree with some leaves replaced."""
    return {**tree, **{key: merged(tree[key], value) if isinstance(value, Mapping) else value
                       for key, value in params.items()}}


def bytes_moved(before: Mapping[tuple[int, int], int], params: Params) -> int:
    """Bytes of the shards of some arrays that are not where others were, whose `addresses` are given."""
    return sum(size for address, size in addresses(params).items() if address not in before)


def addresses(params: Params) -> dict[tuple[int, int], int]:
    """The bytes of every shard, by its device and address."""
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
            for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) for shard in leaf.addressable_shards}


def _differences(params: Params, wanted: Params, but_dtypes: bool) -> list[str]:
    given, needed = dict(leaf_names(params)), dict(leaf_names(wanted))
    found = [f"{name} is missing" for name in needed.keys() - given.keys()]
    found += [f"{name} is not a weight of the model" for name in given.keys() - needed.keys()]
    for name in needed.keys() & given.keys():
        leaf, other = given[name], needed[name]
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            found.append(f"{name} is a {type(leaf).__name__}, not an array")
        elif tuple(leaf.shape) != tuple(other.shape):
            found.append(f"{name} has the shape {tuple(leaf.shape)} instead of {tuple(other.shape)}")
        elif not but_dtypes and jnp.dtype(leaf.dtype) != other.dtype:
            found.append(f"{name} has the dtype {leaf.dtype} instead of {other.dtype}")
        elif isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            found.append(f"{name} has been deleted, or donated elsewhere")
    return sorted(found)


def placed(
    params: Mapping[Any, Any], shapes: Params, axes: Params, placement: Placement, *, donate: bool = False
) -> Params:
    """Weights on their devices; those already there stay, host arrays are copied.

    Args:
        params: each as stored, or as the devices hold it.
        shapes: shape and sharding of each, in a tree like `params`; padding for the mesh is zeros.
        axes: of each.
        donate: arrays that have to be moved are freed.
    """
    def place(leaf: Any, shape: Any, names: ParamAxes) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.shape == shape.shape:
            found = jax.device_put(leaf, shape.sharding)
        elif placement.mesh is None:
            # On CPU JAX would use the numpy array's memory, and its owner may still write to it.
            found = jax.device_put(np.array(leaf), shape.sharding)
        else:
            found = placement.put(np.asarray(leaf), shape, names)
        if donate and isinstance(leaf, jax.Array) and not set(addresses({0: found})) & set(addresses({0: leaf})):
            leaf.delete()
        return found

    return dict(jax.tree.map(place, params, shapes, axes))
