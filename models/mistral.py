"""The Mistral family: Llama with a sliding window over every layer, in its first version."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_windows

IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Mistral checkpoint."""
    return common_config(hf, windows=layer_windows(hf))
