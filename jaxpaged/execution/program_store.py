"""A directory of programs compiled ahead of time, perhaps on a machine without the device they are for.

JAX's own persistent cache needs each program traced and lowered before it can be found, and what was compiled without
the device is not found at all. Here a program is found by what it was made from.

Programs are machine code that runs with the rights of the process: a store is used only if nobody else can write it,
and reading it runs nothing.
"""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxpaged
from jaxpaged.core.errors import first_line
from jaxpaged.core.trusted_files import UntrustedFileError, read_trusted
from jaxpaged.execution import program_format

_MANIFEST = "store.json"
_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "flax")


class StoreError(Exception):
    """A program cannot be loaded from a store; the text says why."""


class ProgramStore:
    """Programs on disk, all made from the same `key`.

    Args:
        folder: where they are, or will be.
        key: everything that they depend on, by name.
    """

    def __init__(self, folder: Path, key: Mapping[str, str]) -> None:
        self._folder = folder
        self._key = dict(key)

    def check(self) -> None:
        """Raise StoreError if the store is missing, or was made from something else; the text names what differs."""
        found = _manifest(self._folder).get("key")
        if not isinstance(found, dict):
            raise StoreError(f"{self._folder / _MANIFEST} is damaged")
        wrong = [name for name in sorted({*found, *self._key}) if found.get(name) != self._key.get(name)]
        if wrong:
            name = wrong[0]
            brief = f" ({found.get(name)} there, {self._key.get(name)} here)" if name in _READABLE else ""
            raise StoreError(f"{self._folder} was compiled with another {', '.join(wrong)}{brief}")

    def load(self, name: tuple[str, int], devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """The executable.

        Raises:
            StoreError: it is missing, damaged, or the runtime refuses it.
        """
        file = self._file(name)
        try:
            content = read_trusted(file)
            if hashlib.sha256(content).hexdigest() != _manifest(self._folder)["programs"][file.name]:
                raise StoreError(f"{file} is damaged")
            return program_format.from_bytes(content, devices)
        except StoreError:
            raise
        except Exception as error:  # the system's, pickle's and the runtime's share no base
            raise StoreError(f"{file} cannot be loaded: {first_line(error)}") from error

    def save(self, programs: Mapping[tuple[str, int], jax.stages.Compiled], num_blocks: int) -> int:
        """Write all programs, the manifest last; the bytes written."""
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        digests, total = {}, 0
        for name, compiled in programs.items():
            content = program_format.to_bytes(compiled)
            self._file(name).write_bytes(content)
            self._file(name).chmod(0o644)
            digests[self._file(name).name] = hashlib.sha256(content).hexdigest()
            total += len(content)
        manifest = {"key": self._key, "num_blocks": num_blocks, "programs": digests}
        (self._folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        (self._folder / _MANIFEST).chmod(0o644)
        return total

    def _file(self, name: tuple[str, int]) -> Path:
        return self._folder / f"{name[0]}-{name[1]}.bin"


def stored_blocks(folder: Path) -> int | None:
    """The number of KV blocks that a store's programs are for; None if it cannot be read."""
    try:
        found = _manifest(folder).get("num_blocks")
    except StoreError:
        return None
    return found if isinstance(found, int) else None


_READABLE = ("device", "devices", "platform", "dtype", "kv_cache_dtype", *_PACKAGES)


def environment_key(device: jax.Device, platform_name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """What any program depends on besides its own definition: versions, device, compiler options, our code."""
    key = {name: _version(name) for name in _PACKAGES}
    key |= {"jaxpaged": jaxpaged.__version__, "code": _code_hash(), "platform": platform_name,
            "device": device.device_kind, "compiler_options": json.dumps(dict(options), sort_keys=True)}
    if platform_name == "cpu":
        key["cpu"] = _cpu_hash()
    return key


def digest(value: object) -> str:
    """A short name for a value whose repr determines it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_trusted(folder / _MANIFEST))
    except FileNotFoundError:
        raise StoreError(f"{folder} holds no {_MANIFEST}") from None
    except UntrustedFileError as error:
        raise StoreError(f"programs are not loaded from {folder}: {error}") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / _MANIFEST} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise StoreError(f"{folder / _MANIFEST} is damaged")
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _code_hash() -> str:
    """Of all source files that programs are made of: between releases the version alone does not change."""
    root = Path(jaxpaged.__file__).parent
    total = hashlib.sha256()
    for folder in ("execution", "models", "pallas_kernels"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".cc", ".h"):
                total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()[:16]


def _cpu_hash() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return digest(next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor()))
