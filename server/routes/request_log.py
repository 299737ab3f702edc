"""What --enable-log-requests writes of a request's sampling parameters: numbers, never texts."""

from collections.abc import Mapping, Sized
from dataclasses import fields
from enum import Enum

from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputsParams

_DEFAULTS = SamplingParams()


def params_text(params: SamplingParams) -> str:
    """The parameters that differ from their defaults; of texts, lists and schemas only the sizes."""
    return ", ".join(f"{item.name}={_brief(getattr(params, item.name))}" for item in fields(params)
                     if getattr(params, item.name) != getattr(_DEFAULTS, item.name))


def _brief(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, StructuredOutputsParams):
        return " ".join(item.name for item in fields(value) if getattr(value, item.name) != item.default)
    if isinstance(value, str):
        return f"({len(value)} characters)"
    if isinstance(value, Sized):
        return f"({len(value)} {'entries' if isinstance(value, Mapping) else 'items'})"
    return f"({type(value).__name__})"
