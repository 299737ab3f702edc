"""How a model is spread over devices: one mesh, and one table from the weights' logical axes to the mesh's.

The mesh has two axes. Devices along "kv" hold different KV heads; devices along "share" hold the same ones, and split
their query heads. Everything else that is sharded is sharded over both. With as many KV heads as devices, or more,
"share" has size 1.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpaged.core.errors import ConfigError
from jaxpaged.execution.vocab_shards import VocabShards
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.weight_rules import Axes, WeightRule

KV, SHARE = "kv", "share"
TENSOR = (KV, SHARE)
REPLICATED = PartitionSpec()
LOGITS = PartitionSpec(None, TENSOR)  # [B, V]

MESH_AXES: dict[str, tuple[str, ...]] = {
    "heads": TENSOR,
    "kv_heads": (KV,),
    "mlp": TENSOR,
    "vocab": TENSOR,
}


@dataclass(frozen=True, slots=True)
class Partition:
    """Sizes of the mesh's axes."""

    kv: int = 1
    share: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.kv * self.share

    def shards(self, axis: str | None) -> int:
        """The number of shards of a logical axis."""
        sizes = {KV: self.kv, SHARE: self.share}
        return math.prod(sizes[name] for name in MESH_AXES[axis]) if axis else 1


def possible_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of devices that divide the attention heads evenly."""
    kv_heads, heads = config.num_kv_heads, {spec.num_heads for spec in config.attention}
    return tuple(size for size in range(1, max(heads) + 1)
                 if not any(count % size for count in heads) and (kv_heads % size == 0 or size % kv_heads == 0))


def partition_of(config: ModelConfig, size: int) -> Partition:
    """Partition the model over `size` devices.

    Raises:
        ConfigError: the heads cannot be divided evenly; the text lists the sizes that work.
    """
    sizes = possible_sizes(config)
    if size not in sizes:
        heads = " or ".join(map(str, sorted({spec.num_heads for spec in config.attention})))
        raise ConfigError(
            f"--tensor-parallel-size {size} does not fit {heads} attention heads and {config.num_kv_heads} "
            f"KV heads; use one of {', '.join(map(str, sizes))}")
    kv = min(size, config.num_kv_heads)
    return Partition(kv, size // kv)


def padded(config: ModelConfig, partition: Partition) -> ModelConfig:
    """The config with the vocabulary and the MLP rounded up to what divides; the padding is zeros."""
    def up(count: int) -> int:
        return -(-count // partition.size) * partition.size

    layers = tuple(replace(layer, mlp=replace(layer.mlp, dim=up(layer.mlp.dim))) for layer in config.layers)
    return config.replace(vocab_size=up(config.vocab_size), layers=layers)


def axes_tree(shapes: Mapping[Any, Any], rules: Sequence[WeightRule]) -> dict[Any, Any]:
    """Logical axes of every parameter, in a tree like `shapes`; a parameter without a rule is replicated."""
    table = {rule.path: rule.axes for rule in rules}

    def walk(tree: Mapping[Any, Any], path: tuple[str, ...]) -> dict[Any, Any]:
        return {
            key: walk(value, (*path, _generic(key))) if isinstance(value, Mapping)
            else table.get(".".join((*path, _generic(key))), ())
            for key, value in tree.items()
        }

    return walk(shapes, ())


def shard_bytes(shapes: Mapping[Any, Any], axes: Mapping[Any, Any], partition: Partition) -> int:
    """Bytes of the parameters that each device holds."""
    return sum(
        leaf.size * leaf.dtype.itemsize // math.prod(partition.shards(name) for name in names)
        for leaf, names in _pairs(shapes, axes)
    )


def spec_of(axes: Axes) -> PartitionSpec:
    """Where the mesh cuts an array with these logical axes."""
    return PartitionSpec(*(MESH_AXES[name] if name else None for name in axes))


def spec_tree(axes: Mapping[Any, Any]) -> dict[Any, Any]:
    """`spec_of` for a tree."""
    return {key: spec_tree(value) if isinstance(value, Mapping) else spec_of(value) for key, value in axes.items()}


def pool_spec(leaf: Any) -> PartitionSpec:
    """Where the mesh cuts a pool [P, S, K, H], or its scales [P, K, S]."""
    return PartitionSpec(None, None, KV, None) if len(leaf.shape) == 4 else PartitionSpec(None, KV, None)


@dataclass(frozen=True)
class Placement:
    """The devices that a model runs on. One device needs no mesh: its programs are plain ones.

    Attributes:
        devices: in the mesh's order.
        partition: how they share the model.
        mesh: None for one device.
    """

    devices: tuple[jax.Device, ...]
    partition: Partition
    mesh: Mesh | None

    @classmethod
    def of(cls, devices: Sequence[jax.Device], partition: Partition) -> "Placement":
        assert len(devices) == partition.size, f"{len(devices)} devices for a partition of {partition.size}"
        grid = np.array(devices, dtype=object).reshape(partition.kv, partition.share)
        return cls(tuple(devices), partition, Mesh(grid, TENSOR) if len(devices) > 1 else None)

    @property
    def axis(self) -> tuple[str, ...] | None:
        """The mesh axes that the model's sums run over inside a program; None on one device."""
        return TENSOR if self.mesh else None

    @property
    def vocab_shards(self) -> VocabShards:
        """How the logits are sharded over the devices."""
        return VocabShards(self.axis, self.partition.size)

    def sharding(self, spec: PartitionSpec = REPLICATED) -> jax.sharding.Sharding:
        return NamedSharding(self.mesh, spec) if self.mesh else SingleDeviceSharding(self.devices[0])

    def put(self, array: np.ndarray, wanted: Any) -> jax.Array:
        """A host array on its devices, each with its own shard only.

        Args:
            wanted: shape and sharding; zeros fill the array up to that shape.
        """
        if self.mesh is None:
            return jax.device_put(array, wanted.sharding)

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            found: np.ndarray = array[index]
            missing = [(0, len(range(*part.indices(size))) - have)
                       for part, size, have in zip(index, wanted.shape, found.shape, strict=True)]
            return np.pad(found, missing) if any(after for _, after in missing) else found

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)

    def spread(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` as each device runs it on its own shards; on one device, `function` itself."""
        if self.mesh is None:
            return function
        # JAX's check of replication cannot see through custom calls; the tests compare devices instead.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _generic(key: object) -> str:
    return "{i}" if isinstance(key, int) or str(key).isdigit() else str(key)


def _pairs(shapes: Mapping[Any, Any], axes: Mapping[Any, Any]) -> Iterator[tuple[Any, Axes]]:
    for key, value in shapes.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, axes[key])
        else:
            yield value, axes[key]
