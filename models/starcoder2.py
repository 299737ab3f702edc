"""The StarCoder2 family: Llama with layer norms, biases everywhere, and an MLP without a gate."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, layer_windows, norm_spec, with_defaults
from jaxpaged.models.weight_rules import WeightRule, as_is, dense, layer_norms, transposed, with_rules

DEFAULTS: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "vocab_size": 49152, "hidden_size": 3072,
    "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "eos_token_id": 50256,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "sliding_window": None, "use_bias": True,
}
IGNORED = llama.IGNORED
WEIGHTS = with_rules(
    llama.WEIGHTS,
    *layer_norms("model.layers.{i}.", attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    *dense("model.layers.{i}.mlp.c_fc", "layers.{i}.mlp.up", transposed, (None, "mlp")),
    *dense("model.layers.{i}.mlp.c_proj", "layers.{i}.mlp.down", transposed, ("mlp", None), whole_bias=True),
    WeightRule("model.norm.bias", "norm.bias", as_is))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a StarCoder2 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    bias = flag(hf, "use_bias")
    return common_config(
        hf, attention={"bias": bias, "output_bias": bias}, mlp={"gated": False, "bias": bias},
        norm=norm_spec(hf, "norm_epsilon", mean=True, bias=True), windows=layer_windows(hf), reads=("sliding_window",))
