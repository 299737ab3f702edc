"""The Phi-3.5-MoE family: Mixtral with layer norms, a bias on the head, and experts chosen one after the other."""

from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.models import llama, mixtral
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, layer_windows, norm_spec, number, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec
from jaxpaged.models.weight_rules import WeightRule, as_is, layer_norms

DEFAULTS: dict[str, Any] = {
    "architectures": ["PhimoeForCausalLM"], "model_type": "phimoe", "vocab_size": 32064, "hidden_size": 4096,
    "intermediate_size": 6400, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "eos_token_id": 2,
    "tie_word_embeddings": False, "rope_theta": 1e6, "attention_bias": False, "sliding_window": None,
    "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "lm_head_bias": False,
}
IGNORED = llama.IGNORED
WEIGHTS = (
    *mixtral.WEIGHTS,
    *layer_norms("model.layers.{i}.", attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    WeightRule("model.norm.bias", "norm.bias", as_is), WeightRule("lm_head.bias", "head.bias", as_is, ("vocab",)))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Phi-3.5-MoE checkpoint.

    Raises:
        UnsupportedModelError: more than two experts per token, which the router's rule is not made for.
    """
    hf = _with_one_magnitude(with_defaults(hf, DEFAULTS))
    if hf["num_experts_per_tok"] not in (1, 2):
        raise UnsupportedModelError(f"config.json: num_experts_per_tok is {hf['num_experts_per_tok']!r:.64}, but this "
                                    "family's router chooses two")
    spec = experts_spec(hf, "intermediate_size", default_count="num_local_experts", normalized=False,
                        rule={"margin": 2 * number(hf, "router_jitter_noise", 0.01)})
    return common_config(hf, norm=norm_spec(hf, mean=True, bias=True), windows=layer_windows(hf),
                         reads=("sliding_window", "layer_types", "lm_head_bias", *COUNTS),
                         experts=lambda layer: spec, head_bias=flag(hf, "lm_head_bias"))


def _with_one_magnitude(hf: dict[str, Any]) -> dict[str, Any]:
    """With the factor on short and long texts' rotations under its usual name."""
    found = dict(hf)
    for key in ("rope_scaling", "rope_parameters"):
        table = hf.get(key)
        if not isinstance(table, dict) or not table.keys() & {"short_mscale", "long_mscale"}:
            continue
        if table.get("rope_type", table.get("type")) != "longrope":
            raise UnsupportedModelError(f"config.json: {key} has a short_mscale or long_mscale, which are "
                                        "supported for the kind longrope alone")
        if table.get("short_mscale") != table.get("long_mscale"):
            raise UnsupportedModelError(f"config.json: {key} has another short_mscale than long_mscale, which is not "
                                        "supported")
        rest = {name: value for name, value in table.items() if not name.endswith("_mscale")}
        found[key] = rest | {"attention_factor": table["long_mscale"]}
    return found
