"""The Falcon family: 7B (one head of keys), 40B and 180B (groups of heads), 11B, and RW (ALiBi); layer norms."""

from typing import Any

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.config import ModelConfig, NormPlacement
from jaxpaged.models.hf_config import (
    MULTI_HEAD,
    activation,
    common_config,
    flag,
    norm_spec,
    renamed_sizes,
    size,
    with_defaults,
)
from jaxpaged.models.weight_rules import TensorSlice, WeightRule, as_is, dense, grouped_qkv, transposed, whole

DEFAULTS: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544,
    "num_hidden_layers": 32, "num_attention_heads": 71, "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5,
    "num_kv_heads": None, "alibi": False, "new_decoder_architecture": False, "multi_query": True,
    "parallel_attn": True, "bias": False, "max_position_embeddings": 2048, "rope_theta": 10000.0, "eos_token_id": 11,
    "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True,
}
IGNORED = ("*.rotary_emb.inv_freq", "*.maybe_rotary.inv_freq")
_LAYER = "transformer.h.{i}."


def _norm_rules(path: str, one: str, two: str) -> tuple[WeightRule, ...]:
    """Of a norm whose name depends on how many of them the layer has."""
    return tuple(
        WeightRule(TensorSlice(f"{_LAYER}{one}.{kind}", whole, other=f"{_LAYER}{two}.{kind}"),
                   f"layers.{{i}}.{path}.{ours}", as_is) for kind, ours in (("weight", "scale"), ("bias", "bias")))


WEIGHTS = (
    WeightRule("transformer.word_embeddings.weight", "embed.table", as_is, ("vocab", None)),
    *_norm_rules("attn_norm", "input_layernorm", "ln_attn"),
    *_norm_rules("mlp_norm", "post_attention_layernorm", "ln_mlp"),
    *dense(f"{_LAYER}self_attention.query_key_value", "layers.{i}.attn.qkv", transposed,
           (None, ("heads", "kv_heads", "kv_heads")), part=grouped_qkv),
    *dense(f"{_LAYER}self_attention.dense", "layers.{i}.attn.o", transposed, ("heads", None), whole_bias=True),
    *dense(f"{_LAYER}mlp.dense_h_to_4h", "layers.{i}.mlp.up", transposed, (None, "mlp")),
    *dense(f"{_LAYER}mlp.dense_4h_to_h", "layers.{i}.mlp.down", transposed, ("mlp", None), whole_bias=True),
    WeightRule("transformer.ln_f.weight", "norm.scale", as_is),
    WeightRule("transformer.ln_f.bias", "norm.bias", as_is),
    WeightRule("lm_head.weight", "head.kernel", transposed, (None, "vocab")),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Falcon checkpoint."""
    hf = with_defaults(hf, DEFAULTS) | MULTI_HEAD
    if "n_embed" in hf:
        hf = renamed_sizes(hf, {"n_embed": "hidden_size"})
    heads, model_dim, bias = size(hf, "num_attention_heads"), size(hf, "hidden_size"), flag(hf, "bias")
    grouped = flag(hf, "new_decoder_architecture")
    one_key = flag(hf, "multi_query") and not grouped
    hf = renamed_sizes(hf, {"num_kv_heads": "num_key_value_heads"}, heads)
    hf = renamed_sizes(hf, {"ffn_hidden_size": "intermediate_size"}, 4 * model_dim)
    if one_key:
        hf["num_key_value_heads"] = 1
    elif not grouped and hf["num_key_value_heads"] != heads:
        raise CheckpointError("config.json: num_kv_heads must be num_attention_heads without multi_query and "
                              "new_decoder_architecture")
    alibi = flag(hf, "alibi")
    # The bias is added to scores before these are scaled.
    slopes = {"alibi": True, "alibi_scale": max(model_dim // heads, 1) ** -0.5} if alibi else {}
    return common_config(
        hf, attention={"bias": bias, "output_bias": bias, **slopes}, layer={"norms": _norms(hf, grouped)},
        mlp={"gated": False, "bias": bias, "activation": activation(hf, "activation")},
        norm=norm_spec(hf, "layer_norm_epsilon", mean=True, bias=True), rotated=not alibi,
        reads=("alibi", "parallel_attn"))


def _norms(hf: dict[str, Any], grouped: bool) -> NormPlacement:
    count = size(hf, "num_ln_in_parallel_attn", 2 if grouped else 1)
    parallel = flag(hf, "parallel_attn")
    if count > 2 or ((count == 2 or not parallel) and grouped != (count == 2)):
        raise UnsupportedModelError(f"config.json: num_ln_in_parallel_attn {count} is not supported with "
                                    f"new_decoder_architecture {grouped} and parallel_attn {parallel}")
    return "before" if not parallel else "parallel_separate" if count == 2 else "parallel"
