"""The OLMo 3 family: OLMo 2 with a window on three of four layers, which keep their rotary rule."""

from typing import Any

from jaxpaged.models import llama, olmo2
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import all_but_every, layer_types, layer_windows, with_defaults
from jaxpaged.models.olmo2 import olmo_config
from jaxpaged.models.rope_tables import by_layer_type

DEFAULTS: dict[str, Any] = olmo2.DEFAULTS | {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "rope_theta": 500000.0, "sliding_window": 4096,
    "layer_types": None,
}
IGNORED = llama.IGNORED
WEIGHTS = olmo2.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an OLMo 3 checkpoint; its rope_theta is for layers without a window, as in transformers."""
    hf = with_defaults(hf, DEFAULTS)
    hf |= {"layer_types": layer_types(hf, all_but_every(4))}
    return olmo_config(by_layer_type(hf, 500000.0), windows=layer_windows(hf), reads=("sliding_window", "layer_types"))
