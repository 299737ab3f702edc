"""Which devices an engine in the caller's process runs on: those given, those of its weights, or JAX's own choice."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.engine.in_memory import InMemoryModel


def choose_devices(
    config: EngineConfig, devices: Sequence[jax.Device] | None, mesh: jax.sharding.Mesh | None,
    in_memory: InMemoryModel | None,
) -> tuple[EngineConfig, tuple[jax.Device, ...] | None]:
    """The devices, or None where `select_device` chooses; and the configuration with their number.

    Args:
        devices, mesh: what the caller has given; a mesh of any axes stands for its devices in their order.
        in_memory: without a choice of the caller, its arrays stay where they are.

    Raises:
        ConfigError: both are given, or their number contradicts `tensor_parallel_size`.
    """
    if mesh is not None and devices is not None:
        raise ConfigError("give devices or mesh, not both")
    size = config.tensor_parallel_size
    given = tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else devices
    if mesh is not None and given is None:
        raise ConfigError("mesh must be a jax.sharding.Mesh")
    if given is not None:
        chosen = tuple(given)
        if size not in (1, len(chosen)):
            raise ConfigError(f"tensor_parallel_size={size} needs {size} devices, and {len(chosen)} were given")
        return replace(config, tensor_parallel_size=max(len(chosen), 1)), chosen
    found = _devices_of(in_memory.params) if in_memory else []
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if not found and isinstance(default, jax.Device):
        found = [default]
    if not found or config.device not in ("auto", "cpu" if found[0].platform == "cpu" else "cuda"):
        return config, None
    found += [device for device in found[0].client.local_devices() if device not in found]
    return config, tuple(found[:size]) if len(found) >= size else None


def bytes_on(device: jax.Device, params: Any) -> int:
    """Bytes of arrays that lie on a device already."""
    arrays = [leaf for leaf in jax.tree.leaves(params)
              if isinstance(leaf, jax.Array) and device in leaf.sharding.device_set]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in arrays)


def _devices_of(params: Any) -> list[jax.Device]:
    """Where arrays lie, in the order of their mesh; of those that lie on the most devices."""
    found: list[jax.Device] = []
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > len(found):
            if isinstance(leaf.sharding, jax.sharding.NamedSharding):
                found = list(leaf.sharding.mesh.devices.flat)
            else:
                found = sorted(leaf.sharding.device_set, key=lambda device: device.id)
    return found
