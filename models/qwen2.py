"""The Qwen2 family, Qwen2.5 included: Llama with biases on queries, keys and values alone."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_windows

IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2 checkpoint."""
    return common_config(hf, attention={"bias": True, "output_bias": False}, mlp={"bias": False}, windows=windows(hf))


def windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer: that of the layers from max_window_layers on, where it is switched on."""
    return layer_windows(hf, hf.get("max_window_layers", 28)) if hf.get("use_sliding_window") else ()
