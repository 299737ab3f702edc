"""The engine with checkpoints whose weights are quantized: packed on a CPU, with the results of dequantized ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged import LLM, SamplingParams
from jaxpaged.commands.plan import main as plan
from jaxpaged.errors import ConfigError
from tests.engine.test_stored_blocks import leaves
from tests.support.quantized_checkpoints import KINDS, Tensors, gptq, random_numbers, write_both
from tests.support.sharded_process import run_cases
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, random_prompt, random_weights, write_model

PROMPTS = [random_prompt(length, length) for length in (1, 7, 40)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=3, detokenize=False)
PACKED = {"awq", "awq, old", "gptq", "gptq, old", "gptq v2", "gptq 8", "packed", "packed in order", "packed 8", "int8",
          "float8", "fp8", "fp8 square"}
QUICK = {"gptq"}


def answers(llm: LLM) -> list[Any]:
    return [(item.outputs[0].token_ids, item.outputs[0].logprobs)
            for item in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
                                  for name in sorted(KINDS)])
def test_answers_are_those_of_dequantized_weights(name: str, tmp_path: Path, model_path: Path) -> None:
    """Bitwise, except where inputs are put into an order and sums with them."""
    quantized, _ = write_both(tmp_path, KINDS[name], CONFIG, random_weights())
    opened = {how: LLM(str(quantized), tokenizer=str(model_path), quantization=how, **ENGINE_ARGS)
              for how in (None, "none")}
    with opened[None] as kept, opened["none"] as dense:
        layers = {name for name in leaves(dense) if name.startswith("layers.") and name.endswith(".kernel")}
        packed = {name.rpartition(".")[0] for name in leaves(kept) if name.endswith(".q")}
        assert packed == (layers if name in PACKED else set())
        found, wanted = answers(kept), answers(dense)
        if "order" not in name:
            assert found == wanted
        for one, other in zip(found, wanted, strict=True):
            assert one[0] == other[0]
            for mine, theirs in zip(one[1], other[1], strict=True):
                assert {token: item.logprob for token, item in mine.items()} == pytest.approx(
                    {token: item.logprob for token, item in theirs.items()}, abs=1e-4)
        if name in PACKED:
            small = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.get_params()["layers"]))
            large = sum(leaf.nbytes for leaf in jax.tree.leaves(dense.get_params()["layers"]))
            assert small < large / (2.5 if "8" in name else 3.8)


def test_a_method_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    quantized, plain = write_both(tmp_path, KINDS["awq"], CONFIG, random_weights())
    with pytest.raises(ConfigError, match=r"--quantization gptq, but .* are quantized by awq; leave the flag out"):
        LLM(str(quantized), quantization="gptq", **ENGINE_ARGS)
    with pytest.raises(ConfigError, match=r"--quantization awq_marlin, but .* are plain; leave the flag out"):
        LLM(str(plain), quantization="awq_marlin", **ENGINE_ARGS)
    with pytest.raises(ConfigError, match=r"quantization must be one of none, awq"):
        LLM(str(plain), quantization="squeezellm", **ENGINE_ARGS)


def test_products_whose_tensors_differ_are_dequantized(tmp_path: Path, model_path: Path) -> None:
    """Queries and keys of different orders of inputs, or of a different number of bits."""
    rng = np.random.default_rng(1)

    def change(tensors: Tensors) -> None:
        for layer, bits in ((0, 4), (1, 8)):
            stem = f"model.layers.{layer}.self_attn.k_proj"
            numbers = random_numbers(rng, (32, 64), 32, bits=bits, least=1, shuffled=bits == 4)
            tensors.update({f"{stem}.{last}": item for last, item in gptq(numbers, bits).items()})

    kind = replace(KINDS["gptq"], config={"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*k_proj": {"bits": 8}}})
    quantized, _ = write_both(tmp_path, kind, CONFIG, random_weights(), change=change)
    with LLM(str(quantized), tokenizer=str(model_path), **ENGINE_ARGS) as llm:
        packed = {name.rpartition(".")[0] for name in leaves(llm) if name.endswith(".q")}
    assert packed == {f"layers.{layer}.{name}.kernel" for layer in (0, 1)
                      for name in ("attn.o", "mlp.gate_up", "mlp.down")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_plain_weights_are_quantized_as_they_are_loaded(method: str, tmp_path: Path, model_path: Path) -> None:
    """To the nearest value of 8 bits, with a scale for each output of a layer's products."""
    weights = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in random_weights().items()}
    weights["model.layers.0.mlp.down_proj.weight"][3] = 0
    rounded = {}
    for name, tensor in weights.items():
        wide = rounded[name] = tensor.astype(np.float32)
        if ".layers." in name and tensor.ndim == 2:
            most = np.abs(wide).max(1, keepdims=True) / np.float32(127 if method == "int8" else 448)
            most[most == 0] = 1
            near = np.rint(wide / most) if method == "int8" else (wide / most).astype(ml_dtypes.float8_e4m3fn)
            rounded[name] = near.astype(np.float32) * most
            assert np.abs(rounded[name] - wide).max() < np.abs(wide).max() / 16
    for folder, tensors in (("plain", weights), ("rounded", rounded)):
        write_model(tmp_path / folder)
        save_file(tensors, tmp_path / folder / "model.safetensors")
    with (
        LLM(str(tmp_path / "plain"), tokenizer=str(model_path), quantization=method, **ENGINE_ARGS) as found,
        LLM(str(tmp_path / "rounded"), tokenizer=str(model_path), quantization="none", **ENGINE_ARGS) as wanted,
    ):
        assert sum(name.endswith(".q") for name in leaves(found)) == 8
        assert answers(found) == answers(wanted)
    with pytest.raises(ConfigError, match=rf"--quantization {method} needs the native products of a CPU"):
        LLM(str(tmp_path / "plain"), quantization=method, cpu_linear="xla", **ENGINE_ARGS)
    quantized, _ = write_both(tmp_path / "awq", KINDS["awq"], CONFIG, random_weights())
    with pytest.raises(ConfigError, match=rf"--quantization {method} quantizes plain .* quantized by awq"):
        LLM(str(quantized), quantization=method, **ENGINE_ARGS)


