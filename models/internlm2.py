"""The InternLM2 family: Llama under other names, with weights fused by groups of heads."""

from typing import Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, dense, grouped_qkv, norms, transposed

# What an absent key means, as in the config class of the checkpoints' own code.
DEFAULTS: dict[str, Any] = {
    "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "vocab_size": 103168, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
    "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "bias": True,
}
IGNORED = ("*.rotary_emb.inv_freq",)
_LAYER = "model.layers.{i}."
WEIGHTS = (
    WeightRule("model.tok_embeddings.weight", "embed.table", as_is, ("vocab", None)),
    *norms(_LAYER, attn_norm="attention_norm", mlp_norm="ffn_norm"),
    *dense(f"{_LAYER}attention.wqkv", "layers.{i}.attn.qkv", transposed, (None, ("heads", "kv_heads", "kv_heads")),
           part=grouped_qkv),
    *dense(f"{_LAYER}attention.wo", "layers.{i}.attn.o", transposed, ("heads", None), whole_bias=True),
    WeightRule((f"{_LAYER}feed_forward.w1.weight", f"{_LAYER}feed_forward.w3.weight"), "layers.{i}.mlp.gate_up.kernel",
               transposed, (None, ("mlp", "mlp"))),
    WeightRule(f"{_LAYER}feed_forward.w2.weight", "layers.{i}.mlp.down.kernel", transposed, ("mlp", None)),
    WeightRule("model.norm.weight", "norm.scale", as_is),
    WeightRule("output.weight", "head.kernel", transposed, (None, "vocab")),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an InternLM2 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    bias = flag(hf, "bias")
    return common_config(hf, attention={"bias": bias, "output_bias": bias}, mlp={"bias": False})
