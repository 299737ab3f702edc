"""A start on a CPU where JAX's CUDA plugin is installed: it prints none of the plugin's notices, and all else."""

import os
import subprocess
import sys

import pytest

from jaxpaged.core.quiet_start import has_nvidia_gpu, without_cuda_notices
from tests.support.live_server import ROOT

START = """\
import jaxpaged
jaxpaged.LLM, jaxpaged.SamplingParams
from jaxpaged.execution.devices import select_device
print(select_device("cpu").platform)
"""


def test_a_start_prints_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", START], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")


@pytest.mark.skipif(has_nvidia_gpu(), reason="with a GPU nothing is held back")
def test_other_lines_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportError), without_cuda_notices():
        os.write(2, b"an error\nI0000 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU\n")
        os.write(2, b"another\n")
        os.write(2, b"no newline")
        raise ImportError
    with without_cuda_notices(), without_cuda_notices():
        os.write(2, b"\xff inside\n")
    lines = [line for line in capfd.readouterr().err.split("\n") if "cuda" not in line]
    assert lines == ["an error", "another", "no newline\ufffd inside", ""]
