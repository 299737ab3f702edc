"""The script for a machine with a GPU, in its smoke mode: every section ends, and the kernels are right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "bench/gpu_check.py", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_sections_work_without_a_gpu(tmp_path: Path) -> None:
    """Those that are quick; the slow tests run all of them."""
    file = tmp_path / "check.json"
    run("--smoke", "--json", str(file), "--only", "device", "engine")
    lines = json.loads(file.read_text())
    assert not [line for line in lines if "error" in line or line.get("ok") is False], lines
    assert {line["section"] for line in lines} == {"device", "engine"}
    assert "engine, 4 requests" in {line["name"] for line in lines}


@pytest.mark.slow
def test_every_section_finds_something(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    table = run("--smoke", "--json", str(file)).split("\n\n")[-1]
    lines = json.loads(file.read_text())
    assert not [line for line in lines if "error" in line or line.get("ok") is False], lines
    assert {line["section"] for line in lines} == {
        "device", "kernels", "decode", "prefill", "engine", "mosaic", "aot", "torch"}
    assert {"attention, mixed", "sampler", "top tokens", "load and run", "engine, 4 requests",
            "attention by Mosaic, decode"} <= {line["name"] for line in lines}
    assert len(table.splitlines()) == len(lines) and all(len(line) < 175 for line in table.splitlines())


def test_a_section_that_cannot_run_is_a_line_of_the_table(tmp_path: Path) -> None:
    """Without a GPU, and without --smoke, no section runs; the script ends well all the same."""
    table = run("--only", "device", "decode").splitlines()[-2:]
    assert [line.split()[:2] for line in table] == [["FAIL", "device"], ["FAIL", "decode"]]
