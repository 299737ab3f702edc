"""Devices that can be compiled for and are not there, written from public hardware facts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import SingleDeviceSharding

from jaxpaged.pallas_kernels.lowering import lowering_for

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads} core_count: {cores}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "12.9.0" driver_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{kind}"
"""
_H200 = _TARGET.format(
    threads=2048, cores=132, shared=233472, optin=232448, fpus=128, bandwidth=4800000000000, l2=52428800, clock=1.98,
    memory=151397597184, capability="major: 9 feature_extension: ACCELERATED_FEATURES", kind="NVIDIA H200")
_A100 = _TARGET.format(
    threads=2048, cores=108, shared=167936, optin=166912, fpus=64, bandwidth=2039000000000, l2=41943040, clock=1.41,
    memory=85899345920, capability="major: 8", kind="NVIDIA A100-SXM4-80GB")
TARGETS = {"h200": _H200, "a100": _A100}


def compile_only_device(name: str) -> jax.Device:
    """A device of TARGETS; programs compile for it, but none runs."""
    described = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1",
                                             target_config=TARGETS[name])
    return described.devices[0]


def compile_for(device: jax.Device, function: Any, *shapes: Any, **jit: Any) -> jax.stages.Compiled:
    """Compile `function` for arguments of these shapes on `device`."""
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with lowering_for(device):
        lowered = jax.jit(function, **jit).lower(*placed)
    with _no_persistent_cache():
        return lowered.compile()


@contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """What was compiled for a device that is not there can be stored, but not read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # whether there is a cache is decided once, until this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        reset_cache()
