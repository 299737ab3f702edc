"""Native CPU kernels as XLA custom calls: compiled once per machine with the system's C++ compiler, and registered.

Programs that use one can be compiled, or read from JAX's persistent cache, only after that.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.resources
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_HEADERS = ("lanes.h", "weights.h", "products.h", "packed_types.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
          "-shared", "-pthread", "-w")
_MAX_COMPILE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """One source file in `native/`, and its custom calls: names in the registry, and the library's symbols.

    `flags` are the compiler's, for one of several libraries of the source.
    """

    source: str
    targets: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the library: the source's, and the values of its flags."""
        return "_".join([Path(self.source).stem, *(flag.rpartition("=")[2] for flag in self.flags)])


def build(folder: Path, kernels: Sequence[NativeKernel], flags: Sequence[str] = (),
          check: Callable[[Path], None] = lambda library: None) -> str | None:
    """Compile the kernels into `folder`, unless they are there already, and register them.

    A library that is damaged, or that `check` refuses, is compiled again, with a warning.

    Args:
        flags: more of them for the compiler, such as `-mno-avx512f`.
        check: raises an exception for a library that must not be loaded.

    Returns:
        None if all can be used now, else the reason in one line.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return f"no C++ compiler on PATH ({', '.join(_COMPILERS)})"
    try:
        version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=60).stdout
        with ThreadPoolExecutor() as threads:
            jobs = [threads.submit(_library, folder, kernel, compiler, version, flags, check) for kernel in kernels]
            libraries = [job.result() for job in jobs]
        for kernel, library in zip(kernels, libraries, strict=True):
            _register(library, kernel.targets)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line]
        return f"{compiler} failed: {lines[0] if lines else f'exit code {error.returncode}'}"
    except subprocess.TimeoutExpired:
        return f"{compiler} did not finish in {_MAX_COMPILE_SECONDS} s"
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def _library(folder: Path, kernel: NativeKernel, compiler: str, version: bytes, flags: Sequence[str],
             check: Callable[[Path], None]) -> Path:
    """The kernel's library, compiled now if need be.

    Its name changes with everything that it depends on, since the home directory may serve many machines, and ends with
    a digest of its content.
    """
    native = importlib.resources.files("jaxpaged.pallas_kernels").joinpath("native")
    files = {name: native.joinpath(name).read_bytes() for name in (kernel.source, *_HEADERS)}
    command = [compiler, *_FLAGS, *kernel.flags, *flags]
    parts = (*files.values(), " ".join(command).encode(), version, importlib.metadata.version("jaxlib").encode(),
             _cpu())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    name = f"{kernel.name}-{key}"
    for library in sorted(folder.glob(f"{name}-*.so")):
        try:
            check(library)
            if library.stem != f"{name}-{_digest(library)}":
                raise OSError("it is damaged")
            return library
        except Exception as error:
            logger.warning("%s is not used: %s; compiling it again", library, error)
            library.unlink(missing_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for source, content in files.items():
            Path(temporary, source).write_bytes(content)
        code, made = Path(temporary, kernel.source), Path(temporary, "made.so")
        command += ["-isystem", jax.ffi.include_dir(), str(code), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=_MAX_COMPILE_SECONDS)
        made.chmod(0o700)
        library = folder / f"{name}-{_digest(made)}.so"
        os.replace(made, library)  # atomic: other processes may compile it now
    return library


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _cpu() -> bytes:
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), platform.processor().encode())


def _register(library: Path, targets: Sequence[str]) -> None:
    jax.devices("cpu")  # before the backend starts, registrations are only queued, and their errors are raised later
    loaded = ctypes.CDLL(str(library))
    for target in targets:
        try:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, target)), platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            # This process has loaded it from another folder already: both are made from the same source.
            if "duplicate" not in str(error).lower():
                raise
