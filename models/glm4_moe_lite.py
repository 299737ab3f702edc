"""The GLM-4.7-Flash family: DeepSeek-V3 with other sizes."""

from typing import Any

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models import deepseek_v3, latent_weights
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import flag, with_defaults
from jaxpaged.models.mixture_config import COUNTS, corrected_experts

DEFAULTS: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154880,
    "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47,
    "num_attention_heads": 20, "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "norm_topk_prob": True, "hidden_act": "silu",
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "eos_token_id": 1, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "rope_interleave": True, "mlp_layer_types": None, "attention_bias": False,
}
IGNORED = deepseek_v3.IGNORED
WEIGHTS = deepseek_v3.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GLM-4.7-Flash checkpoint.

    Raises:
        CheckpointError: `mlp_layer_types` does not say of each layer whether it is dense or sparse.
    """
    hf = with_defaults(hf, DEFAULTS)
    spec, types, count = corrected_experts(hf), hf["mlp_layer_types"], hf["num_hidden_layers"]
    if types is None:  # in all but the first layer
        types = ["dense", *["sparse"] * count][:count]
    if not isinstance(types, list) or len(types) != count or not all(item in ("dense", "sparse") for item in types):
        raise CheckpointError(f"config.json: mlp_layer_types must be a list of {count}, each dense or sparse")
    return latent_weights.latent_config(hf, neighbors=flag(hf, "rope_interleave"), mlp={"bias": False},
                                        reads=(*latent_weights.READS, *COUNTS),
                                        experts=lambda layer: spec if types[layer] == "sparse" else None)
