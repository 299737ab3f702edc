"""GGUF files of each family, written as llama.cpp's converters do, give the logits of the checkpoints they come from.

Names are the gguf package's own.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.gguf_families import GGUF_FAMILIES
from tests.models.test_models import reference_logits, write_checkpoint
from tests.models.test_twins import twin_logits, write_twin
from tests.support.paged_model import PagedModel
from tests.support.tiny_gguf import add_value, finish
from tests.support.tiny_llama import random_prompt


@dataclass(frozen=True)
class Case:
    """A checkpoint of tests/models/test_models.py, and what its converter does.

    Attributes:
        metadata: keys besides the common ones; `rope` of head_dim is rotated.
        permuted: rows of queries and keys are written with neighboring rotary pairs.
        plus_one: 1 is added to the scales of norms.
    """

    arch: str
    metadata: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False
    plus_one: bool = False
    tensors: dict[str, list[float]] = field(default_factory=dict)


CASES = {
    "gemma": Case("gemma", plus_one=True),
    "gemma2 as converted": Case("gemma2", {"attention.sliding_window": 21, "attn_logit_softcapping": 4.0,
                                           "final_logit_softcapping": 30.0}, plus_one=True),
    "gemma3 as converted": Case("gemma3", {"attention.sliding_window": 21, "rope.scaling.type": "linear",
                                           "rope.scaling.factor": 8.0}, plus_one=True),
    "phi3": Case("phi3", {"attention.sliding_window": 40}),
    "phi4-mini": Case("phi3", {"rope.dimension_count": 24, "rope.scaling.original_context_length": 64,
                               "rope.scaling.attn_factor": (1 + np.log(2) / np.log(64)) ** 0.5},
                      tensors={"rope_factors_short.weight": [1 + index / 16 for index in range(12)],
                               "rope_factors_long.weight": [2.0 + index for index in range(12)]}),
    "glm4": Case("glm4", {"rope.dimension_count": 12}),
    "granite": Case("granite", {"attention.scale": 0.1, "embedding_scale": 3.0, "residual_scale": 0.4,
                                "logit_scale": 0.7}, permuted=True),
    "cohere": Case("command-r", {"logit_scale": 0.2}),
    "cohere2 as converted": Case("cohere2", {"logit_scale": 0.2, "attention.sliding_window": 21}),
    "olmo2": Case("olmo2"),
    "smollm3 as converted": Case("smollm3", permuted=True),
    "exaone4 as converted": Case("exaone4", {"attention.sliding_window": 21}),
    "ministral3": Case("mistral3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                    "rope.scaling.original_context_length": 32, "attention.temperature_scale": 0.5,
                                    "rope.scaling.yarn_log_multiplier": 1.0}, permuted=True),
    "mistral without a window": Case("mistral3", permuted=True),
    "seed-oss": Case("seed_oss"),
    "starcoder2": Case("starcoder2", {"attention.sliding_window": 21}),
    "gpt2": Case("gpt2"),
    "pythia": Case("gptneox", {"rope.dimension_count": 4, "use_parallel_residual": True}),
    "gpt-neox in sequence": Case("gptneox", {"rope.dimension_count": 8, "use_parallel_residual": False}),
    "falcon 7b": Case("falcon"),
    "falcon 40b": Case("falcon"),
    "falcon 11b": Case("falcon"),
}


# Of tests/models/test_twins.py: the converter writes what it would for the twin, but for ChatGLM.
TWIN_CASES = {
    "internlm2": Case("internlm2", permuted=True),
    "minicpm": Case("minicpm", {"embedding_scale": 12, "residual_scale": 1.4 / 2**0.5, "logit_scale": 4},
                    permuted=True),
    "minicpm of an old file": Case("minicpm", permuted=True),
    "chatglm2": Case("chatglm", {"rope.dimension_count": 8}),
    "chatglm3 32k": Case("chatglm", {"rope.dimension_count": 8}),
}


def write(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], case: Case) -> Path:
    """What llama.cpp's converter writes for a checkpoint."""
    heads, width = (first_of(config, *names) for names in (("num_attention_heads", "n_head"),
                                                           ("hidden_size", "n_embd")))
    kv_heads: Any = {"gpt2": heads, "gpt_neox": heads, "falcon": config.get("num_kv_heads")}.get(
        config["model_type"], config.get("num_key_value_heads"))
    if config["model_type"] == "falcon" and not config["new_decoder_architecture"]:
        kv_heads = 1
    head_dim = config.get("head_dim") or width // heads
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.arch)
    writer = gguf.GGUFWriter(path, case.arch)
    layers = first_of(config, "num_hidden_layers", "n_layer")
    writer.add_block_count(layers)
    writer.add_context_length(first_of(config, "max_position_embeddings", "n_positions"))
    writer.add_embedding_length(width)
    inner = ("ffn_hidden_size",) if case.arch == "falcon" else ("n_inner",) if case.arch == "gpt2" else (
        "intermediate_size",)
    writer.add_feed_forward_length(first_of(config, *inner, default=4 * width))
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if table := config.get("rope_parameters"):
        writer.add_rope_freq_base(table.get("full_attention", table)["rope_theta"])
    eps = first_of(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", default=None)
    if eps is not None:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(256)
    for key, value in ({"rope.dimension_count": head_dim} | case.metadata).items():
        add_value(writer, f"{case.arch}.{key}", value if isinstance(value, int | str) else float(value))
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in tensors.items():
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if case.permuted and part in name:
                halves = tensor.reshape(count, 2, head_dim // 2, *tensor.shape[1:])
                tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if "query_key_value" in name and case.arch != "chatglm":
            groups = tensor.reshape(kv_heads, heads // kv_heads + 2, head_dim, *tensor.shape[1:])
            parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
            tensor = np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        if case.arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = np.ascontiguousarray(tensor.T)
        if case.plus_one and name.endswith("norm.weight"):
            tensor = tensor + 1
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        writer.add_tensor(written, tensor)
    for name, numbers in case.tensors.items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    finish(writer)
    return path


def first_of(config: dict[str, Any], *names: str, default: Any = None) -> Any:
    """The first of these keys that is not null."""
    return next((config[name] for name in names if config.get(name) is not None), default)


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", name)
    tokens = random_prompt(100, 1)
    wanted = reference_logits(folder, tokens)
    path = write(tmp_path / "model.gguf", open_checkpoint(folder).config, load_file(folder / "model.safetensors"),
                 CASES[name])
    [found] = PagedModel(path, rows=len(tokens)).step((0, 0, tokens))
    np.testing.assert_allclose(found, wanted, atol=5e-5 * wanted.std(), rtol=1e-4)


@pytest.mark.parametrize("name", TWIN_CASES)
def test_logits_of_families_with_a_twin(name: str, tmp_path: Path) -> None:
    twin = "minicpm 2b" if "old" in name else name
    tokens = random_prompt(100, 1)
    model = write_twin(tmp_path / "model", twin)
    wanted = twin_logits(twin, model, tokens)
    tensors = {key: value.numpy() for key, value in model.state_dict().items()
               if not (key == "lm_head.weight" and model.config.tie_word_embeddings)}
    if "chatglm" in name:  # which the converter leaves as they are
        stored = load_file(tmp_path / "model" / "model.safetensors")
        tensors = {key.removeprefix("transformer."): tensor for key, tensor in stored.items()
                   if not key.endswith("inv_freq")}
    path = write(tmp_path / "model.gguf", model.config.to_dict(), tensors, TWIN_CASES[name])
    [found] = PagedModel(path, rows=len(tokens)).step((0, 0, tokens))
    np.testing.assert_allclose(found, wanted, atol=5e-5 * wanted.std(), rtol=1e-4)


def test_every_family_is_tested() -> None:
    assert {case.arch for case in (CASES | TWIN_CASES).values()} >= GGUF_FAMILIES.keys() - {"llama", "qwen2", "qwen3"}
