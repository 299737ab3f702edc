"""The gpt-oss family: windows in every other layer, sinks, biases, and experts with a bounded activation."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_types, layer_windows, number, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec
from jaxpaged.models.weight_rules import WeightRule, alternating_experts, as_is, experts, router

DEFAULTS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "eos_token_id": None, "tie_word_embeddings": False, "rope_theta": 150000.0, "attention_bias": True,
    "sliding_window": 128, "layer_types": None, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
}
# Where a file has no rotary table.
_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}
IGNORED = llama.IGNORED
_MLP = "model.layers.{i}.mlp"
WEIGHTS = (
    *llama.WEIGHTS, router(f"{_MLP}.router.weight"),
    WeightRule(f"{_MLP}.router.bias", "layers.{i}.mlp.router.bias", as_is), *alternating_experts(f"{_MLP}.experts"),
    *experts(_MLP, "gate_proj", "up_proj", "down_proj"),  # as the released files' 4-bit experts are read
    WeightRule("model.layers.{i}.self_attn.sinks", "layers.{i}.attn.sinks", as_is, ("heads",), wide=True))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a gpt-oss checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    if hf.get("rope_parameters") is None and hf.get("rope_scaling") is None:
        hf["rope_parameters"] = _ROPE
    spec = experts_spec(hf, "intermediate_size", default_count="num_local_experts", normalized=True, bias=True,
                        clamp=(number(hf, "swiglu_limit", 7.0), number(hf, "swiglu_alpha", 1.702)))
    windows = layer_windows(hf | {"layer_types": layer_types(hf, lambda layer: layer % 2 == 0)})
    return common_config(hf, attention={"sinks": True}, windows=windows,
                         reads=("sliding_window", "layer_types", *COUNTS), experts=lambda layer: spec)
