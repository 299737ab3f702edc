"""The OLMoE family: Llama with mixtures of experts, and norms over all heads' queries, and keys, together."""

from typing import Any

from jaxpaged.models import llama, olmo2, qwen2_moe
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, norm_spec, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec
from jaxpaged.models.weight_rules import experts, fused_experts

DEFAULTS: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048,
    "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": None,
    "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 50279,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "attention_bias": False, "num_experts_per_tok": 8,
    "num_experts": 64, "norm_topk_prob": False,
}
IGNORED = llama.IGNORED
WEIGHTS = (*llama.WEIGHTS, *olmo2.HEAD_NORMS, qwen2_moe.ROUTER,
           *experts("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj"),
           *fused_experts("model.layers.{i}.mlp"))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an OLMoE checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec = experts_spec(hf, "intermediate_size")
    return common_config(hf, attention={"qk_norm": norm_spec(hf), "qk_norm_over": "all heads"}, reads=COUNTS,
                         experts=lambda layer: spec)
