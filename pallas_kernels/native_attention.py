"""Paged attention as a native XLA custom call: the CPU backend's faster path, where a C++ compiler is there.

`build` compiles `native/paged_attention.cc` once per machine and registers it; programs that use it can be compiled,
or read from JAX's persistent cache, only after that.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.resources
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

TARGET = "jaxpaged_paged_attention"  # in the registry, and the library's symbol
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
          "-shared", "-pthread", "-w")
_LONGEST_COMPILATION = 120  # seconds


def build(folder: Path) -> str | None:
    """Compile the kernel into `folder`, unless it is there already, and register it.

    Returns:
        None if `paged_attention` can be used now, else why not, in one line.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return f"no C++ compiler on PATH ({', '.join(_COMPILERS)})"
    source = importlib.resources.files("jaxpaged.pallas_kernels").joinpath("native/paged_attention.cc").read_bytes()
    try:
        library = folder / f"paged_attention-{_key(compiler, source)}.so"
        if not library.exists():
            _compile(compiler, source, library)
        _register(library)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line]
        return f"{compiler} failed: {lines[0] if lines else f'exit code {error.returncode}'}"
    except subprocess.TimeoutExpired:
        return f"{compiler} did not finish in {_LONGEST_COMPILATION} s"
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def _register(library: Path) -> None:
    jax.devices("cpu")  # before the backend starts, registrations are only noted, and their errors come later
    handler = getattr(ctypes.CDLL(str(library)), TARGET)
    try:
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        # This process has it from another folder already, which is as good: both are made from the same source.
        if "duplicate" not in str(error).lower():
            raise


def _key(compiler: str, source: bytes) -> str:
    """A name that changes with everything that the library depends on; the home directory may serve many machines."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=60).stdout
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    cpu = next((line for line in lines if line.startswith((b"flags", b"Features"))), platform.processor().encode())
    parts = (source, " ".join(_FLAGS).encode(), version, importlib.metadata.version("jaxlib").encode(), cpu)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, source: bytes, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, made = Path(folder, "paged_attention.cc"), Path(folder, "made.so")
        code.write_bytes(source)
        command = [compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), str(code), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST_COMPILATION)
        os.replace(made, library)  # whole or not at all, whoever else compiles it now


def paged_attention(
    q: jax.Array,  # [T, N, H] float32
    k_pool: jax.Array,  # [P, S, K, H] float32
    v_pool: jax.Array,  # [P, S, K, H] float32
    block_table: jax.Array,  # [slots + 1, width] int32; stale entries are fine, out of range ones are not
    slot: jax.Array,  # [T] int32; the tokens of one slot are neighbours, in order; padding has the last slot
    position: jax.Array,  # [T] int32
    scale: float,
) -> jax.Array:  # [T, N, H]
    """Causal attention of each row to its slot's positions 0 to its own; padding rows give zeros.

    A row's result is bitwise the same whatever other rows the step has.
    """
    assert q.dtype == k_pool.dtype == v_pool.dtype == jnp.float32, (q.dtype, k_pool.dtype, v_pool.dtype)
    assert q.shape[1] % k_pool.shape[2] == 0 and k_pool.shape == v_pool.shape, (q.shape, k_pool.shape, v_pool.shape)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(q.shape, q.dtype))
    result: jax.Array = call(q, k_pool, v_pool, block_table, slot, position, scale=np.float32(scale))
    return result
