"""The sampling parameters that a model's files set for requests that do not set them."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.core.errors import ConfigError, RequestError
from jaxpaged.core.sampling_params import SamplingParams

# Keys of a generation_config.json that set defaults, and the sampling parameters that they set.
_GENERATION_KEYS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a model's generation_config.json sets, for requests that do not set them.

    Raises:
        ConfigError: a value out of range.
    """
    found = {}
    for key, name in _GENERATION_KEYS.items():
        value = generation_config.get(key)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            raise ConfigError(f"generation_config.json: {error}; correct it, or start with --generation-config vllm"
                              ) from error
        else:
            if name == "max_tokens" or value != SamplingParams.__dataclass_fields__[name].default:
                found[name] = value
    return found
