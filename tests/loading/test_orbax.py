"""Models saved with Orbax: the same weights and tokenizer, errors in one line, and how much memory it takes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxpaged.commands.convert import main
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import CheckpointError
from jaxpaged.engine.engine import Engine
from jaxpaged.loading.checkpoint import open_model
from jaxpaged.loading.orbax import OrbaxCheckpoint
from jaxpaged.text.tokenizer_files import load_tokenizer
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, random_weights, write_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("orbax") / "model")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    out = source.parent / "converted"
    assert main([str(source), str(out)]) == 0
    return out


def load(path: Path, **more: Any) -> dict[Any, Any]:
    engine = Engine(EngineConfig.from_kwargs(model=str(path), **ENGINE_ARGS | more))
    params = engine.params
    engine.shutdown()
    return params


def test_a_converted_model_has_the_same_weights(source: Path, converted: Path) -> None:
    assert isinstance(open_model(converted), OrbaxCheckpoint)
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(source))  # raises where the trees differ, too
    assert json.loads((converted / "config.json").read_text()) == CONFIG | {"dtype": "float32"}


def test_a_dtype_can_be_chosen_and_changed_on_the_way_back(source: Path, tmp_path: Path) -> None:
    assert main([str(source), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype("bfloat16"), load(source))
    back = load(tmp_path / "half")
    jax.tree.map(lambda ours, theirs: np.testing.assert_array_equal(ours, theirs.astype(np.float32)), back, rounded)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_the_embedded_model_with_its_tokenizer(smollm2_path: Path, tmp_path: Path) -> None:
    """From GGUF: the tokenizer in it is saved as files."""
    out = tmp_path / "converted"
    assert main([str(smollm2_path), str(out), "--dtype", "float32"]) == 0
    ours, theirs = load_tokenizer(out), load_tokenizer(smollm2_path)
    messages = [{"role": "user", "content": "Grüße, 世界! <|im_end|>\n\n  def f(): pass"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.encode(str(messages)) == theirs.encode(str(messages))
    assert ours.eos_token_ids < theirs.eos_token_ids == {0, 2, 4}
    assert open_model(out).generation_config == {"eos_token_id": [0, 2, 4]}
    jax.tree.map(np.testing.assert_array_equal, load(out), load(smollm2_path, quantization="none"))


def test_what_is_in_the_way_is_not_overwritten(source: Path, converted: Path, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), str(converted)]) == 1
    assert "not an empty directory" in capsys.readouterr().err
    assert main([str(converted), str(tmp_path / "again")]) == 1
    assert "already" in capsys.readouterr().err


def test_arrays_that_are_not_the_models_are_named(converted: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(converted, wrong)
    (wrong / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3, "intermediate_size": 64}))
    with pytest.raises(CheckpointError) as caught:
        load(wrong)
    text = str(caught.value)
    assert "tensor layers.2.attn.qkv.kernel.0 is missing" in text
    assert "tensor layers.0.mlp.gate_up.kernel.1 has shape [64, 96], which does not fit the part [64, 64] of" in text
    assert text.endswith("Convert the model again if its files may be damaged, or if another version converted them.")


# Runs in its own process: reads that are still under way when Orbax closes its event loop end in warnings at any time.
_LOAD_DAMAGED = """
import sys
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import CheckpointError
from jaxpaged.engine.startup import prepare
for path in sys.argv[1:]:
    try:
        prepare(EngineConfig(model=path, device="cpu", enforce_eager=True, num_gpu_blocks_override=9), print)
    except CheckpointError as error:
        print("refused:", error)
"""


def test_a_damaged_file_is_a_checkpoint_error(converted: Path, tmp_path: Path) -> None:
    for how in ("truncated", "missing"):
        shutil.copytree(converted, tmp_path / how)
        for file in (tmp_path / how / "params").rglob("d/*"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if how == "truncated" else file.unlink()
    command = [sys.executable, "-c", _LOAD_DAMAGED, str(tmp_path / "truncated"), str(tmp_path / "missing")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(refused) == 2 and all("cannot read" in line for line in refused), done.stdout


def test_nothing_else_imports_orbax() -> None:
    code = "import sys, jaxpaged.engine.startup, jaxpaged.loading.orbax\nassert 'orbax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# Runs in a fresh process, so that its peak memory is that of one operation.
_MEASURE = """
import sys
from pathlib import Path
import jax
import orbax.checkpoint
from jaxpaged.commands.convert import main
from jaxpaged.core.config import EngineConfig
from jaxpaged.execution.devices import select_device
from jaxpaged.engine.startup import prepare
what, source, target, devices = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
select_device("cpu", devices)
jax.block_until_ready(jax.numpy.zeros(8) + 1)
def peak():  # not ru_maxrss, which begins with what the parent had
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
before = peak()
if what == "convert":
    assert main([source, target]) == 0
else:
    ready = prepare(EngineConfig(model=source, tensor_parallel_size=devices, enforce_eager=True, max_num_seqs=1,
                                 max_num_batched_tokens=1, num_gpu_blocks_override=2, cpu_attention="xla"), print)
print(peak() - before)
"""


def over(what: str, path: Path, out: Path, devices: int = 1) -> int:
    """Peak bytes that a process holds besides the parameters while it does this."""
    done = subprocess.run([sys.executable, "-c", _MEASURE, what, str(path), str(out), str(devices)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]) - PARAMETERS


LARGE: dict[str, Any] = CONFIG | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
                                  "tie_word_embeddings": True, "num_attention_heads": 16, "num_key_value_heads": 16,
                                  "head_dim": 64}
TENSOR = 4 * 1024 * 4096
PARAMETERS = 2 * (4 * 1024 * 1024 * 4 + 3 * TENSOR) + 257 * 1024 * 4
# One tensor, and the programs and file buffers, whatever the tensors' size.
MAX_BYTES = TENSOR + 32 * 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of 128 MiB in every format, converted in little memory."""
    folder = tmp_path_factory.mktemp("large")
    weights = random_weights(LARGE)
    found = {"safetensors": write_model(folder / "model", LARGE), "orbax": folder / "out",
             "gguf": write_gguf(folder / "model.gguf", LARGE, weights, Kind.Q8_0)}
    assert over("convert", found["safetensors"], found["orbax"]) < MAX_BYTES
    return found


@pytest.mark.parametrize(("kind", "devices"), [
    ("safetensors", 1), ("gguf", 2), ("orbax", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("safetensors", 2), ("gguf", 1), ("orbax", 1)))])
def test_peak_memory_is_little_more_than_the_parameters(large: dict[str, Path], kind: str, devices: int) -> None:
    """Loaded onto one device, or shared by two."""
    found = over("load", large[kind], large["orbax"], devices)
    assert found < MAX_BYTES, f"{found / 2**20:.0f} MiB besides the parameters"
