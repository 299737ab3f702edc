"""The Qwen2 family, Qwen2.5 included: Llama with biases on queries, keys and values alone."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_windows, with_defaults

DEFAULTS: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "eos_token_id": None,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}
READS = ("sliding_window", "layer_types")
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    return common_config(hf, attention={"bias": True, "output_bias": False}, mlp={"bias": False}, windows=windows(hf),
                         reads=READS)


def windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer: that of the layers from max_window_layers on, where it is switched on."""
    return layer_windows(hf, hf["max_window_layers"]) if hf["use_sliding_window"] else ()
