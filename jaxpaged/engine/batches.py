"""What callers from Python give for a batch of prompts: prompts and sampling parameters in all their forms."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.frontend.input_processor import ChatPrompt

Prompt = str | Sequence[int] | Mapping[str, Any] | ChatPrompt


def prompts_of(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list."""
    if hasattr(prompts, "tolist"):  # an array of numpy or JAX: one prompt's ids, or a row for each prompt
        prompts = prompts.tolist()
    if isinstance(prompts, (str, Mapping)) or (
            isinstance(prompts, Sequence) and prompts and all(isinstance(item, Integral) for item in prompts)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError("prompts must be a text, a list of token ids, a dict, or a list of these", param="prompt")
    return list(prompts)


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, sampling: Mapping[str, Any], count: int
) -> list[SamplingParams | None]:
    """Sampling parameters for each of `count` prompts.

    Args:
        params: one for all, one for each, or None for the model's defaults.
        sampling: fields of `SamplingParams`, instead of `params`.
    """
    if sampling:
        if params is not None:
            raise RequestError("give sampling_params or keywords, not both", param="sampling_params")
        params = params_from_keywords(sampling)
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise RequestError("sampling_params must be a SamplingParams or a list of them", param="sampling_params")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one for all or one for each",
                           param="sampling_params")
    return list(params)


def params_from_keywords(sampling: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of keywords; an unknown one is an error that names the nearest."""
    known = [item.name for item in dataclasses.fields(SamplingParams)]
    unknown = next((name for name in sampling if name not in known), None)
    if unknown is None:
        return SamplingParams(**sampling)
    if unknown in EngineConfig.__dataclass_fields__:
        raise RequestError(f"{unknown} is an engine argument, not a sampling parameter: give it to LLM, or to "
                           f"jaxpaged.generate as engine_args={{'{unknown}': ...}}", param=unknown)
    near = difflib.get_close_matches(unknown, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RequestError(f"unknown sampling parameter {unknown}{hint}", param=unknown)


@contextmanager
def in_prompt(index: int, count: int) -> Iterator[None]:
    """Errors inside say which of several prompts they are about, counted from 0."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise error.with_message(f"prompts[{index}]: {error.message}") from error
