"""The side of an engine that knows text, made in one place for `LLM`, `AsyncLLM` and the server."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import RequestError
from jaxpaged.core.messages import EngineInfo, EngineOutputs, Grammar
from jaxpaged.core.reasoning import REASONING_FORMATS
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.core.tool_formats import PLAIN_CALLS, ToolCallFormat
from jaxpaged.frontend.generation_defaults import default_sampling_params
from jaxpaged.frontend.input_processor import InputProcessor, ProcessedRequest
from jaxpaged.frontend.metrics import Metrics
from jaxpaged.frontend.output_processor import OutputProcessor, ProcessedOutputs
from jaxpaged.loading.hub import resolve_model
from jaxpaged.loading.json_files import read_generation_config
from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.text.tokenizer_files import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What a model's files say about text.

    Attributes:
        tokenizer: None for a model without one.
        default_params: sampling parameters that its generation_config.json sets.
    """

    tokenizer: Tokenizer | None = None
    default_params: Mapping[str, Any] = field(default_factory=dict)


def resolve_tokenizer(config: EngineConfig) -> Path:
    """Where the tokenizer's files are: the model's, unless the config names another.

    Raises:
        CheckpointError: there is no such model.
    """
    if config.tokenizer:
        return resolve_model(config.tokenizer, None, config.download_dir)
    return resolve_model(config.model, config.revision, config.download_dir)


def load_text_files(config: EngineConfig, *, in_memory: bool = False) -> TextFiles:
    """Read what a `Front` needs of a model's files; may run while the engine starts.

    Args:
        in_memory: the model has no files; a tokenizer is loaded only if the config names one.

    Raises:
        CheckpointError, ConfigError: with what to change.
    """
    if in_memory and not config.tokenizer:
        return TextFiles()
    tokenizer = load_tokenizer(resolve_tokenizer(config), chat_template=config.chat_template,
                               content_format=config.chat_template_content_format)
    if in_memory or config.generation_config != "auto":
        return TextFiles(tokenizer)
    path = resolve_model(config.model, config.revision, config.download_dir)
    return TextFiles(tokenizer, default_sampling_params(read_generation_config(path)))


class Front:
    """Checks and tokenizes requests, turns an engine's outputs into text, and counts both.

    All methods belong to one thread; `inputs` may be used by several.

    Args:
        name: of the model in the metrics; None for the engine's.
        tool_calls: how the model writes tool calls.
        make_grammar: compiles structured outputs; None to do it in this process.
        lazy_logprobs: see `OutputProcessor`.

    Attributes:
        inputs: makes requests for the engine.
        metrics: of the engine and its requests.
        default_params: sampling parameters of requests that do not set them.
    """

    def __init__(self, config: EngineConfig, info: EngineInfo, files: TextFiles, *, name: str | None = None,
                 tool_calls: ToolCallFormat = PLAIN_CALLS,
                 make_grammar: Callable[[StructuredOutputsParams], Grammar] | None = None,
                 lazy_logprobs: bool = False) -> None:
        self._tokenizer = files.tokenizer
        self.default_params = files.default_params
        eos = self._tokenizer.eos_token_ids.union(info.eos_token_ids) if self._tokenizer else info.eos_token_ids
        self.inputs = InputProcessor(
            self._tokenizer, max_model_len=info.max_model_len, vocab_size=info.vocab_size,
            max_n=config.max_n, max_logprobs=config.max_logprobs, eos_token_ids=eos,
            default_params=files.default_params, takes_priorities=config.scheduling_policy == "priority",
            reasoning=REASONING_FORMATS.get(config.reasoning_parser or ""), tool_calls=tool_calls,
            make_grammar=make_grammar)
        self.metrics = Metrics(name or info.model, info, kv_cache_dtype=config.kv_cache_dtype,
                               prefix_caching=config.enable_prefix_caching)
        self._outputs = OutputProcessor(self._tokenizer, lazy_logprobs)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: the model came without one.
        """
        if self._tokenizer is None:
            raise RequestError("this model came without a tokenizer; name one with tokenizer=...")
        return self._tokenizer

    def add_request(self, request: ProcessedRequest) -> None:
        """Expect the outputs of a request.

        Raises:
            RequestError: its id is in use, or it needs text and there is no tokenizer.
        """
        self._outputs.add_request(request.request_id, request.prompt, request.prompt_token_ids, request.params,
                                  request.arrival_time)
        self.metrics.start_request(request.request_id, prompt_tokens=len(request.prompt_token_ids),
                                   n=request.params.n, max_tokens=request.max_tokens,
                                   arrival_time=request.arrival_time)

    def process_outputs(self, outputs: EngineOutputs, now: float) -> ProcessedOutputs:
        """Turn a batch of the engine's outputs into text and metrics; the caller makes the engine stop `to_abort`.

        An output with finish_reason "error" does not say why: the log does.
        """
        self.metrics.record_stats(outputs.stats)
        done = self._outputs.process(outputs.deltas, now, outputs.weights_version)
        self.metrics.record_outputs(done, now)
        for request_id, reason in done.errors.items():
            logger.error("request %s has ended with an error: %s", request_id, reason)
        return done

    def sequences(self, request_id: str) -> tuple[str, ...]:
        """The engine's ids of a request's choices that have not finished."""
        return self._outputs.sequences(request_id)

    def abort(self, request_id: str, now: float) -> list[str]:
        """Forget a request; returns the engine's ids of the sequences to stop."""
        self.metrics.abort_request(request_id, now)
        return self._outputs.abort(request_id)
