"""How a model is spread over devices: one mesh, and one table from the weights' logical axes to the mesh's.

The mesh has two axes. Devices along "kv" hold different KV heads; devices along "share" hold the same ones, and split
their query heads. Everything else that is sharded is sharded over both. With as many KV heads as devices, or more,
"share" has size 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpaged.core.errors import ConfigError
from jaxpaged.execution.vocab_shards import VocabShards
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.param_layout import FusedAxis, ParamAxes, put_sharded
from jaxpaged.models.weight_rules import WeightRule, with_packed

KV, SHARE = "kv", "share"
TENSOR = (KV, SHARE)
REPLICATED = PartitionSpec()
LOGITS = PartitionSpec(None, TENSOR)  # [B, V]

MESH_AXES: dict[str, tuple[str, ...]] = {
    "heads": TENSOR,
    "kv_heads": (KV,),
    "mlp": TENSOR,
    "shared_mlp": TENSOR,
    "vocab": TENSOR,
    "state_keys": TENSOR,
    "state_values": TENSOR,
    "state_heads": TENSOR,
    "experts": (),
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

    def shards(self, axis: str | FusedAxis | None) -> int:
        """The number of shards of a logical axis."""
        if isinstance(axis, FusedAxis):
            return axis.devices
        sizes = {KV: self.kv, SHARE: self.share}
        return math.prod(sizes[name] for name in MESH_AXES[axis]) if axis else 1


def possible_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of devices that divide the attention heads evenly; with recurrent states, KV and state heads too."""
    kv_heads, heads = config.num_kv_heads, {spec.num_heads for spec in config.attention}
    # Devices that hold the same KV heads would have to hold different states in the same pages.
    heads |= {count for spec in config.states for count in (spec.key_heads, spec.value_heads, kv_heads)}
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

    layers = tuple(replace(layer, mlp=layer.mlp.padded(up)) for layer in config.layers)
    return config.replace(vocab_size=up(config.vocab_size), layers=layers)


def axes_tree(
    shapes: Mapping[Any, Any], rules: Sequence[WeightRule], config: ModelConfig, partition: Partition
) -> dict[Any, Any]:
    """The axes of every parameter, in a tree like `shapes`; a parameter without a rule is replicated."""
    table = {rule.path: rule for rule in with_packed(rules)}

    def walk(tree: Mapping[Any, Any], path: tuple[Any, ...]) -> dict[Any, Any]:
        return {key: walk(value, (*path, key)) if isinstance(value, Mapping) else find((*path, key))
                for key, value in tree.items()}

    def find(path: tuple[Any, ...]) -> ParamAxes:
        rule = table.get(".".join("{i}" if _is_number(key) else str(key) for key in path))
        layer = next((int(key) for key in path if _is_number(key)), 0)
        return () if rule is None else tuple(
            _fused(name, rule.fused_sizes(config, layer), partition) if isinstance(name, tuple) else name
            for name in rule.axes)

    return walk(shapes, ())


def held_shapes(stored: Mapping[Any, Any], axes: Mapping[Any, Any], partition: Partition) -> dict[Any, Any]:
    """The parameters' shapes as the devices hold them, together."""
    def held(leaf: Any, names: ParamAxes) -> jax.ShapeDtypeStruct:
        shape: list[int] = []
        for axis, size in enumerate(leaf.shape):
            name = names[axis] if axis < len(names) else None
            shards = partition.shards(name)
            shape += [shards, name.width] if isinstance(name, FusedAxis) else [-(-size // shards) * shards]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return dict(jax.tree.map(held, stored, axes))


def shard_bytes(shapes: Mapping[Any, Any], axes: Mapping[Any, Any], partition: Partition) -> int:
    """Bytes of the parameters that each device holds."""
    return sum(jax.tree.leaves(jax.tree.map(
        lambda leaf, names: leaf.size * leaf.dtype.itemsize // math.prod(map(partition.shards, names)), shapes, axes)))


def spec_of(axes: ParamAxes) -> PartitionSpec:
    """Where the mesh cuts an array with these axes."""
    return PartitionSpec(*(entry for name in axes for entry in (
        (TENSOR, None) if isinstance(name, FusedAxis) else (MESH_AXES[name] or None if name else None,))))


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

    def put(self, array: np.ndarray, wanted: Any, axes: ParamAxes = ()) -> jax.Array:
        """A host array on its devices, each with its own shard only.

        Args:
            wanted: shape and sharding; zeros fill the array up to that shape.
            axes: of a parameter.
        """
        return jax.device_put(array, wanted.sharding) if self.mesh is None else put_sharded(array, wanted, axes)

    def spread(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` as each device runs it on its own shards; on one device, `function` itself."""
        if self.mesh is None:
            return function
        # JAX's check of replication cannot see through custom calls; the tests compare devices instead.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _fused(names: tuple[str, ...], sizes: tuple[int, ...], partition: Partition) -> FusedAxis | None:
    """On one device there is nothing to share out."""
    return FusedAxis(sizes, tuple(map(partition.shards, names)), partition.size) if partition.size > 1 else None


def _is_number(key: object) -> bool:
    return str(key).isdigit()
