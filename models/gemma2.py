"""The Gemma 2 family: Gemma with norms before and after each block, soft caps, and a window on every other layer."""

from typing import Any

from jaxpaged.models import gemma, llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.gemma import gemma_norms
from jaxpaged.models.hf_config import (
    activation,
    all_but_every,
    common_config,
    layer_types,
    layer_windows,
    number,
    softcap,
    with_defaults,
)
from jaxpaged.models.weight_rules import norms, with_rules

DEFAULTS: dict[str, Any] = {key: value for key, value in gemma.DEFAULTS.items() if key != "hidden_act"} | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}
READS = ("hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping",
         "attn_logit_softcapping")
IGNORED = llama.IGNORED
WEIGHTS = with_rules(llama.WEIGHTS, *norms(
    attn_post_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm"))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Gemma 2 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    return gemma2_config(hf | {"layer_types": layer_types(hf, all_but_every(2))})


def gemma2_config(hf: dict[str, Any], reads: tuple[str, ...] = READS, **attention: Any) -> ModelConfig:
    """With fields of `AttentionSpec` that differ from Gemma 2's; `layer_types` must be there."""
    return common_config(
        hf, attention={"scale": number(hf, "query_pre_attn_scalar", 256) ** -0.5,
                       "softcap": softcap(hf, "attn_logit_softcapping"), **attention},
        mlp={"bias": False, "activation": activation(hf, "hidden_activation")}, layer={"norms": "both"},
        windows=layer_windows(hf), reads=reads, logit_softcap=softcap(hf, "final_logit_softcapping"),
        **gemma_norms(hf))
