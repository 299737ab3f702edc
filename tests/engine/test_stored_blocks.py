"""GGUF files whose blocks stay as stored on the CPU: the results of their widened weights, in a fifth of the bytes."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.commands.plan import main as plan
from jaxpaged.errors import ConfigError
from tests.support import tiny_gguf
from tests.support.sharded_process import run_cases
from tests.support.tiny_llama import ENGINE_ARGS, random_prompt

CONFIG: dict[str, Any] = tiny_gguf.CONFIG | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192,
                                             "vocab_size": 256}
PROMPTS = [random_prompt(length, length) for length in (1, 7, 40)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=3, detokenize=False)
KINDS = ("Q4_0", "Q4_1", "Q8_0")


def write(folder: Path, kind: str, **changes: Any) -> Path:
    config = CONFIG | changes
    weights = tiny_gguf.random_weights(config)
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    return tiny_gguf.write_gguf(folder / f"{kind}.gguf", config, weights, gguf.GGMLQuantizationType[kind])


def leaves(llm: LLM) -> dict[str, str]:
    found = jax.tree_util.tree_leaves_with_path(llm.get_params())
    return {".".join(str(getattr(key, "key", key)) for key in path): leaf.dtype.name for path, leaf in found}


def opened(path: Path, tokenizer: Path, **more: Any) -> LLM:
    return LLM(path, tokenizer=str(tokenizer), **ENGINE_ARGS | more)


def answers(llm: LLM) -> list[Any]:
    return [(item.outputs[0].token_ids, item.outputs[0].logprobs)
            for item in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(("kind", "tied"), [
    pytest.param(kind, tied, marks=[] if tied == (kind == "Q4_1") else [pytest.mark.slow])
    for kind in KINDS for tied in (False, True)])
def test_answers_are_bitwise_those_of_widened_weights(kind: str, tied: bool, tmp_path: Path, model_path: Path) -> None:
    path = write(tmp_path, kind, tie_word_embeddings=tied)
    with opened(path, model_path) as kept, opened(path, model_path, quantization="none") as dense:
        assert set(leaves(dense).values()) == {"float32"}
        products = {name for name in leaves(dense) if name.endswith((".kernel", ".table"))}
        packed = {name.rpartition(".")[0] for name in leaves(kept) if name.endswith(".q")}
        assert packed == products, "some products are widened"
        assert answers(kept) == answers(dense)
        assert kept.info.weight_bytes < dense.info.weight_bytes / (3 if kind == "Q8_0" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_256(kind: str, tmp_path: Path, model_path: Path) -> None:
    """Which the gguf package does not write: all bytes are random, but the scales of scales."""
    config = CONFIG | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "tie_word_embeddings": True}
    path, rng = write(tmp_path, "Q8_0", **config), np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    with (
        opened(write_super_blocks(path, tmp_path / "k.gguf", kind, size, rng), model_path) as kept,
        opened(tmp_path / "k.gguf", model_path, quantization="none") as dense,
    ):
        assert {name.rpartition(".")[0] for name in leaves(kept) if name.endswith(".q")} == {
            name for name in leaves(dense) if name.endswith((".kernel", ".table"))}
        assert answers(kept) == answers(dense)
        assert kept.info.weight_bytes < dense.info.weight_bytes / 4


def write_super_blocks(source: Path, path: Path, kind: str, size: int, rng: np.random.Generator) -> Path:
    """The file with random blocks of another type in place of those of each matrix."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = field.types
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        rows, columns = (*map(int, tensor.shape[::-1]), 0)[:2]
        if not columns:
            writer.add_tensor(tensor.name, np.asarray(tensor.data))
            continue
        blocks = rng.integers(0, 256, (rows, columns // 256, size), np.uint8)
        # A Q6_K scale is up to 128 times that of its block, the others' up to 63 times.
        scale = np.full(1, 0.1 / (63 if kind != "Q6_K" else 128) / 16, np.float16).view(np.uint8)
        for first in (208,) if kind == "Q6_K" else (0, 2):
            blocks[..., first : first + 2] = scale
        writer.add_tensor(tensor.name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_does_not_fit_panels_is_widened(tmp_path: Path, model_path: Path) -> None:
    """A vocabulary that is not a multiple of 16; everything else stays."""
    path = write(tmp_path, "Q4_1", vocab_size=250)
    with opened(path, model_path) as kept, opened(path, model_path, quantization="none") as dense:
        names = leaves(kept)
        assert {"embed.table", "head.kernel", "layers.0.mlp.down.kernel.m"} <= names.keys()
        prompts = [[token % 250 for token in prompt] for prompt in PROMPTS]
        found, wanted = ([item.outputs[0].token_ids for item in llm.generate(prompts, GREEDY, use_tqdm=False)]
                         for llm in (kept, dense))
        assert found == wanted


def test_without_native_products_blocks_are_widened(tmp_path: Path, model_path: Path) -> None:
    with opened(write(tmp_path, "Q4_1"), model_path, cpu_linear="xla") as llm:
        assert set(leaves(llm).values()) == {"float32"}


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_devices_hold_their_own_blocks(devices: int, tmp_path: Path) -> None:
    """Where a device's part is whole blocks and panels; elsewhere the product is widened."""
    path = write(tmp_path, "Q4_1", num_key_value_heads=2)
    requests = [(prompt, {"temperature": 0}, 12) for prompt in PROMPTS]
    one, several = run_cases([{"size": size, "engine": {**ENGINE_ARGS, "model": str(path)}, "requests": requests}
                              for size in (1, devices)])
    assert several["ids"] == one["ids"]
    packed = {name for name in several["shapes"]["layers"]["0"]["mlp"]["gate_up"]["kernel"]}
    assert packed == {"q", "d", "m"}
    assert max(several["weights"]) < one["weights"][0] * 0.8


def test_new_weights_of_another_form_are_refused_with_the_flag_that_helps(tmp_path: Path, model_path: Path) -> None:
    path = write(tmp_path, "Q8_0")
    with opened(path, model_path) as llm:
        old = llm.get_params()
        with pytest.raises(ConfigError, match=r"--quantization none(.|\n)*is missing"):
            llm.update_weights({"embed": {"table": jnp.zeros((256, 128))}})
        before = answers(llm)
        llm.update_weights(jax.tree.map(lambda leaf: leaf * 0, old))
        assert answers(llm) != before
        llm.update_weights(old)
        assert answers(llm) == before


def test_the_plan_counts_the_bytes_that_the_engine_holds(
        tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "Q4_0")
    assert plan([str(path), "--json", "--no-compile", "--num-gpu-blocks-override", "33"]) == 0
    planned = json.loads(capsys.readouterr().out)
    with opened(path, model_path) as llm, opened(path, model_path, quantization="none") as dense:
        assert planned["weight_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(llm.get_params()))
        assert planned["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(dense.get_params()))
