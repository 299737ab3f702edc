"""Programs that others wrote, each in an environment of its own: what they need would not fit beside ours."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_server import ROOT


def environment(name: str, *packages: str) -> Path:
    """The programs of an environment with these packages, made once and kept beside the tests' own."""
    folder = ROOT / ".venv-clients" / name
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        done = subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{' '.join(packages)} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        (folder / ".installed").touch()
    return folder / "bin"


def run(*command: str | Path, timeout: float = 900, **more: Any) -> str:
    """What a command prints; an exit code other than 0 fails the test.

    Args:
        timeout: seconds.
        more: for `subprocess.run`.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **more)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout
