"""The Phi-3 family, Phi-4 and Phi-4-mini included: Llama with fused weights, parts of heads rotated, and longrope."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_windows, with_defaults
from jaxpaged.models.rope_tables import renamed_kinds
from jaxpaged.models.weight_rules import WeightRule, fused_qkv, transposed, with_rules

DEFAULTS: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
    "hidden_act": "silu", "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "eos_token_id": 32000, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "sliding_window": None,
}
IGNORED = llama.IGNORED
FUSED_GATE_UP = WeightRule("model.layers.{i}.mlp.gate_up_proj.weight", "layers.{i}.mlp.gate_up.kernel", transposed,
                           (None, ("mlp", "mlp")))
WEIGHTS = with_rules(llama.WEIGHTS, FUSED_GATE_UP, WeightRule(
    fused_qkv("model.layers.{i}.self_attn.qkv_proj.weight"), "layers.{i}.attn.qkv.kernel", transposed,
    (None, ("heads", "kv_heads", "kv_heads"))))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Phi-3 checkpoint; older files call longrope su or yarn."""
    hf = renamed_kinds(with_defaults(hf, DEFAULTS), {"su": "longrope", "yarn": "longrope"})
    return common_config(hf, windows=layer_windows(hf), reads=("sliding_window", "layer_types",
                                                               "partial_rotary_factor"))
