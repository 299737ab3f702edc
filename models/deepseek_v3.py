"""The DeepSeek-V3 family, R1 and Kimi K2 included: latent attention, and experts after dense layers."""

from typing import Any

from jaxpaged.models import glm4_moe, latent_weights
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import flag, with_defaults
from jaxpaged.models.mixture_config import COUNTS, corrected_experts, whole

DEFAULTS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "eos_token_id": 1,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_interleave": True, "attention_bias": False,
}
IGNORED = glm4_moe.IGNORED
WEIGHTS = (*latent_weights.WEIGHTS, *glm4_moe.MIXTURE)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a DeepSeek-V3 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec, dense = corrected_experts(hf), whole(hf, "first_k_dense_replace")
    return latent_weights.latent_config(hf, neighbors=flag(hf, "rope_interleave"), mlp={"bias": False},
                                        reads=(*latent_weights.READS, *COUNTS),
                                        experts=lambda layer: spec if layer >= dense else None)
