"""The GPT-NeoX family, Pythia: parallel blocks, fused weights by head, and a part of each head rotated."""

from typing import Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import MULTI_HEAD, common_config, flag, norm_spec, with_defaults
from jaxpaged.models.weight_rules import (
    TensorSlice,
    WeightRule,
    as_is,
    dense,
    grouped_qkv,
    layer_norms,
    transposed,
    whole,
)

DEFAULTS: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 6144,
    "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64, "hidden_act": "gelu",
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "eos_token_id": 2, "tie_word_embeddings": False,
    "use_parallel_residual": True, "attention_bias": True, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
}
IGNORED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")
WEIGHTS = (
    WeightRule("gpt_neox.embed_in.weight", "embed.table", as_is, ("vocab", None)),
    *layer_norms("gpt_neox.layers.{i}.", attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    *dense("gpt_neox.layers.{i}.attention.query_key_value", "layers.{i}.attn.qkv", transposed,
           (None, ("heads", "kv_heads", "kv_heads")), part=grouped_qkv),
    *dense("gpt_neox.layers.{i}.attention.dense", "layers.{i}.attn.o", transposed, ("heads", None), whole_bias=True),
    *dense("gpt_neox.layers.{i}.mlp.dense_h_to_4h", "layers.{i}.mlp.up", transposed, (None, "mlp")),
    *dense("gpt_neox.layers.{i}.mlp.dense_4h_to_h", "layers.{i}.mlp.down", transposed, ("mlp", None), whole_bias=True),
    WeightRule("gpt_neox.final_layer_norm.weight", "norm.scale", as_is),
    WeightRule("gpt_neox.final_layer_norm.bias", "norm.bias", as_is),
    WeightRule(TensorSlice("embed_out.weight", whole, other="lm_head.weight"), "head.kernel", transposed,
               (None, "vocab")),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GPT-NeoX checkpoint."""
    hf = with_defaults(hf, DEFAULTS) | MULTI_HEAD
    hf |= {"rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct", 0.25)}
    bias = flag(hf, "attention_bias")
    return common_config(
        hf, attention={"bias": bias, "output_bias": bias}, mlp={"gated": False, "bias": True},
        layer={"norms": "parallel_separate" if flag(hf, "use_parallel_residual") else "before"},
        norm=norm_spec(hf, "layer_norm_eps", mean=True, bias=True),
        reads=("rotary_pct", "partial_rotary_factor", "use_parallel_residual"))
