"""The Llama family: Llama 2 and 3, SmolLM2 and others of the same shape."""

from typing import Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, rotated, transposed

# What an absent key means, as in transformers' LlamaConfig.
DEFAULTS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
    "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False,
}
IGNORED = ("*.rotary_emb.inv_freq", "*.self_attn.rotary_emb.cos_cached", "*.self_attn.rotary_emb.sin_cached")

WEIGHTS = (
    WeightRule("model.embed_tokens.weight", "embed.table", as_is, ("vocab", None)),
    WeightRule("model.layers.{i}.input_layernorm.weight", "layers.{i}.attn_norm.scale", as_is),
    WeightRule((rotated("model.layers.{i}.self_attn.q_proj.weight"),
                rotated("model.layers.{i}.self_attn.k_proj.weight"), "model.layers.{i}.self_attn.v_proj.weight"),
               "layers.{i}.attn.qkv.kernel", transposed, (None, ("heads", "kv_heads", "kv_heads"))),
    WeightRule("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.attn.o.kernel", transposed, ("heads", None)),
    WeightRule((rotated("model.layers.{i}.self_attn.q_proj.bias"), rotated("model.layers.{i}.self_attn.k_proj.bias"),
                "model.layers.{i}.self_attn.v_proj.bias"),
               "layers.{i}.attn.qkv.bias", as_is, (("heads", "kv_heads", "kv_heads"),)),
    WeightRule("model.layers.{i}.self_attn.o_proj.bias", "layers.{i}.attn.o.bias", as_is),
    WeightRule("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.scale", as_is),
    WeightRule(("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
               "layers.{i}.mlp.gate_up.kernel", transposed, (None, ("mlp", "mlp"))),
    WeightRule("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down.kernel", transposed, ("mlp", None)),
    WeightRule(("model.layers.{i}.mlp.gate_proj.bias", "model.layers.{i}.mlp.up_proj.bias"),
               "layers.{i}.mlp.gate_up.bias", as_is, (("mlp", "mlp"),)),
    WeightRule("model.layers.{i}.mlp.down_proj.bias", "layers.{i}.mlp.down.bias", as_is),
    WeightRule("model.norm.weight", "norm.scale", as_is),
    WeightRule("lm_head.weight", "head.kernel", transposed, (None, "vocab")),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Llama checkpoint; everything is common."""
    return common_config(with_defaults(hf, DEFAULTS))
