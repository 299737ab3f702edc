"""The Cohere family, Command R: parallel blocks after one layer norm, neighboring rotary pairs, a tied head."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, norm_spec, number, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, rotated, with_rules

DEFAULTS: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "vocab_size": 256000, "hidden_size": 8192,
    "intermediate_size": 22528, "logit_scale": 0.0625, "num_hidden_layers": 40, "num_attention_heads": 64,
    "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
    "eos_token_id": 255001, "tie_word_embeddings": True, "rope_theta": 500000.0, "attention_bias": False,
    "use_qk_norm": False,
}
IGNORED = llama.IGNORED
# Each head has a scale of its own.
WEIGHTS = with_rules(
    llama.WEIGHTS,
    WeightRule(rotated("model.layers.{i}.self_attn.q_norm.weight", 1), "layers.{i}.attn.q_norm.scale", as_is,
               ("heads", None)),
    WeightRule(rotated("model.layers.{i}.self_attn.k_norm.weight", 1), "layers.{i}.attn.k_norm.scale", as_is,
               ("kv_heads", None)))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Cohere checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    attention = {"qk_norm": layer_norm(hf), "qk_norm_over": "each head"} if flag(hf, "use_qk_norm") else None
    return common_config(hf, attention=attention, reads=("use_qk_norm", "logit_scale"), **parallel(hf))


def parallel(hf: dict[str, Any]) -> dict[str, Any]:
    """What both generations share."""
    return {"mlp": {"bias": False}, "layer": {"norms": "parallel"}, "rope": {"neighbors": True},
            "norm": layer_norm(hf), "logit_scale": number(hf, "logit_scale", 0.0625)}


def layer_norm(hf: dict[str, Any]) -> Any:
    """A layer norm without bias."""
    return norm_spec(hf, "layer_norm_eps", mean=True)
