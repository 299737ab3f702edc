"""The DeepSeek-V2 family, V2-Lite included: latent attention, and experts by softmax after dense layers."""

from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.models import glm4_moe, latent_weights
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import flag, number, size, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec, whole

DEFAULTS: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
    "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407, "num_hidden_layers": 32,
    "num_attention_heads": 32, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False,
    "v_head_dim": 128, "num_experts_per_tok": None, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "eos_token_id": 2, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "attention_bias": False, "mlp_bias": False,
}
IGNORED = glm4_moe.IGNORED
WEIGHTS = (*latent_weights.WEIGHTS, *glm4_moe.MIXTURE)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a DeepSeek-V2 checkpoint.

    Raises:
        UnsupportedModelError: experts are chosen by another method, or their weights normalized: the released models'
            code and transformers do not agree on what that means.
    """
    hf = with_defaults(hf, DEFAULTS)
    groups = {"greedy": (1, 1), "group_limited_greedy": (size(hf, "n_group", 1), size(hf, "topk_group", 1))}
    method = hf["topk_method"]
    if not isinstance(method, str) or method not in groups:
        raise UnsupportedModelError(f"config.json: topk_method {method!r:.64} is not supported; supported are "
                                    f"{', '.join(groups)}")
    if flag(hf, "norm_topk_prob"):
        raise UnsupportedModelError("config.json: norm_topk_prob is not supported for this family")
    count, best = groups[method]
    spec = experts_spec(hf, "moe_intermediate_size", default_count="n_routed_experts", normalized=False,
                        rule={"groups": count, "best_groups": best, "scale": number(hf, "routed_scaling_factor", 1.0)},
                        shared_dim=whole(hf, "n_shared_experts") * size(hf, "moe_intermediate_size"))
    dense = whole(hf, "first_k_dense_replace")
    return latent_weights.latent_config(hf, neighbors=True, reads=(*latent_weights.READS, *COUNTS),
                                        experts=lambda layer: spec if layer >= dense else None)
