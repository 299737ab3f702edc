"""The Mistral family: Llama with a sliding window over every layer, in its first version."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_windows, with_defaults

DEFAULTS: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "eos_token_id": 2,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "sliding_window": 4096,
}
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Mistral checkpoint."""
    return mistral_config(with_defaults(hf, DEFAULTS))


def mistral_config(hf: dict[str, Any], **attention: Any) -> ModelConfig:
    """With fields of `AttentionSpec` that differ from Mistral's."""
    return common_config(hf, attention=attention, windows=layer_windows(hf), reads=("sliding_window", "layer_types"))
