"""The GLM-4.5 family, 4.6 and 4.7 included: Llama with half of each head rotated, and experts after dense layers."""

from typing import Any

from jaxpaged.models import llama, qwen2_moe, qwen3
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, norm_spec, with_defaults
from jaxpaged.models.mixture_config import COUNTS, corrected_experts, whole
from jaxpaged.models.weight_rules import choice_bias, experts, fused_experts, shared_mlp

DEFAULTS: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096,
    "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "eos_token_id": None,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "attention_bias": False,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "use_qk_norm": False,
}
# A layer beyond the last predicts further tokens.
IGNORED = (*llama.IGNORED, "model.layers.{n}.*")
_MLP = "model.layers.{i}.mlp"
MIXTURE = (
    qwen2_moe.ROUTER, choice_bias(f"{_MLP}.gate.e_score_correction_bias"), *shared_mlp(f"{_MLP}.shared_experts"),
    *experts(_MLP, "gate_proj", "up_proj", "down_proj"), *fused_experts(_MLP))
WEIGHTS = (*qwen3.WEIGHTS, *MIXTURE)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GLM-4.5 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec, dense = corrected_experts(hf), whole(hf, "first_k_dense_replace")
    return common_config(hf, attention={"output_bias": False, "qk_norm": norm_spec(hf) if flag(hf, "use_qk_norm")
                                        else None}, mlp={"bias": False},
                         reads=("partial_rotary_factor", "use_qk_norm", *COUNTS),
                         experts=lambda layer: spec if layer >= dense else None)
