"""Compile for an absent GPU, and count in the result what would run.

XLA:GPU needs a description of the device, not the device. What comes out is the real executable: memory analysis,
launches, command buffers. Besides JAX this takes its CUDA plugin of the same version.
"""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxpaged.core.errors import ConfigError
from jaxpaged.core.quiet_start import without_cuda_notices
from jaxpaged.execution.devices import fix_platform
from jaxpaged.execution.gpu_targets import GpuSpec

_NO_PLUGIN = "compiling for a GPU without one needs JAX's CUDA plugin of the same version as JAX: pip install " \
    "'jax[cuda12-local]' nvidia-cuda-nvcc-cu12 absl-py"


def compile_only_devices(gpu: GpuSpec, count: int = 1) -> tuple[jax.Device, ...]:
    """`count` devices that programs can be compiled for, and nothing else.

    Raises:
        ConfigError: the CUDA plugin is missing or does not fit; the text says what to install.
    """
    if importlib.util.find_spec("jax_plugins") is None:
        raise ConfigError(_NO_PLUGIN)
    fix_platform("auto")
    try:
        with without_cuda_notices():
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="", topology=f"1x1x{count}", target_config=gpu.config_text)
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{_NO_PLUGIN} ({reason})") from error
    return tuple(found.devices)


@contextmanager
def no_persistent_cache() -> Iterator[None]:
    """Compile without JAX's persistent cache: its entries for an absent device cannot be read back.

    The cache is off for the whole process; enter this once around all threads that compile.
    """
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # whether there is a cache is decided once, until this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def dump_options(folder: Path) -> dict[str, bool | str]:
    """Compiler options that make XLA leave in `folder` what `thunks` reads; a folder of its own for each program."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "ptx"}


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What a compiled program takes and sends on each device.

    Attributes:
        alias_bytes: of the arguments whose memory its results reuse.
        collectives: instructions that exchange data between devices.
    """

    argument_bytes: int
    alias_bytes: int
    temporary_bytes: int
    collectives: int


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
               "ragged-all-to-all")
_COLLECTIVE = re.compile(rf"= (?:\S+|\([^=]*\)) (?:{'|'.join(COLLECTIVES)})(?:-start)?\(")
BRACKETS = ("CommandBuffer", "Sequential", "Conditional", "While")  # thunks that only hold others


def facts_of(compiled: jax.stages.Compiled) -> ProgramFacts:
    """The facts of a compiled program."""
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend reports no memory"
    return ProgramFacts(
        int(memory.argument_size_in_bytes), int(memory.alias_size_in_bytes), int(memory.temp_size_in_bytes),
        len(_COLLECTIVE.findall(compiled.as_text() or "")))


@dataclass(frozen=True, slots=True)
class Thunk:
    """One entry of a GPU program's thunk sequence.

    Attributes:
        depth: larger for what lies inside another.
        kind: XLA's name without its k, such as "CustomKernel" or "CublasLtMatmul".
        text: the rest of XLA's line.
    """

    depth: int
    kind: str
    text: str


_THUNK = re.compile(r"( *)\d+: k(\w+)\s+\[[^\]]*\](.*)")


def thunks(dump: Path) -> list[Thunk]:
    """The thunks of the one program that was compiled with `dump_options(dump)`, in order."""
    # Programs too short for a command buffer have no second file.
    files = sorted(dump.glob("*thunk_sequence_after_thunk_passes.txt")) or sorted(dump.glob("*thunk_sequence.txt"))
    assert len(files) == 1, f"{dump} holds {len(files)} thunk sequences, expected one program's"
    matches = filter(None, map(_THUNK.match, files[0].read_text().splitlines()))
    return [Thunk(len(match[1]), match[2], match[3]) for match in matches]
