"""The side of an engine that knows text: tokenizer, checks on requests, outputs, metrics."""

import logging
from pathlib import Path

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import RequestError
from jaxpaged.core.messages import EngineInfo, EngineOutputs
from jaxpaged.frontend.input_processor import InputProcessor, ProcessedRequest, default_sampling_params
from jaxpaged.frontend.metrics import Metrics
from jaxpaged.frontend.output_processor import OutputProcessor, ProcessedOutputs
from jaxpaged.loading.hub import resolve_model
from jaxpaged.loading.json_files import read_generation_config
from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def tokenizer_path(config: EngineConfig, model_path: Path) -> Path:
    """Where the tokenizer's files are: the model's, unless another was named."""
    return resolve_model(config.tokenizer, None, config.download_dir) if config.tokenizer else model_path


class Front:
    """What `LLM` and `AsyncLLM` keep around an engine in their own process. Belongs to one thread.

    Args:
        has_files: False for a model in memory, which has no tokenizer unless the config names one.
    """

    def __init__(self, config: EngineConfig, info: EngineInfo, *, has_files: bool) -> None:
        self._tokenizer: Tokenizer | None = None
        defaults = {}
        if has_files:
            path = resolve_model(config.model, config.revision, config.download_dir)
            self._tokenizer = load_tokenizer(tokenizer_path(config, path), chat_template=config.chat_template)
            if config.generation_config == "auto":
                defaults = default_sampling_params(read_generation_config(path))
        elif config.tokenizer:
            self._tokenizer = load_tokenizer(tokenizer_path(config, Path()), chat_template=config.chat_template)
        eos = self._tokenizer.eos_token_ids.union(info.eos_token_ids) if self._tokenizer else info.eos_token_ids
        self.inputs = InputProcessor(
            self._tokenizer, max_model_len=info.max_model_len, vocab_size=info.vocab_size,
            kv_capacity=(info.num_blocks - 1) * info.block_size, max_n=config.max_n, max_logprobs=config.max_logprobs,
            eos_token_ids=eos, default_params=defaults, takes_priorities=config.scheduling_policy == "priority")
        self.metrics = Metrics(info.model, info, kv_cache_dtype=config.kv_cache_dtype,
                               prefix_caching=config.enable_prefix_caching)
        self._outputs = OutputProcessor(self._tokenizer)

    @property
    def needed_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: the model came without one.
        """
        if self._tokenizer is None:
            raise RequestError("this model came without a tokenizer; name one with tokenizer=...")
        return self._tokenizer

    def begin(self, request: ProcessedRequest) -> None:
        """Keep the books of a request from now on.

        Raises:
            RequestError: its id is in use, or it needs text and there is no tokenizer.
        """
        self._outputs.add_request(request.request_id, request.prompt, request.prompt_token_ids, request.params,
                                  request.arrival_time, request.max_tokens)
        self.metrics.start_request(request.request_id, prompt_tokens=len(request.prompt_token_ids),
                                   n=request.params.n, max_tokens=request.max_tokens,
                                   arrival_time=request.arrival_time)

    def process(self, outputs: EngineOutputs, now: float) -> ProcessedOutputs:
        """Turn a batch of the engine into text and metrics; the caller tells the engine what to abort.

        An output whose finish_reason is "error" does not hold the reason: a line of the log does.
        """
        self.metrics.record_stats(outputs.stats)
        done = self._outputs.process(outputs.deltas, now)
        self.metrics.record_outputs(done, now)
        for request_id, reason in done.errors.items():
            logger.error("request %s has ended with an error: %s", request_id, reason)
        return done

    def sequences(self, request_id: str) -> tuple[str, ...]:
        """The engine's ids of a running request's choices that have not ended."""
        return self._outputs.sequences(request_id)

    def abort(self, request_id: str, now: float) -> list[str]:
        """Forget a request; the ids of its sequences, for the engine to stop."""
        self.metrics.abort_request(request_id, now)
        return self._outputs.abort(request_id)
