"""The Cohere 2 family, Command A and R7B: Cohere with windows, and with rotation in the layers that have one alone."""

from typing import Any

from jaxpaged.models import cohere, llama
from jaxpaged.models.cohere import parallel
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import (
    all_but_every,
    common_config,
    layer_types,
    layer_windows,
    pattern_length,
    with_defaults,
)

DEFAULTS: dict[str, Any] = {key: value for key, value in cohere.DEFAULTS.items() if key != "use_qk_norm"} | {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "rope_theta": 10000.0, "sliding_window": 4096,
    "layer_types": None,
}
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Cohere 2 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    if hf.get("position_embedding_type") == "rope_gptj":  # neighboring pairs, as all of this family have
        hf |= {"position_embedding_type": "rope"}
    hf |= {"layer_types": layer_types(hf, all_but_every(pattern_length(hf, 4)))}
    return common_config(hf, windows=layer_windows(hf), unrotated=full_layers(hf),
                         reads=("sliding_window", "layer_types", "logit_scale"), **parallel(hf))


def full_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    """Layers that see every token, where others have a window."""
    windowed = hf["sliding_window"] is not None
    return tuple(index for index, kind in enumerate(hf["layer_types"]) if windowed and kind == "full_attention")
