"""The text model of a multimodal checkpoint: its part of config.json, and the names of its tensors."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from jaxpaged.core.errors import CheckpointError

Item = TypeVar("Item")

# Architectures of multimodal models, each with its model_type, and that of a text model that says none.
MULTIMODAL = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral"),
}
# Beside text_config, where they win: transformers writes the defaults of the text model's class into it.
_SHARED = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
# As transformers 5 writes them, and as older versions did.
_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.",
             "language_model.lm_head.": "lm_head."}
_OTHERS = ("*vision_tower.*", "*multi_modal_projector.*")


def is_multimodal(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a multimodal model whose text model may be served."""
    names, model_type = hf.get("architectures"), hf.get("model_type")
    if names:
        return isinstance(names, list) and any(name in MULTIMODAL for name in names if isinstance(name, str))
    return any(model_type == known for known, _ in MULTIMODAL.values())


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The text model's config.json; any other config as it is.

    Raises:
        CheckpointError: a multimodal model's has no text_config.
    """
    if not is_multimodal(hf):
        return hf
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json: text_config of this multimodal model must be an object")
    names = hf.get("architectures") or []
    default = next(text_type for name, (model_type, text_type) in MULTIMODAL.items()
                   if name in names or (not names and model_type == hf["model_type"]))
    shared = {key: hf[key] for key in _SHARED if hf.get(key) is not None}
    given = {key: value for key, value in text.items() if key != "architectures"}
    return given | shared | {"model_type": text.get("model_type") or default}


def text_tensors(tensors: Mapping[str, Item]) -> dict[str, Item]:
    """The text model's tensors under the names that they have without the other parts, whose tensors are left out."""
    return {_own_name(name): item for name, item in tensors.items()
            if not any(fnmatchcase(name, pattern) for pattern in _OTHERS)}


def _own_name(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
