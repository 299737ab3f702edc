"""The text model of a multimodal checkpoint computes what transformers' multimodal model does of a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.models.registry import find_family
from jaxpaged.models.rope_tables import merge_overrides
from jaxpaged.models.text_part import text_config
from tests.models.test_models import COMMON, WINDOW_FIRST, YARN
from tests.support.paged_model import PagedModel
from tests.support.tiny_llama import random_prompt, write_model

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16,
          "image_size": 28, "patch_size": 14}
TEXT = {key: value for key, value in COMMON.items() if key != "eos_token_id"} | {"head_dim": 24}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3", "vision_config": VISION | {"model_type": "siglip_vision_model"},
               "text_config": TEXT | {"model_type": "gemma3_text", "layer_types": WINDOW_FIRST, "sliding_window": 21},
               "mm_tokens_per_image": 4, "eos_token_id": [256, 255]},
    "mistral small 3": {"model_type": "mistral3", "vision_config": VISION | {"model_type": "pixtral"},
                        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None}, "eos_token_id": 256,
                        "tie_word_embeddings": False},
    "ministral 3": {"model_type": "mistral3", "vision_config": VISION | {"model_type": "pixtral"},
                    "text_config": TEXT | {"model_type": "ministral3", "rope_parameters": YARN | {
                        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
                    "eos_token_id": 256, "tie_word_embeddings": False},
}


def older_name(name: str) -> str:
    """As transformers 4 wrote it."""
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return f"language_model.{name}" if name.startswith("lm_head.") else name.removeprefix("model.")


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_text(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = write_model(tmp_path / "model")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**json.loads(json.dumps(MODELS[name])))).eval()
    for key, parameter in model.named_parameters():
        scale = 1.0 if "embed" in key else 0.2 if parameter.ndim == 1 else 2 * parameter.shape[1] ** -0.5
        parameter.data = ("norm" in key) + scale * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokens = random_prompt(60, 1)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    assert wanted.std() > 0.5
    file = folder / "model.safetensors"
    stored = load_file(file)
    assert any("vision" in item for item in stored)
    for rename in (str, older_name):
        save_file({rename(item): tensor for item, tensor in stored.items()}, file)
        [found] = PagedModel(folder, rows=len(tokens)).step((0, 0, tokens))
        np.testing.assert_allclose(found, wanted, atol=5e-5 * wanted.std(), rtol=1e-4)
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config["eos_token_id"] == MODELS[name]["eos_token_id"]
        assert {item.partition(".")[0] for item in checkpoint.names()} <= {"model", "lm_head"}


def test_its_config() -> None:
    """What is beside text_config holds for the text model; overrides are of that."""
    text = TEXT | {"model_type": "gemma3_text", "eos_token_id": 1, "dtype": "float32"}
    hf = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
          "eos_token_id": [1, 106], "tie_word_embeddings": False, "dtype": "bfloat16"}
    found = merge_overrides(hf, {"sliding_window": 512})
    assert merge_overrides(hf, {"text_config": {"sliding_window": 512}}) == found
    assert found == TEXT | {"model_type": "gemma3_text", "eos_token_id": [1, 106], "tie_word_embeddings": False,
                            "dtype": "bfloat16", "sliding_window": 512}
    assert text_config(found) == found
    family = find_family(hf)
    assert family.model_type == "gemma3_text" and family.config_from_hf(hf).model_dim == TEXT["hidden_size"]
    assert text_config({**hf, "architectures": None, "text_config": TEXT})["model_type"] == "gemma3_text"
    with pytest.raises(CheckpointError, match="text_config of this multimodal model must be an object"):
        text_config({**hf, "text_config": None})


def test_a_tensor_of_no_known_part_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral", "architectures": None}
    hf = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(hf))
    more = {"vision_tower.a.weight": tensors["model.norm.weight"], "audio.weight": tensors["model.norm.weight"]}
    save_file(tensors | more, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor audio\.weight is not used") as caught:
        PagedModel(folder, rows=4)
    assert "vision_tower" not in str(caught.value)
