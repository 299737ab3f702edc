"""The OLMo 2 family: norms after each block instead of before it, and over all heads' queries, and keys, together."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, norm_spec, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, norms, rotated, with_rules

_LLAMA = {key: value for key, value in llama.DEFAULTS.items() if key not in ("head_dim", "mlp_bias")}
DEFAULTS: dict[str, Any] = _LLAMA | {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 50304, "eos_token_id": 50279,
    "rms_norm_eps": 1e-5,
}
IGNORED = llama.IGNORED
AFTER = norms(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
HEAD_NORMS = (
    WeightRule(rotated("model.layers.{i}.self_attn.q_norm.weight"), "layers.{i}.attn.q_norm.scale", as_is, ("heads",)),
    WeightRule(rotated("model.layers.{i}.self_attn.k_norm.weight"), "layers.{i}.attn.k_norm.scale", as_is,
               ("kv_heads",)))
WEIGHTS = with_rules(llama.WEIGHTS, *AFTER, *HEAD_NORMS)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an OLMo 2 checkpoint."""
    return olmo_config(with_defaults(hf, DEFAULTS))


def olmo_config(hf: dict[str, Any], **changes: Any) -> ModelConfig:
    """With other arguments of `common_config`."""
    return common_config(hf, attention={"qk_norm": norm_spec(hf), "qk_norm_over": "all heads"}, mlp={"bias": False},
                         layer={"norms": "after"}, **changes)
