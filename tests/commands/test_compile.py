"""Programs compiled ahead of time: what the command says of them, and that a server takes them, or says why not."""

import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.monitoring
import pytest

from jaxpaged.commands.compile import main
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.startup import layout_of, model_of, programs_of
from jaxpaged.execution.devices import select_device
from jaxpaged.execution.gpu_targets import GPUS
from tests.support.model_configs import with_windows
from tests.support.tiny_llama import CONFIG, Reference, random_prompt, random_weights, write_model

ARGS: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 2}
FLAGS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "2", "--num-gpu-blocks-override", "17")
FORWARD = "forward-2.bin"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("compile") / "model")


@pytest.fixture(scope="module")
def store(model: Path) -> Path:
    """Made from the config alone."""
    out = model.parent / "store"
    assert main([str(model / "config.json"), "--device", "cpu", *FLAGS, "--out", str(out)]) == 0
    return out


def start(model: Path, store: Path, caplog: pytest.LogCaptureFixture, **changes: Any) -> tuple[list[str], list[str]]:
    """Run an engine with this store: what was compiled although it is there, and the warnings."""
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **more: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            compiled.append(str(more.get("fun_name")))

    caplog.clear()
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with caplog.at_level(logging.WARNING, "jaxpaged"):
            engine = Engine(EngineConfig.from_kwargs(model=str(model), compiled=str(store), **ARGS | changes))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    prompt = random_prompt(20, 1)
    engine.add_request(EngineRequest("r", tuple(prompt), SamplingParams(temperature=0), 12))
    engine.add_request(EngineRequest("sampled", tuple(prompt), SamplingParams(top_p=0.9, seed=1, logprobs=2), 12))
    ids: list[int] = []
    while engine.has_work():
        for delta in engine.step().deltas:
            if delta.request_id == "r":
                ids += delta.token_ids
    engine.shutdown()
    assert Reference(CONFIG, random_weights()).error(prompt, ids, 12) is None
    programs = ("forward", "_sample", "_sample_full", "_admit", "_admit_full", "_write_table")
    return [name for name in compiled if name in programs], [record.getMessage() for record in caplog.records]


