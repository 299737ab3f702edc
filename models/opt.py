"""The OPT family: learned positions from the third row on, and in 350m norms after the residual and projections."""

from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.models.config import ModelConfig, NormSpec
from jaxpaged.models.hf_config import MULTI_HEAD, activation, common_config, flag, renamed_sizes, size, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, dense, layer_norms, transposed

DEFAULTS: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 768,
    "num_hidden_layers": 12, "ffn_dim": 3072, "max_position_embeddings": 2048, "do_layer_norm_before": True,
    "_remove_final_layer_norm": False, "word_embed_proj_dim": None, "num_attention_heads": 12,
    "activation_function": "relu", "eos_token_id": 2, "enable_bias": True, "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
IGNORED: tuple[str, ...] = ()
_LAYER = "model.decoder.layers.{i}."
_FIRST_ROW = 2  # of position 0; the rows before it are for padding
_QKV = tuple(f"{_LAYER}self_attn.{name}_proj" for name in "qkv")
# The names of a layer's norms are the same, wherever these are.
WEIGHTS = (
    WeightRule("model.decoder.embed_tokens.weight", "embed.table", as_is, ("vocab", None)),
    WeightRule("model.decoder.embed_positions.weight", "positions", as_is),
    WeightRule("model.decoder.project_in.weight", "project_in.kernel", transposed),
    WeightRule("model.decoder.project_out.weight", "project_out.kernel", transposed),
    *layer_norms(_LAYER, attn_norm="self_attn_layer_norm", mlp_norm="final_layer_norm"),
    *layer_norms(_LAYER, attn_post_norm="self_attn_layer_norm", mlp_post_norm="final_layer_norm"),
    WeightRule(tuple(f"{name}.weight" for name in _QKV), "layers.{i}.attn.qkv.kernel", transposed,
               (None, ("heads", "kv_heads", "kv_heads"))),
    WeightRule(tuple(f"{name}.bias" for name in _QKV), "layers.{i}.attn.qkv.bias", as_is,
               (("heads", "kv_heads", "kv_heads"),)),
    *dense(f"{_LAYER}self_attn.out_proj", "layers.{i}.attn.o", transposed, ("heads", None), whole_bias=True),
    *dense(f"{_LAYER}fc1", "layers.{i}.mlp.up", transposed, (None, "mlp")),
    *dense(f"{_LAYER}fc2", "layers.{i}.mlp.down", transposed, ("mlp", None), whole_bias=True),
    WeightRule("model.decoder.final_layer_norm.weight", "norm.scale", as_is),
    WeightRule("model.decoder.final_layer_norm.bias", "norm.bias", as_is),
    WeightRule("lm_head.weight", "head.kernel", transposed, (None, "vocab")),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an OPT checkpoint. The table of positions bounds its context."""
    hf = renamed_sizes(with_defaults(hf, DEFAULTS), {"ffn_dim": "intermediate_size"}) | MULTI_HEAD
    if not flag(hf, "layer_norm_elementwise_affine"):
        raise UnsupportedModelError("config.json: layer_norm_elementwise_affine false is not supported")
    before, bias, norm = flag(hf, "do_layer_norm_before"), flag(hf, "enable_bias"), NormSpec(mean=True, bias=True)
    inner, outer = size(hf, "hidden_size"), size(hf, "word_embed_proj_dim", size(hf, "hidden_size"))
    last = {} if before and not flag(hf, "_remove_final_layer_norm") else {"norm": None}
    positions = size(hf, "max_position_embeddings")
    config = common_config(
        hf, attention={"bias": bias, "output_bias": bias},
        mlp={"gated": False, "bias": bias, "activation": activation(hf, "activation_function")},
        layer={"norms": "before" if before else "after_residual"}, norm=norm, rotated=False,
        learned_positions=positions + _FIRST_ROW, position_offset=_FIRST_ROW,
        embedding_dim=None if outer == inner else outer)
    return config.replace(**last)
