"""The Qwen3 family, dense: Qwen2 without biases, and with norms of each head's queries and keys."""

from typing import Any

from jaxpaged.models import llama, qwen2
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, norm_spec, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, rotated

DEFAULTS: dict[str, Any] = qwen2.DEFAULTS | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False,
}
IGNORED = llama.IGNORED
HEAD_NORMS = (
    WeightRule(rotated("model.layers.{i}.self_attn.q_norm.weight"), "layers.{i}.attn.q_norm.scale", as_is),
    WeightRule(rotated("model.layers.{i}.self_attn.k_norm.weight"), "layers.{i}.attn.k_norm.scale", as_is),
)
WEIGHTS = (*llama.WEIGHTS, *HEAD_NORMS)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    return common_config(hf, attention={"qk_norm": norm_spec(hf)}, mlp={"bias": False}, windows=qwen2.windows(hf),
                         reads=qwen2.READS)
