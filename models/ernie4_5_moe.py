"""The ERNIE 4.5 family with mixtures of experts: Llama rotated in neighboring pairs, and experts in later layers."""

from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.models import llama, qwen2_moe
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, size, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec, whole
from jaxpaged.models.weight_rules import choice_bias, experts, fused_experts, shared_mlp

DEFAULTS: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "vocab_size": 103424,
    "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "tie_word_embeddings": True, "rope_theta": 5e5, "use_bias": False,
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
}
# What predicts further tokens.
IGNORED = (*llama.IGNORED, "*.mtp_*", "model.layers.{n}.*")
_MLP = "model.layers.{i}.mlp"
WEIGHTS = (
    *llama.WEIGHTS, qwen2_moe.ROUTER, choice_bias(f"{_MLP}.moe_statics.e_score_correction_bias"),
    *shared_mlp(f"{_MLP}.shared_experts"), *experts(_MLP, "gate_proj", "up_proj", "down_proj"), *fused_experts(_MLP))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an ERNIE 4.5 checkpoint with experts.

    Raises:
        UnsupportedModelError: products have biases.
    """
    hf = with_defaults(hf, DEFAULTS)
    if flag(hf, "use_bias"):
        raise UnsupportedModelError("config.json: use_bias is not supported for this family")
    spec = experts_spec(hf, "moe_intermediate_size", default_count="moe_num_experts", chosen="moe_k", normalized=True,
                        choice_bias=True,
                        shared_dim=whole(hf, "moe_num_shared_experts") * size(hf, "moe_intermediate_size"))
    first, every = whole(hf, "moe_layer_start_index"), size(hf, "moe_layer_interval")
    last = size(hf, "num_hidden_layers") - 1 if hf["moe_layer_end_index"] == -1 else whole(hf, "moe_layer_end_index")
    return common_config(hf, rope={"neighbors": True}, reads=COUNTS,
                         experts=lambda layer: spec if first <= layer <= last and (layer + 1) % every == 0 else None)
