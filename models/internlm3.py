"""The InternLM3 family: Llama with its own keys for biases."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, with_defaults

DEFAULTS: dict[str, Any] = {
    "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "vocab_size": 128512, "hidden_size": 4096,
    "intermediate_size": 10240, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "eos_token_id": 2,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False,
}
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an InternLM3 checkpoint, whose own names for biases are qkv_bias, and bias for all others."""
    hf = with_defaults(hf, DEFAULTS)
    qkv, other = (flag(hf, own if own in hf else usual) for own, usual in (("qkv_bias", "attention_bias"),
                                                                           ("bias", "mlp_bias")))
    return common_config(hf, attention={"bias": qkv, "output_bias": other}, mlp={"bias": other})