@pytest.mark.parametrize("name", [
    "gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "awq", "int8", "packed", "packed in order", "packed 8", "float8", "fp8 square", "fp8", "at load: fp8",
        "at load: int8"))])
def test_the_plan_knows_the_bytes_from_the_config_alone(
        name: str, tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = KINDS[name.replace("at load: ", "")]
    config = CONFIG | {"dtype": "float32" if name == "int8" else "float16" if "order" in name else "bfloat16"}
    folders = write_both(tmp_path, kind, config, random_weights())
    folder, flags = folders[name.startswith("at load")], {"quantization": name[9:]} if ": " in name else {}
    arguments = ["--no-compile", "--num-gpu-blocks-override", "33", *(f"--{key}={what}" for key, what in flags.items())]
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {
        "dtype": config["dtype"]}))
    assert plan([str(tmp_path / "config.json"), "--json", *arguments]) == 0
    planned = json.loads(capsys.readouterr().out)
    with LLM(str(folder), tokenizer=str(model_path), **ENGINE_ARGS | flags) as llm:
        held = llm.get_params()
    assert planned["parameters"] == sum(tensor.size for tensor in random_weights().values())
    # Embedding and head, which the test's files have in float32, are planned in the config's dtype.
    outer = sum(leaf.nbytes for leaf in jax.tree.leaves({key: held[key] for key in ("embed", "head")}))
    wanted = sum(leaf.nbytes for leaf in jax.tree.leaves(held)) - (outer // 2 if config["dtype"] != "float32" else 0)
    assert planned["weight_bytes"] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq, old", "packed in order", "int8"])
def test_devices_hold_their_own_part(name: str, tmp_path: Path) -> None:
    """Groups of all inputs are split; where an order mixes the inputs of several devices, weights are dequantized."""
    config = CONFIG | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "vocab_size": 256}
    quantized, _ = write_both(tmp_path, KINDS[name], config, random_weights(config))
    requests = [(prompt, {"temperature": 0}, 12) for prompt in PROMPTS]
    one, several = run_cases([{"size": size, "engine": {**ENGINE_ARGS, "model": str(quantized)}, "requests": requests}
                              for size in (1, 2)])
    assert several["ids"] == one["ids"]
    packed = {part for part in ("gate_up", "down") if isinstance(
        several["shapes"]["layers"]["0"]["mlp"][part]["kernel"], dict)}
    assert packed == ({"gate_up"} if "order" in name else {"gate_up", "down"})
