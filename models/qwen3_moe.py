"""The Qwen3-MoE family: Qwen3 with mixtures of experts."""

from typing import Any

from jaxpaged.models import llama, qwen2_moe, qwen3
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_windows, norm_spec, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec, sparse_layers
from jaxpaged.models.weight_rules import experts, fused_experts

DEFAULTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "eos_token_id": None,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "attention_bias": False, "use_sliding_window": False,
    "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    "num_experts": 128, "norm_topk_prob": False, "mlp_only_layers": None,
}
IGNORED = llama.IGNORED
WEIGHTS = (*qwen3.WEIGHTS, qwen2_moe.ROUTER, *experts("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj"),
           *fused_experts("model.layers.{i}.mlp"))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3-MoE checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec, sparse = experts_spec(hf, "moe_intermediate_size"), sparse_layers(hf)
    return common_config(hf, attention={"qk_norm": norm_spec(hf)}, mlp={"bias": False},
                         windows=layer_windows(hf) if hf["use_sliding_window"] else (),
                         reads=("sliding_window", "layer_types", *COUNTS),
                         experts=lambda layer: spec if layer in sparse else None)
