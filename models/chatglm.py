"""The ChatGLM 2 and 3 family, and GLM-4 in its first format: half of each head rotated in neighboring pairs."""

from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, norm_spec, number, renamed_sizes, size, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, dense, fused_qkv, norms, transposed

# What an absent key means, as in the config class of the checkpoints' own code.
DEFAULTS: dict[str, Any] = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 28, "padded_vocab_size": 65024,
    "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128, "num_attention_heads": 32, "seq_length": 2048,
    "layernorm_epsilon": 1e-5, "rmsnorm": True, "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True, "add_bias_linear": False, "add_qkv_bias": False, "multi_query_attention": False,
    "multi_query_group_num": 1, "rope_ratio": 1.0, "original_rope": True, "pre_seq_len": None, "eos_token_id": None,
    "tie_word_embeddings": False,
}
SIZES = {"num_layers": "num_hidden_layers", "padded_vocab_size": "vocab_size", "ffn_hidden_size": "intermediate_size",
         "kv_channels": "head_dim", "seq_length": "max_position_embeddings",
         "multi_query_group_num": "num_key_value_heads"}
# Others have been in no released checkpoint, or only in the first ChatGLM.
_FIXED = {"rmsnorm": True, "apply_residual_connection_post_layernorm": False, "post_layer_norm": True,
          "original_rope": True, "pre_seq_len": None, "position_encoding_2d": None, "inner_hidden_size": None,
          "rope_scaling": None, "rope_parameters": None, "hidden_act": "silu"}
IGNORED = ("transformer.rotary_pos_emb.inv_freq",)
_LAYER = "transformer.encoder.layers.{i}."
WEIGHTS = (
    WeightRule("transformer.embedding.word_embeddings.weight", "embed.table", as_is, ("vocab", None)),
    *norms(_LAYER, attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    *dense(f"{_LAYER}self_attention.query_key_value", "layers.{i}.attn.qkv", transposed,
           (None, ("heads", "kv_heads", "kv_heads")), part=fused_qkv),
    *dense(f"{_LAYER}self_attention.dense", "layers.{i}.attn.o", transposed, ("heads", None), whole_bias=True),
    *dense(f"{_LAYER}mlp.dense_h_to_4h", "layers.{i}.mlp.gate_up", transposed, (None, ("mlp", "mlp"))),
    *dense(f"{_LAYER}mlp.dense_4h_to_h", "layers.{i}.mlp.down", transposed, ("mlp", None), whole_bias=True),
    WeightRule("transformer.encoder.final_layernorm.weight", "norm.scale", as_is),
    WeightRule("transformer.output_layer.weight", "head.kernel", transposed, (None, "vocab")),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a ChatGLM checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    for key, wanted in _FIXED.items():
        if hf.get(key, wanted) != wanted:
            raise UnsupportedModelError(f"config.json: {key} {hf[key]!r:.64} is not supported for this model")
    base = 10000.0 * number(hf, "rope_ratio", 1.0)
    hf = renamed_sizes(hf, SIZES) | {"rope_theta": base, "partial_rotary_factor": hf.get("partial_rotary_factor", 0.5)}
    if not flag(hf, "multi_query_attention"):
        hf["num_key_value_heads"] = size(hf, "num_attention_heads")
    bias = flag(hf, "add_bias_linear")
    return common_config(
        hf, attention={"bias": bias or flag(hf, "add_qkv_bias"), "output_bias": bias}, mlp={"bias": bias},
        rope={"neighbors": True}, norm=norm_spec(hf, "layernorm_epsilon"),
        reads=("rope_ratio", "partial_rotary_factor"))
