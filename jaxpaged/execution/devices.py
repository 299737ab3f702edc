"""Which device runs the model, and how much memory it has."""

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.extend.backend import get_backend

from jaxpaged.core.config import DEFAULT_MEMORY_SHARE
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.quiet_start import has_nvidia_gpu, without_cuda_notices


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Equal devices by name: platform "cpu" or "cuda", kind as the display name, memory in bytes.

    The memory is each device's, or what the process may use in all on CPU.
    """

    platform: str
    kind: str
    memory_bytes: int
    devices: tuple[jax.Device, ...]

    def without_others(self, own_bytes: int) -> "DeviceInfo":
        """Without the memory of a GPU that is in use already, but for so many bytes that are the engine's own."""
        stats = None if self.platform == "cpu" else self.devices[0].memory_stats()
        used = (stats or {}).get("bytes_in_use", 0) - own_bytes
        return replace(self, memory_bytes=self.memory_bytes - max(used, 0))


@contextlib.contextmanager
def without_caller_contexts() -> Iterator[None]:
    """Inside, JAX does not see the contexts of its caller in which compiled programs do not run.

    Those that change how a program is traced do not reach the threads that trace: `ProgramSet` has its own.
    """
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


def select_device(
    wanted: str, count: int = 1, memory_share: float = DEFAULT_MEMORY_SHARE, *, own_process: bool = True
) -> DeviceInfo:
    """Start the backend of `wanted` ("auto", "cpu" or "cuda") and describe its first `count` devices.

    The platform is fixed before any backend starts: an installed GPU plugin that finds no GPU would print a traceback.

    The CPU backend is split into `count` devices if it has not started yet. On a GPU JAX preallocates `memory_share` of
    the memory and never uses more, so that several processes can share a GPU; if the backend has started already, the
    share that it preallocated then counts as `memory_share`.

    Where the process is not the engine's own, no setting is changed but the number of CPU devices, if it is too small:
    JAX starts what it would start, and the memory is what its allocator may use.

    Raises:
        ConfigError: there are no such devices here, or the process has already started another backend.
    """
    platforms_before = _fixed_platforms()
    # Where there is no GPU nobody misses what is not started.
    platform = fix_platform(wanted) if own_process or not has_nvidia_gpu() else _platform(wanted)
    if platform == "cpu" and count > 1:
        _split_cpu(count)
    if platform == "cuda" and own_process:
        _limit_preallocation(memory_share)
    try:
        with without_cuda_notices() if platform == "cpu" else contextlib.nullcontext():
            devices = get_backend(platform).local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin finds no CUDA libraries
        if wanted == "auto" and platform == "cuda":
            return select_device("cpu", count, memory_share, own_process=own_process)
        hint = "install jaxpaged[cuda12] or jaxpaged[cuda13], or use --device cpu" if platform == "cuda" else \
            f"JAX is configured to use {_fixed_platforms()}; unset that or use --device cuda"
        reason = (str(error).splitlines() or ["JAX finds none"])[0]
        raise ConfigError(f"no {platform} device: {reason}; {hint}") from error
    finally:
        if not own_process:
            jax.config.update("jax_platforms", platforms_before)
    if len(devices) < count:
        hint = "; this process has started JAX already, set jax_num_cpu_devices before" if platform == "cpu" else ""
        raise ConfigError(f"--tensor-parallel-size {count} needs {count} {platform} devices, "
                          f"there are {len(devices)}{hint}")
    found = describe_devices(devices[:count])
    if platform == "cpu" or not own_process:
        return found
    return replace(found, memory_bytes=int(found.memory_bytes / memory_share))


def describe_devices(devices: Sequence[jax.Device], wanted: str = "auto") -> DeviceInfo:
    """Devices that the caller has chosen; no setting of JAX is changed.

    Raises:
        ConfigError: they are none, not of one kind, given twice, or not of the platform `wanted`.
    """
    chosen = tuple(devices)
    if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
        raise ConfigError("devices must be a list of JAX devices, as jax.devices() returns them")
    if len(set(chosen)) < len(chosen):
        raise ConfigError("devices: one of them is given twice")
    if len({device.device_kind for device in chosen}) > 1:
        raise ConfigError("devices must be of one kind, not " + " and ".join(sorted({
            device.device_kind for device in chosen})))
    platform = "cpu" if chosen[0].platform == "cpu" else "cuda"
    if wanted not in ("auto", platform):
        raise ConfigError(f"device={wanted}, but the devices that were given are of {chosen[0].platform}; leave one of "
                          "the two out")
    if platform == "cpu":
        return DeviceInfo("cpu", f"CPU ({usable_cores()} cores)", process_memory_bytes(), chosen)
    stats = chosen[0].memory_stats() or {}
    return DeviceInfo("cuda", chosen[0].device_kind, int(stats.get("bytes_limit", 0)), chosen)


def _limit_preallocation(share: float) -> None:
    """Limit JAX's allocator on a GPU to this share of its memory; the user's other options stay."""
    given = jax.config.jax_pjrt_client_create_options  # type: ignore[attr-defined]
    if isinstance(given, str):
        given = dict(item.split(":", 1) for item in given.split(";") if item)
    jax.config.update("jax_pjrt_client_create_options", {**(given or {}), "memory_fraction": float(share)})


def _split_cpu(count: int) -> None:
    """Split the CPU backend into at least `count` devices."""
    with contextlib.suppress(RuntimeError):  # it has started: its number of devices stays
        if jax.config.jax_num_cpu_devices < count:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", count)


def fix_platform(wanted: str) -> str:
    """The platform that `wanted` ("auto", "cpu" or "cuda") means here; JAX starts no other, unless configured."""
    platform = _platform(wanted)
    if not _fixed_platforms():
        jax.config.update("jax_platforms", platform)
    return platform


def _platform(wanted: str) -> str:
    return wanted if wanted != "auto" else ("cuda" if has_nvidia_gpu() else "cpu")


def _fixed_platforms() -> str | None:
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return platforms


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the lowest limit of its control groups and its own."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        text = path.read_text().strip() if path.is_file() else "max"
        if text.isdigit():
            limits.append(int(text))
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        limits.append(own)
    return min(limits)

