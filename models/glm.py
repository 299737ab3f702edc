"""The GLM-4 family (GlmForCausalLM): Llama with half of each head rotated in neighboring pairs, and fused MLPs."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, with_defaults
from jaxpaged.models.phi3 import FUSED_GATE_UP
from jaxpaged.models.weight_rules import with_rules

DEFAULTS: dict[str, Any] = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "vocab_size": 151552, "hidden_size": 4096,
    "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
    "eos_token_id": None, "tie_word_embeddings": False, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
IGNORED = llama.IGNORED
WEIGHTS = with_rules(llama.WEIGHTS, FUSED_GATE_UP)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GLM-4 checkpoint."""
    return glm_config(with_defaults(hf, DEFAULTS))


def glm_config(hf: dict[str, Any], **layer: Any) -> ModelConfig:
    """With fields of `LayerSpec` that differ from Llama's."""
    if hf["eos_token_id"] is None:
        hf |= {"eos_token_id": [151329, 151336, 151338]}
    return common_config(hf, attention={"output_bias": False}, mlp={"bias": False}, layer=layer,
                         rope={"neighbors": True}, reads=("partial_rotary_factor",))
