"""An engine runs on the devices that it is given, or where its weights are: eight CPU devices in a process apart."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chosen_devices_process import PROMPT
from tests.support.live_server import ROOT
from tests.support.tiny_llama import CONFIG, Reference, random_weights

QUICK = {"pair on 5": [5], "mesh of 7 and 4": [4, 7], "trained, to 3": [3]}
OTHERS = {"plain": [0], "given 3": [3], "pair on 5, given 2": [2], "default 6": [6], "sharded over 4 and 5": [4, 5],
          "over 4 and 5, on one": [4], "trained, to 6 and 7": [6, 7]}
REFUSED = {
    "both": "give devices or mesh, not both",
    "contradicting": "tensor_parallel_size=2 needs 2 devices, and 3 were given", "twice": "given twice",
    "none": "must be a list of JAX devices", "no devices": "must be a list of JAX devices",
    "another platform": "device=cuda, but the devices that were given are of cpu",
}


@functools.cache
def run(folder: Path, cases: tuple[str, ...]) -> dict[str, Any]:
    """What several cases give, all in one process."""
    done = subprocess.run([sys.executable, "-m", "tests.support.chosen_devices_process", str(folder), *cases], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_weights_and_pages_lie_where_they_should(model_path: Path, name: str) -> None:
    """And the ids are right, with all the engines in one process."""
    cases = QUICK if name in QUICK else OTHERS
    found = run(model_path, (*cases, *REFUSED) if name in QUICK else tuple(cases))[name]
    assert found["weights"] == cases[name]
    assert Reference(CONFIG, random_weights()).error(PROMPT, found["ids"], 6) is None
    if name.startswith("trained"):
        assert found["moved"] and found["freed"]
        return
    assert found["pools"] == cases[name]
    if name.startswith("pair"):
        assert found["copied"] == (name != "pair on 5"), "weights were copied, or were not"


@pytest.mark.parametrize("name", REFUSED)
def test_choices_that_cannot_be(model_path: Path, name: str) -> None:
    assert REFUSED[name] in run(model_path, (*QUICK, *REFUSED))[name]


SETTINGS = """
import json, os, sys
import jax

NAMES = ("jax_platforms", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
         "jax_persistent_cache_min_entry_size_bytes", "jax_pjrt_client_create_options", "jax_num_cpu_devices")
before = {name: getattr(jax.config, name) for name in NAMES}
import jaxpaged

jaxpaged.LLM(sys.argv[1], max_num_seqs=2, max_num_batched_tokens=2, num_gpu_blocks_override=9, cpu_attention="xla",
             cpu_linear="xla", **json.loads(sys.argv[2]))
changed = [name for name in NAMES if getattr(jax.config, name) != before[name]]
jax.config.update("jax_compilation_cache_dir", sys.argv[3])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x * 3 + 1)(jax.numpy.ones(77))
os.makedirs(sys.argv[3], exist_ok=True)
print(json.dumps({"changed": changed, "caller's programs": len(os.listdir(sys.argv[3]))}))
"""


@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_settings_of_jax_for_the_process_are_left_alone_unless_asked(
        model_path: Path, tmp_path: Path, asked: bool) -> None:
    """The engine's programs are cached all the same; those of the caller go where the caller wants."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS, str(model_path), json.dumps({"configure_jax": asked}), str(tmp_path / "own")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment | {"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(list(tmp_path.glob("jaxpaged/compiled/*"))) > 8
    assert bool(found["changed"]) == asked and (asked or found["caller's programs"])
    assert "Traceback" not in done.stderr
