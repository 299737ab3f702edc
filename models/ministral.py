"""The Ministral family (8B, 2410): Mistral, whose windows may be on some of the layers."""

from typing import Any

from jaxpaged.models import mistral
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import with_defaults

DEFAULTS: dict[str, Any] = mistral.DEFAULTS | {
    "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "layer_types": None,
}
IGNORED = mistral.IGNORED
WEIGHTS = mistral.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Ministral checkpoint."""
    return mistral.mistral_config(with_defaults(hf, DEFAULTS))
