"""NVIDIA GPUs as data, from public facts: what XLA needs to compile for an absent one."""

from dataclasses import dataclass

from jaxpaged.core.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU by its public facts.

    Attributes:
        name: as the user spells it, "h200".
        kind: as its driver and JAX's `device_kind` spell it.
        compute_capability: major and minor.
        num_sms: streaming multiprocessors.
        shared_bytes_per_sm, shared_bytes_per_block: the latter is the maximum that one block can opt in to.
        threads_per_sm: resident at once.
        memory_bytes: total, as nvidia-smi lists it.
        memory_bandwidth: bytes per second.
        l2_bytes: second-level cache.
        clock_ghz: boost clock.
        fp32_per_sm: float32 lanes.
    """

    name: str
    kind: str
    compute_capability: tuple[int, int]
    num_sms: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    threads_per_sm: int
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int
    clock_ghz: float
    fp32_per_sm: int

    registers_per_sm = 65536  # in every generation here

    @property
    def config_text(self) -> str:
        """XLA's GpuTargetConfigProto, as text.

        XLA takes 80 % of `device_memory_size` for the limit of a program's arguments and prints an error for more,
        which weights and a pool that fill the GPU as planned always are. Nothing that is compiled here depends on it.
        """
        major, minor = self.compute_capability
        features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes_per_sm}
  threads_per_core_limit: {self.threads_per_sm}
  core_count: {self.num_sms}
  fpus_per_core: {self.fp32_per_sm}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth:.0f}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes * 5 // 4}
  shared_memory_per_block_optin: {self.shared_bytes_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  registers_per_core_limit: {self.registers_per_sm}
  registers_per_block_limit: {self.registers_per_sm}
  runtime_version: "12.9.0"
  driver_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


_AMPERE, _SMALL, _HOPPER = (167936, 166912, 2048), (102400, 101376, 1536), (233472, 232448, 2048)

GPUS = {
    spec.name: spec
    for spec in (
        GpuSpec("a100-40g", "NVIDIA A100-SXM4-40GB", (8, 0), 108, *_AMPERE, 40960 * MIB, 1555e9, 40 * MIB, 1.41, 64),
        GpuSpec("a100-80g", "NVIDIA A100-SXM4-80GB", (8, 0), 108, *_AMPERE, 81920 * MIB, 2039e9, 40 * MIB, 1.41, 64),
        GpuSpec("a10", "NVIDIA A10", (8, 6), 72, *_SMALL, 23028 * MIB, 600e9, 6 * MIB, 1.695, 128),
        GpuSpec("l4", "NVIDIA L4", (8, 9), 58, *_SMALL, 23034 * MIB, 300e9, 48 * MIB, 2.04, 128),
        GpuSpec("l40s", "NVIDIA L40S", (8, 9), 142, *_SMALL, 46068 * MIB, 864e9, 96 * MIB, 2.52, 128),
        GpuSpec("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, *_HOPPER, 81559 * MIB, 3350e9, 50 * MIB, 1.98, 128),
        GpuSpec("h200", "NVIDIA H200", (9, 0), 132, *_HOPPER, 143771 * MIB, 4800e9, 50 * MIB, 1.98, 128),
        GpuSpec("b200", "NVIDIA B200", (10, 0), 148, *_HOPPER, 183359 * MIB, 8000e9, 126 * MIB, 1.965, 128),
    )
}


def find_gpu(name: str) -> GpuSpec:
    """The GPU of this name.

    Raises:
        ConfigError: the name is unknown; the text lists the known ones.
    """
    if name not in GPUS:
        raise ConfigError(f"no GPU named {name!r}; known are {', '.join(GPUS)}")
    return GPUS[name]
