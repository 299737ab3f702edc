"""Kernels and programs compiled for GPUs that are not there."""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxpaged.execution.aot import compile_only_devices, no_persistent_cache
from jaxpaged.execution.gpu_targets import find_gpu
from jaxpaged.pallas_kernels.lowering import lowering_for

TARGETS = {"h200": "h200", "a100": "a100-80g"}  # those that every run compiles for


def compile_only_device(name: str) -> jax.Device:
    """A device of TARGETS; programs compile for it, but none runs."""
    return compile_only_devices(find_gpu(TARGETS[name]))[0]


def compile_for(device: jax.Device, function: Any, *shapes: Any, **jit: Any) -> jax.stages.Compiled:
    """Compile `function` for arguments of these shapes on `device`."""
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with lowering_for(device):
        lowered = jax.jit(function, **jit).lower(*placed)
    with no_persistent_cache():
        return lowered.compile()
