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
    "seed-oss": Case("seed_oss"),
}


def write(path: Path, folder: Path, case: Case) -> Path:
    """What llama.cpp's converter writes for a checkpoint."""
    config, tensors = open_checkpoint(folder).config, load_file(folder / "model.safetensors")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or width // heads
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.arch)
    writer = gguf.GGUFWriter(path, case.arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    table = config["rope_parameters"]
    writer.add_rope_freq_base(table.get("full_attention", table)["rope_theta"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(256)
    for key, value in ({"rope.dimension_count": head_dim} | case.metadata).items():
        add_value(writer, f"{case.arch}.{key}", value if isinstance(value, int | str) else float(value))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if case.permuted and part in name:
                halves = tensor.reshape(count, 2, head_dim // 2, *tensor.shape[1:])
                tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if case.plus_one and name.endswith("norm.weight"):
            tensor = tensor + 1
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        writer.add_tensor(written, tensor)
    for name, numbers in case.tensors.items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", name)
    tokens = random_prompt(100, 1)
    wanted = reference_logits(folder, tokens)
    path = write(tmp_path / "model.gguf", folder, CASES[name])
    [found] = PagedModel(path, rows=len(tokens)).step((0, 0, tokens))
    np.testing.assert_allclose(found, wanted, atol=5e-5 * wanted.std(), rtol=1e-4)


def test_every_family_is_tested() -> None:
    assert {case.arch for case in CASES.values()} >= GGUF_FAMILIES.keys() - {"llama", "qwen2", "qwen3"}
