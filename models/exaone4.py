"""The EXAONE 4 family: norms after each block and of each head; with windows, the other layers are not rotated."""

from typing import Any

from jaxpaged.models import llama, qwen3
from jaxpaged.models.cohere2 import full_layers
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import (
    all_but_every,
    common_config,
    layer_types,
    layer_windows,
    norm_spec,
    pattern_length,
    with_defaults,
)
from jaxpaged.models.olmo2 import AFTER
from jaxpaged.models.weight_rules import with_rules

DEFAULTS: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "vocab_size": 102400, "hidden_size": 4096,
    "intermediate_size": 16384, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 2,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "layer_types": None,
}
IGNORED = llama.IGNORED
WEIGHTS = with_rules(llama.WEIGHTS, *AFTER, *qwen3.HEAD_NORMS)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an EXAONE 4 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    every = 1 if hf["sliding_window"] is None or hf["layer_types"] else pattern_length(hf, 4)
    hf |= {"layer_types": layer_types(hf, all_but_every(every))}
    return common_config(hf, attention={"qk_norm": norm_spec(hf)}, mlp={"bias": False}, layer={"norms": "after"},
                         windows=layer_windows(hf), unrotated=full_layers(hf), reads=("sliding_window", "layer_types"))
