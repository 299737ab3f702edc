"""Whole models with mixtures of experts against transformers in float64, and the layouts of their checkpoints.

Rounding may send a token to another expert where two are nearly as good. Logits are compared up to the first token for
which, in any layer, the margin between the last expert that is chosen and the next is at most `MARGIN`.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import open_checkpoint
from tests.models.test_models import write_checkpoint
from tests.support.paged_model import PagedModel, load
from tests.support.tiny_llama import random_prompt

MARGIN = 1e-5
MIXTURES = "mixtral", "qwen2-moe", "qwen3-moe", "olmoe"
pytest.importorskip("torch", reason="torch is there on Python 3.11 only")


def exact_logits(folder: Path, tokens: list[int]) -> tuple[np.ndarray, int]:
    """[T, V] of transformers in float64, and the number of tokens up to the first near tie in a router."""
    import torch

    from tests.support.reference_model import ReferenceModel

    model = ReferenceModel(folder).model.double()
    model.set_experts_implementation("eager")  # its grouped products are for narrower dtypes
    top_k, margins = model.config.num_experts_per_tok, []
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(lambda module, args, output: margins.append(
                torch.softmax(output[0].double(), dim=-1).sort(dim=-1, descending=True).values))
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
    assert margins and logits.dtype == np.float64
    near = np.any([(scores[:, top_k - 1] - scores[:, top_k]).numpy() <= MARGIN for scores in margins], axis=0)
    return logits, int(np.argmax(near)) if near.any() else len(tokens)


@pytest.mark.parametrize("name", [
    "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES[1:])])
def test_logits_against_float64(name: str, tmp_path: Path) -> None:
    folder, tokens = write_checkpoint(tmp_path / "model", name), random_prompt(100, 3)
    wanted, clear = exact_logits(folder, tokens)
    [found] = PagedModel(folder, rows=100).step((0, 0, tokens))
    assert clear > 50, "too many near ties to mean anything"
    assert np.abs(found - wanted)[:clear].max() < 3e-4 * wanted.std()


def fused(weights: dict[str, np.ndarray], gate: str, up: str, down: str) -> dict[str, np.ndarray]:
    """The same experts in two tensors per layer, as transformers holds them, and the router where it has that."""
    found, layers = {}, {name.rpartition(".experts.")[0] for name in weights if ".experts." in name}
    for name, tensor in weights.items():
        if ".experts." not in name:
            found[name.replace("block_sparse_moe", "mlp")] = tensor
    for layer in layers:
        def stack(kind: str, layer: str = layer) -> np.ndarray:
            count = sum(name.startswith(f"{layer}.experts.") and name.endswith(f".{kind}.weight") for name in weights)
            return np.stack([weights[f"{layer}.experts.{number}.{kind}.weight"] for number in range(count)])

        experts = f"{layer.replace('block_sparse_moe', 'mlp')}.experts"
        found[f"{experts}.gate_up_proj"] = np.concatenate([stack(gate), stack(up)], axis=1)
        found[f"{experts}.down_proj"] = stack(down)
    return found


@pytest.mark.parametrize(("name", "kinds"), [
    ("mixtral", ("w1", "w3", "w2")), ("qwen2-moe", ("gate_proj", "up_proj", "down_proj"))])
def test_fused_experts_are_the_same_weights(name: str, kinds: tuple[str, str, str], tmp_path: Path) -> None:
    """In a checkpoint that has all experts of a layer in two tensors; missing and superfluous ones are named."""
    folder = write_checkpoint(tmp_path / "model", name)
    weights = load_file(folder / "model.safetensors")
    _, apart, _ = load(folder)
    together = fused(weights, *kinds)
    save_file(together, folder / "model.safetensors")
    _, stacked, _ = load(folder)
    jax.tree.map(np.testing.assert_array_equal, stacked, apart)
    layer = min(key for key in together if key.endswith("experts.down_proj"))
    save_file({key: tensor[:-1] if key == layer else tensor for key, tensor in together.items()},
              folder / "model.safetensors")
    path = "layers.0.mlp.expert_down.kernel"
    with pytest.raises(CheckpointError, match=rf"{layer} has shape .* does not fit parameter {path}"):
        load(folder)
    save_file({key: tensor for key, tensor in weights.items() if f"experts.2.{kinds[0]}" not in key},
              folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"experts.2.{kinds[0]}.weight is missing"):
        load(folder)


def test_what_is_beyond_the_last_layer_and_biases_of_choices(tmp_path: Path) -> None:
    """Layers that predict further tokens are not read; in 16 bits a bias on the choice keeps all of its bits."""
    folder = write_checkpoint(tmp_path / "model", "glm4-moe")
    weights = load_file(folder / "model.safetensors")
    further = {f"model.layers.3.{name}": np.ones(3, np.float32) for name in ("eh_proj.weight", "mlp.gate.weight")}
    save_file(weights | further, folder / "model.safetensors")
    mlp = load(folder, jnp.bfloat16)[1]["layers"][1]["mlp"]
    assert mlp["router"]["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(mlp["choice_bias"], weights["model.layers.1.mlp.gate.e_score_correction_bias"])
    save_file(weights | {"model.layers.2.eh_proj.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model.layers.2.eh_proj.weight is not used"):
        load(folder)


def test_experts_in_4_bits(tmp_path: Path) -> None:
    """As gpt-oss is released: the experts are those of a checkpoint with what the numbers stand for, in bfloat16."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, rng = write_checkpoint(tmp_path / "model", "gpt-oss"), np.random.default_rng(0)
    weights, packed = load_file(folder / "model.safetensors"), dict[str, np.ndarray]()
    config = json.loads((folder / "config.json").read_text())
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        count, size_in, size_out = weights.pop(name).shape
        blocks = rng.integers(0, 256, (count, size_out, size_in // 32, 16), np.uint8)
        scales = rng.integers(118, 126, blocks.shape[:3], np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
        weights[name] = plain.float().numpy()
    save_file(weights, folder / "model.safetensors")
    wanted = load(folder)[1]
    others = {name: tensor for name, tensor in weights.items() if f"{name}_blocks" not in packed}
    save_file(others | packed, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="gate_up_proj_blocks is not used"):
        load(folder)
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": table}))
    jax.tree.map(np.testing.assert_array_equal, load(folder)[1], wanted)
    checkpoint = open_checkpoint(folder)
    name, part = "model.layers.1.mlp.experts.2.up_proj.weight", (slice(5, 90), slice(7, 50))
    assert checkpoint.stored_type(name) == "bfloat16" and checkpoint.shape(name) == (96, 64)
    np.testing.assert_array_equal(checkpoint.read_tensor(name, part=part), checkpoint.read_tensor(name)[part])
    save_file(others | {name: item[..., :1] for name, item in packed.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has shape .* not \[experts, rows, blocks, 16\]"):
        load(folder)
