"""Starting JAX quietly on a machine without a GPU, where an installed CUDA plugin prints notices."""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_STDERR = 2
# Each of the plugin's libraries prints both when loaded; no option or log level of JAX prevents it.
_NOTICES = re.compile(rb"Could not find cuda drivers on your machine|before absl::InitializeLog\(\) is called")


def has_nvidia_gpu() -> bool:
    """Whether the system has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


@contextlib.contextmanager
def without_cuda_notices() -> Iterator[None]:
    """Hold back stderr, including that of native code, and write it without the notices at the end.

    Does nothing if there is a GPU or no plugin.
    """
    plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if has_nvidia_gpu() or not plugins:
        yield
        return
    with tempfile.TemporaryFile() as held:
        try:
            stderr = os.dup(_STDERR)
        except OSError:  # it is closed
            yield
            return
        _flush()
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, _STDERR)
            os.close(stderr)
            held.seek(0)
            with open(_STDERR, "wb", closefd=False) as out:
                out.writelines(line for line in held if not _NOTICES.search(line))


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
