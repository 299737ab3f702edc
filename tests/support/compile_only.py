"""Kernels and programs compiled for absent GPUs."""

from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpaged.execution.aot import compile_only_devices, no_persistent_cache
from jaxpaged.execution.gpu_targets import find_gpu
from jaxpaged.pallas_kernels.lowering import lowering_for

# GPUs to compile for. The quick tests compile each variant of a kernel for one, the slow tests for the others.
QUICK_GPU, OTHER_GPU = "h200", "a100-80g"
GPU_PARAMS = (QUICK_GPU, pytest.param(OTHER_GPU, marks=pytest.mark.slow))


def compile_only_device(name: str) -> jax.Device:
    """A GPU that `find_gpu` knows; programs compile for it, but none runs."""
    return compile_only_devices(find_gpu(name))[0]


def compile_for(device: jax.Device, function: Any, *shapes: Any, **jit: Any) -> jax.stages.Compiled:
    """Compile `function` for arguments of these shapes on `device`."""
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with lowering_for(device):
        lowered = jax.jit(function, **jit).lower(*placed)
    with no_persistent_cache():
        return lowered.compile()
