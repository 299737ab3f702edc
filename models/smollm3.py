"""The SmolLM3 family: Llama with a tied head, and layers whose queries and keys are not rotated."""

from typing import Any

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, layer_types, layer_windows, size, with_defaults

DEFAULTS: dict[str, Any] = {key: value for key, value in llama.DEFAULTS.items() if key != "head_dim"} | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
    "eos_token_id": 128001, "tie_word_embeddings": True, "rope_theta": 2000000.0, "use_sliding_window": False,
    "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None,
}
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a SmolLM3 checkpoint; where there are windows, the layers that are not rotated have them."""
    hf = with_defaults(hf, DEFAULTS)
    layers, every = size(hf, "num_hidden_layers"), size(hf, "no_rope_layer_interval")
    rotated = hf.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or not all(item in (0, 1) for item in rotated):
        raise CheckpointError(f"config.json: no_rope_layers must be a list of {layers} numbers, each 0 or 1")
    windowed = flag(hf, "use_sliding_window") and hf["sliding_window"] is not None
    hf |= {"layer_types": layer_types(hf, lambda layer: windowed and not rotated[layer])}
    return common_config(
        hf, windows=layer_windows(hf) if windowed else (),
        unrotated=[index for index, item in enumerate(rotated) if not item],
        reads=("sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval"))