def test_an_engine_takes_its_programs_from_the_store(model: Path, store: Path,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is traced, let alone compiled; the number of blocks is the store's."""
    traced, warnings = start(model, store, caplog)
    assert not traced and not warnings
    traced, _ = start(model, store, caplog, num_gpu_blocks_override=18)
    assert "forward" in traced, "the test does not see what is traced"


def test_a_store_made_after_an_engine_that_took_its_programs_from_the_cache(
        model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """XLA loads a program that was written down twice, and fails when it first runs."""
    for _ in range(2):
        jax.clear_caches()  # the second finds all in the cache on disk
        Engine(EngineConfig.from_kwargs(model=str(model), num_gpu_blocks_override=17, **ARGS)).shutdown()
    assert main([str(model / "config.json"), "--device", "cpu", *FLAGS, "--out", str(tmp_path / "store")]) == 0
    traced, warnings = start(model, tmp_path / "store", caplog)
    assert not traced and not warnings


def test_a_store_of_something_else_is_refused_with_one_warning(model: Path, store: Path, tmp_path: Path,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    for changes, what in (({"max_num_seqs": 1}, "shape"), ({"cpu_attention": "xla"}, "native_kernels")):
        _, [warning] = start(model, store, caplog, enforce_eager=True, **changes)
        assert f"another {what}" in warning and "compiling instead" in warning
    other = tmp_path / "other"
    shutil.copytree(store, other)
    manifest = json.loads((other / "store.json").read_text())
    manifest["key"] |= {"jaxlib": "0.1.0", "device": "NVIDIA H200"}
    (other / "store.json").write_text(json.dumps(manifest))
    _, [warning] = start(model, other, caplog, enforce_eager=True)
    assert "another device, jaxlib (NVIDIA H200 there, cpu here)" in warning


def test_a_store_is_for_the_same_windows_in_the_same_layers() -> None:
    device = select_device("cpu")
    config = EngineConfig(model="none", num_gpu_blocks_override=17)
    source = model_of(config, CONFIG, "cpu")
    keys = []
    for windows in ((None, None), (None, 21), (21, None), (21, 21), (21, 37), (37, 21), (None, 37), (None, 21)):
        windowed = replace(source, config=with_windows(source.config, windows))
        layout = layout_of(config, windowed, device, print)
        keys.append(json.dumps(programs_of(config, layout, layout.definition, device, print).key))
    assert len(set(keys)) == 7 and keys[-1] == keys[1]


class Command:
    """Runs a command when it is unpickled in the ordinary way."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


@pytest.mark.parametrize("damage", ["cut", "missing", "empty folder", "no pickle", "not json", "command",
                                    "command inside", "writable file", "writable folder"])
def test_a_damaged_store_is_left_alone_with_one_warning(model: Path, store: Path, tmp_path: Path, damage: str,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(store, broken)
    file, manifest = broken / FORWARD, broken / "store.json"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "missing":
        file.unlink()
    elif damage == "empty folder":
        shutil.rmtree(broken)
        broken.mkdir()
    elif damage == "not json":
        manifest.write_text("{")
    elif damage.startswith("writable"):
        (file if damage == "writable file" else broken).chmod(0o775)
    else:
        command = Command(f"touch {tmp_path / 'has run'}")
        _, in_tree, out_tree = pickle.loads(file.read_bytes())
        data = {"no pickle": b"nonsense", "command": pickle.dumps(command),
                "command inside": pickle.dumps((pickle.dumps(command), in_tree, out_tree))}[damage]
        file.write_bytes(data)
        content = json.loads(manifest.read_text())
        content["programs"][FORWARD] = hashlib.sha256(data).hexdigest()
        manifest.write_text(json.dumps(content))
    _, [warning] = start(model, broken, caplog, num_gpu_blocks_override=17, enforce_eager=True)
    assert str(broken) in warning and "compiling instead" in warning
    assert not (tmp_path / "has run").exists()
    assert ("system" in warning) == damage.startswith("command")
    assert ("chmod go-w" in warning) == damage.startswith("writable")


def table_of(text: str) -> dict[str, list[str]]:
    """The cells of each program."""
    return {cells[0]: cells[1:] for line in text.splitlines() if line.startswith("| ")
            for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}


@pytest.mark.slow
@pytest.mark.parametrize("device", GPUS)
def test_every_device_by_its_name(model: Path, tmp_path: Path, device: str) -> None:
    """The command itself, and a store that names the device it is for."""
    pytest.importorskip("jax_plugins", reason="JAX's CUDA plugin is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "jaxpaged.compile", str(model / "config.json"), "--device", device, "--dtype",
         "bfloat16", *FLAGS, "--out", str(tmp_path / "store")],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = table_of(done.stdout)
    forward, sample = rows["forward 2"], rows["sample 2"]
    assert int(forward[6]) == 1 and 4 < int(forward[4].split()[0]) < 40 and sample[4] == "1"
    manifest = json.loads((tmp_path / "store" / "store.json").read_text())
    assert manifest["key"]["device"] == GPUS[device].kind and manifest["num_blocks"] == 17
    assert len(manifest["programs"]) == len(rows) - 1 and "Compiling programs" in done.stderr


@pytest.mark.slow
def test_the_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For an absent GPU, shared by two: collectives, kernels, and one command buffer around them."""
    pytest.importorskip("jax_plugins", reason="JAX's CUDA plugin is not installed")
    assert main([str(model / "config.json"), "--device", "h200", "-tp", "2", "--dtype", "bfloat16", *FLAGS]) == 0
    text = capsys.readouterr().out
    assert "on each of 2 devices" in text
    rows = table_of(text)
    assert rows["program"] == ["seconds", "arguments", "aliased", "temporaries", "kernels", "collectives",
                               "command buffers"]
    forward = rows["forward 2"]
    assert forward[5] == "5" and int(forward[6]) >= 1, "two sums per layer and the embedding's"
    assert re.fullmatch(r"\d+ per layer", forward[4]) and 4 < int(forward[4].split()[0]) < 40
    assert rows["sample 2"][5] == "7"


@pytest.mark.slow
def test_a_layer_has_as_many_kernels_with_windows_in_others(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a second kind of layer adds once to a step is not counted as a layer's."""
    pytest.importorskip("jax_plugins", reason="JAX's CUDA plugin is not installed")
    windows = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 21,
               "layer_types": ["full_attention", "sliding_attention"]}
    found = []
    for more in ((), ("--hf-overrides", json.dumps(windows))):
        assert main([str(model / "config.json"), "--device", "h200", "--dtype", "bfloat16", *FLAGS, *more]) == 0
        text = capsys.readouterr().out
        assert ("KV groups keep all tokens" in text) == bool(more)
        found.append([row[4] for name, row in table_of(text).items() if name.startswith("forward")])
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.parametrize("device", ["a100-80g", "a10"])
def test_fp8_pages_for_a_gpu_without_fp8_are_one_error(
    model: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is lowered: the compiler would end the process."""
    pytest.importorskip("jax_plugins", reason="JAX's CUDA plugin is not installed")
    assert main([str(model / "config.json"), "--device", device, "--kv-cache-dtype", "fp8", *FLAGS]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("is older; use int8")


def test_a_missing_compiler_is_one_error(model: Path, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(model / "config.json"), "--device", "h200", *FLAGS]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "pip install 'jax[cuda12-local]'" in line


def test_other_files_are_not_overwritten(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--device", "cpu", "--out", str(model)]) == 1
    assert "contains other files" in capsys.readouterr().err
