"""The GPT-2 family: learned positions, layer norms, biases, fused weights stored [in, out], and a tied head."""

from dataclasses import replace
from typing import Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import (
    MULTI_HEAD,
    activation,
    common_config,
    flag,
    norm_spec,
    renamed_sizes,
    with_defaults,
)
from jaxpaged.models.weight_rules import WeightRule, as_is, dense, layer_norms, transposed

DEFAULTS: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
    "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "eos_token_id": 50256, "tie_word_embeddings": True, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}
SIZES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
         "n_positions": "max_position_embeddings"}
IGNORED = ("*.attn.bias", "*.attn.masked_bias")
WEIGHTS = (
    WeightRule("transformer.wte.weight", "embed.table", as_is, ("vocab", None)),
    WeightRule("transformer.wpe.weight", "positions", as_is),
    *layer_norms("transformer.h.{i}.", attn_norm="ln_1", mlp_norm="ln_2"),
    *dense("transformer.h.{i}.attn.c_attn", "layers.{i}.attn.qkv", as_is, (None, ("heads", "kv_heads", "kv_heads"))),
    *dense("transformer.h.{i}.attn.c_proj", "layers.{i}.attn.o", as_is, ("heads", None), whole_bias=True),
    *dense("transformer.h.{i}.mlp.c_fc", "layers.{i}.mlp.up", as_is, (None, "mlp")),
    *dense("transformer.h.{i}.mlp.c_proj", "layers.{i}.mlp.down", as_is, ("mlp", None), whole_bias=True),
    WeightRule("transformer.ln_f.weight", "norm.scale", as_is),
    WeightRule("transformer.ln_f.bias", "norm.bias", as_is),
    WeightRule("lm_head.weight", "head.kernel", transposed, (None, "vocab")),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GPT-2 checkpoint. The table of positions bounds its context."""
    hf = with_defaults(hf, DEFAULTS)
    # A file may have the usual names.
    hf = renamed_sizes(hf, {usual if usual in hf else own: usual for own, usual in SIZES.items()}) | MULTI_HEAD
    hf = renamed_sizes(hf, {"n_inner": "intermediate_size"}, 4 * hf["hidden_size"])
    config = common_config(
        hf, attention={"bias": True, "output_bias": True, "scale": None if flag(hf, "scale_attn_weights") else 1.0},
        mlp={"gated": False, "bias": True, "activation": activation(hf, "activation_function")},
        norm=norm_spec(hf, "layer_norm_epsilon", mean=True, bias=True), rotated=False,
        learned_positions=hf["max_position_embeddings"])
    if not flag(hf, "scale_attn_by_inverse_layer_idx"):
        return config
    scale = config.attention[0].scale or config.head_dim**-0.5
    return config.replace(layers=tuple(
        replace(layer, mixer=replace(mixer, scale=scale / (index + 1)))
        for index, (layer, mixer) in enumerate(zip(config.layers, config.attention, strict=True))))
