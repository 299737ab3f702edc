"""Starting JAX on a machine without a GPU, beside an installed CUDA plugin that would tell so several times."""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_STDERR = 2
# Each of the plugin's libraries says both, as it is loaded; no option and no log level of JAX keeps them from it.
_NOTICES = re.compile(rb"Could not find cuda drivers on your machine|before absl::InitializeLog\(\) is called")


def has_nvidia_gpu() -> bool:
    """Whether the system has a driver for one."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


@contextlib.contextmanager
def without_cuda_notices() -> Iterator[None]:
    """Inside, what native code and Python write to stderr is held back; behind, all but the notices is written.

    Does nothing where there is a GPU or no plugin.
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
