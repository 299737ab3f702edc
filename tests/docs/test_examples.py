"""Every example that needs no GPU runs as it is, and prints what it promises."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.live_server import ROOT, LiveServer

EXAMPLES = ROOT / "examples"
NEEDS_A_GPU = {"jax_triton_rms_norm.py"}


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_openai_client(server: LiveServer) -> None:
    printed = _run("chat_openai_client.py", f"{server.url}/v1")
    assert re.search(r".+\n\d+ prompt tokens, \d+ generated\n$", printed, re.DOTALL), printed


@pytest.mark.slow
def test_offline_batch() -> None:
    printed = _run("offline_batch.py")
    assert "France: Paris\n" in printed and "16 prompt tokens were cached" in printed


def test_structured_output() -> None:
    assert re.fullmatch(r"\{'city': '.*', 'capital': (True|False)\} (yes|no) 1\d{3}\n", _run("structured_output.py"))


@pytest.mark.slow
def test_stream_async() -> None:
    first, second = _run("stream_async.py").splitlines()
    assert first.startswith("Once upon a time, ") and second.startswith("The sea is ")


@pytest.mark.slow
def test_tensor_parallel_cpu() -> None:
    printed = _run("tensor_parallel_cpu.py")
    assert re.findall(r"tensor_parallel_size=(\d):' Paris", printed) == ["3", "1"]


@pytest.mark.slow
def test_plan_for_gpu() -> None:
    printed = _run("plan_for_gpu.py")
    assert printed.count("KV pool: ") == 3 and "on each of 2 devices" in printed


def test_every_example_is_tested_and_short() -> None:
    tested = {f"{name.removeprefix('test_')}.py" for name in globals() if name.startswith("test_")}
    for file in EXAMPLES.glob("*.py"):
        assert file.name in tested | NEEDS_A_GPU
        assert len(file.read_text().splitlines()) <= 50
        assert f"python examples/{file.name}" in file.read_text(), "its docstring says how to run it"


def test_examples_use_only_the_public_interface() -> None:
    for file in EXAMPLES.glob("*.py"):
        assert not re.search(r"(from|import) jaxpaged\.", file.read_text())
