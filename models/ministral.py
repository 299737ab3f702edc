"""The Ministral family (8B, 2410): Mistral, whose windows may be on some of the layers."""

from typing import Any

from jaxpaged.models import mistral

DEFAULTS: dict[str, Any] = mistral.DEFAULTS | {
    "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "layer_types": None,
}
IGNORED = mistral.IGNORED
WEIGHTS = mistral.WEIGHTS
config_from_hf = mistral.config_from_hf
