"""Every command and every Python block in the documents runs, or is listed here with the reason why it does not."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.server.args import parse_args
from tests.support.documents import documents
from tests.support.live_server import ROOT

SERVER = re.compile(r"(?:python -m jaxpaged\.server|jaxpaged serve)\b(.*?)(?: &)?$")

INSTALLS = "installs packages, or runs what does"
LONG = "takes minutes"
WORKLOAD = "needs a workload file, and takes minutes"
SUITE = "is a part of the suite itself"
GPU = "needs an NVIDIA GPU"
BENCH = "takes a while; tests/bench runs the script in a smaller size"
NOT_RUN: dict[str, str] = {
    "make serve": INSTALLS,
    'make serve ARGS="--model /models/llama --port 9000"': INSTALLS,
    "make test": INSTALLS,
    "make test-slow": INSTALLS,
    "make test-slow PY312=/path/to/python3.12": INSTALLS,
    "pip install .": INSTALLS,
    "pip install openai": INSTALLS,
    'pip install ".[cuda12]"': INSTALLS,
    'pip install ".[cuda13]"': INSTALLS,
    'pip install ".[test]"': INSTALLS,
    'pip install -e ".[dev]"': INSTALLS,
    "python -m pytest -m slow tests/engine/test_workload_parity.py": SUITE,
    "python -m pytest tests/engine/test_engine.py": SUITE,
    "python -m pytest tests/engine/test_engine.py tests/engine/test_prefix_cache.py tests/engine/test_swap.py": SUITE,
    "python -m pytest tests/engine/test_tensor_parallel.py": SUITE,
    "python -m pytest tests/loading/test_orbax.py -k peak": SUITE,
    "python -m pytest tests/models/test_models.py": SUITE,
    "python -m pytest tests/text/test_structured_outputs.py tests/execution/test_aot.py": SUITE,
    "python -m jaxpaged.compile --model MODEL --device h200 --out DIR": "tests/commands/test_compile.py runs it",
    "promtool check config deploy/prometheus.yml": "tests/deploy/test_monitoring.py runs it",
    "python deploy/make_dashboards.py": "writes files of this tree; tests/deploy/test_monitoring.py compares them",
    "python -m pytest -m slow tests/deploy": SUITE,
    "jaxpaged run-batch": "tests/server/test_run_batch.py runs it",
    "jaxpaged run-batch MODEL -i requests.jsonl -o answers.jsonl": "tests/server/test_run_batch.py runs it",
    "python bench/bench_aot.py --write FILE": LONG,
    "python bench/bench_host.py": LONG,
    "python bench/bench_host.py --running 64 --waiting 1 --windows 0 64": LONG,
    "python bench/bench_http.py": LONG,
    "python bench/bench_http.py --tokens 100": LONG,
    "python bench/bench_latency.py --read-weights": LONG,
    "python bench/bench_latency.py --read-weights --workload W4.json": WORKLOAD,
    "python bench/bench_linear.py": LONG,
    "python bench/bench_long.py": LONG,
    "python bench/bench_serving.py --request-rate 4": LONG,
    "python bench/bench_sharing.py": LONG,
    "python bench/bench_sharing.py --num-prompts 2": LONG,
    "python bench/bench_start.py": LONG,
    "python bench/bench_throughput.py --num-prompts 64": LONG,
    "python bench/bench_throughput.py --workload FILE": WORKLOAD,
    "python bench/bench_throughput.py --workload W1.json --no-enable-prefix-caching": WORKLOAD,
    "python bench/compare.py --workload FILE --engines transformers jaxpaged openvino "
    "--python openvino=/path/to/python": WORKLOAD,
    "python bench/compare.py --workload FILE [FILE ...]": WORKLOAD,
    "python bench/compare.py --workload FILE [FILE ...] --no-enable-prefix-caching": WORKLOAD,
    "python bench/compare.py --workload W5.json": WORKLOAD,
    "python bench/gpu_check.py": GPU,
    "python bench/gpu_check.py --json check.json": GPU,
    "python bench/gpu_check.py --smoke --only device": BENCH,
    "python bench/simulate.py --long-prompt 32768": BENCH,
    "python bench/simulate.py --plot bench/results/latency.png": BENCH,
    "python bench/simulate.py --traffic 30 --slo 0.1": BENCH,
    "python docs/make_limits.py": "writes into the tree; tests/docs/test_documents.py runs it with --check",
    "python docs/make_models.py": "writes into the tree; tests/docs/test_documents.py runs it with --check",
}

COMMANDS = sorted({command for document in documents() for command in document.commands()})
# Those that take many seconds, and are like others: they are run by the slow tests.
SLOW = {"docs/python.md", "python -m jaxpaged.plan --model MODEL --device h200",
        "python -m jaxpaged.plan --model MODEL --device l4 --no-compile"}
PYTHON = [pytest.param(block, id=f"{document.name}-{number}", marks=[pytest.mark.slow] * (document.name in SLOW))
          for document in documents() for number, (_, block) in enumerate(document.blocks("python"), 1)]


@pytest.mark.parametrize("command", [command for command in COMMANDS if SERVER.match(command)])
def test_servers_are_started_with_flags_that_exist(command: str) -> None:
    found = SERVER.match(command)
    assert found
    arguments = shlex.split(found[1])
    if "--ssl-keyfile" in arguments:
        arguments = [argument for argument in arguments if "ssl" not in argument and ".pem" not in argument]
    if "--help" not in arguments:
        assert parse_args(arguments).engine.model


@pytest.mark.parametrize("command", [pytest.param(command, marks=[pytest.mark.slow] * (command in SLOW))
                                     for command in COMMANDS if not SERVER.match(command) and command not in NOT_RUN])
def test_commands_run(command: str, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    words = command.replace("MODEL", str(tiny_model)).replace("OUT", str(tmp_path / "out"))
    if "localhost:8000" in words:
        words = words.replace("http://localhost:8000", request.getfixturevalue("server").url)
    if words.startswith("curl "):
        words = words.replace("curl ", "curl --fail-with-body --silent --show-error ", 1)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "cuda drivers" not in done.stderr, "a notice of JAX's plugin"


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block: str, request: pytest.FixtureRequest) -> None:
    if "localhost:8000" in block:
        block = block.replace("http://localhost:8000", request.getfixturevalue("server").url)
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_no_reason_is_left_over() -> None:
    assert not set(NOT_RUN) - set(COMMANDS), "no document has these commands any more"
