"""An engine runs on the devices that it is given, or where its weights are: eight CPU devices in a process apart."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chosen_devices_process import PROMPT
from tests.support.live_server import ROOT
from tests.support.tiny_llama import CONFIG, Reference, random_weights


@pytest.fixture(scope="module")
def results(model_path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "tests.support.chosen_devices_process", str(model_path)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("name", "devices"), [
    ("plain", [0]), ("pair on 5", [5]), ("given 3", [3]), ("pair on 5, given 2", [2]), ("default 6", [6]),
    ("mesh of 7 and 4", [4, 7]), ("sharded over 4 and 5", [4, 5]), ("over 4 and 5, on one", [4]),
])
def test_weights_and_pages_lie_where_they_should(results: dict[str, Any], name: str, devices: list[int]) -> None:
    """And the ids are right, with eight engines in one process."""
    found = results[name]
    assert found["weights"] == found["pools"] == devices
    assert Reference(CONFIG, random_weights()).error(PROMPT, found["ids"], 6) is None
    if name.startswith("pair"):
        assert found["copied"] == (name != "pair on 5"), "weights were copied, or were not"


@pytest.mark.parametrize(("name", "text"), [
    ("both", "give devices or mesh, not both"),
    ("contradicting", "tensor_parallel_size=2 needs 2 devices, and 3 were given"), ("twice", "given twice"),
    ("none", "must be a list of JAX devices"), ("no devices", "must be a list of JAX devices"),
    ("another platform", "device=cuda, but the devices that were given are of cpu"),
])
def test_choices_that_cannot_be(results: dict[str, Any], name: str, text: str) -> None:
    assert text in results[name]
