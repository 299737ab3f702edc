"""Running requests as text: the engine's token deltas in, RequestOutputs out.

A request has one choice per sequence of the engine, and puts the outputs of its choices together.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxpaged.core.errors import RequestError
from jaxpaged.core.messages import TokenDelta
from jaxpaged.core.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.frontend.choice_output import ChoiceOutput
from jaxpaged.frontend.lazy_logprobs import LazyLogprobs, LazyPromptLogprobs
from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def sequence_ids(request_id: str, n: int) -> list[str]:
    """The engine's ids for the choices of a request; unique if request ids are."""
    return [f"{request_id}#{choice}" for choice in range(n)]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A choice of a request gained tokens; `num_cached_tokens` of its prompt came from the prefix cache."""

    request_id: str
    choice: int
    count: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request, for the metrics; `finish_reason` is that of the last choice to finish."""

    request_id: str
    finish_reason: FinishReason
    metrics: RequestMetrics


@dataclass(slots=True)
class ProcessedOutputs:
    """The result of one batch of deltas.

    Attributes:
        outputs: at most one per request.
        to_abort: sequences that the engine must stop, because a stop string or an error has ended them here.
        new_tokens: for metrics, in order of arrival.
        finished: for metrics.
        errors: request id -> reason of a finish_reason "error".
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    new_tokens: list[NewTokens] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


class OutputProcessor:
    """Holds every running request's output. Not thread-safe.

    Where a text ends at a stop string, its token ids end with the token whose text completed that string. An end token
    or a stop token is the last of the token ids and no part of the text, unless it is one of `stop_token_ids` and
    `include_stop_str_in_output` is set. A stop string that is a special token's text ends the text at that token, even
    where special tokens are skipped.

    Args:
        tokenizer: None where only ids are wanted.
        lazy_logprobs: make log probabilities only where they are read; for outputs of kind DELTA or FINAL_ONLY.
    """

    def __init__(self, tokenizer: Tokenizer | None, lazy_logprobs: bool = False) -> None:
        self._tokenizer, self._lazy_logprobs = tokenizer, lazy_logprobs
        self._requests: dict[str, _RequestState] = {}
        self._sequences: dict[str, tuple[_RequestState, ChoiceOutput]] = {}

    def add_request(self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams,
                    arrival_time: float) -> list[str]:
        """Register a request.

        Args:
            prompt: its text, if known.
            arrival_time: seconds of `time.monotonic()`.

        Returns:
            The ids of its sequences, one per choice.

        Raises:
            RequestError: a request of this id is running, or it needs text and there is no tokenizer.
        """
        if request_id in self._requests:
            raise RequestError("a request with this request_id is running", param="request_id")
        if self._tokenizer is None and params.stop_strings:
            raise RequestError("stop strings need a tokenizer", param="stop")
        request = _RequestState(request_id, prompt, tuple(prompt_token_ids), params, arrival_time)
        tokenizer = self._tokenizer if params.detokenize else None
        ids = sequence_ids(request_id, params.num_sequences)
        engine_params = params.for_engine()
        for index, sequence_id in enumerate(ids):
            choice = ChoiceOutput(index, sequence_id, engine_params, tokenizer, request.prompt_token_ids,
                             self._lazy_logprobs)
            request.choices.append(choice)
            self._sequences[sequence_id] = request, choice
        self._requests[request_id] = request
        return ids

    def sequences(self, request_id: str) -> tuple[str, ...]:
        """The ids of a running request's sequences that have not ended; none for an unknown request."""
        request = self._requests.get(request_id)
        choices = request.choices if request is not None else []
        return tuple(choice.sequence_id for choice in choices if choice.finish_reason is None)

    def abort(self, request_id: str) -> list[str]:
        """Forget a request; an unknown or finished one is ignored.

        Returns:
            The ids of its sequences that the engine should stop.
        """
        running = list(self.sequences(request_id))
        if request_id in self._requests:
            self._forget(self._requests[request_id])
        return running

    def process(
        self, deltas: Iterable[TokenDelta], now: float | None = None, weights_version: int = 0
    ) -> ProcessedOutputs:
        """Add what the engine has generated; deltas of unknown or finished sequences are ignored.

        Args:
            now: seconds of `time.monotonic()`; None for the present.
            weights_version: of the weights that made the tokens.
        """
        now = time.monotonic() if now is None else now
        done = ProcessedOutputs()
        changed: dict[str, _RequestState] = {}
        for delta in deltas:
            request, choice = self._sequences.get(delta.request_id, (None, None))
            if request is None or choice is None or choice.finish_reason is not None:
                continue
            changed[request.request_id] = request
            if weights_version != choice.weights_version:
                choice.begin_weights(weights_version)
            try:
                self._add_delta(request, choice, delta, now, done)
            except Exception as error:  # whatever it is, only this request may fail
                logger.exception("processing the output of request %s failed", request.request_id)
                done.errors[request.request_id] = f"processing the output failed ({type(error).__name__})"
                done.to_abort += request.fail()
        for request in changed.values():
            if request.finished:
                request.finished_time = now
                self._forget(request)
                done.finished.append(request.end())
            output = request.output()
            if output is not None:
                done.outputs.append(output)
        return done

    def _add_delta(self, request: "_RequestState", choice: ChoiceOutput, delta: TokenDelta, now: float,
                   done: ProcessedOutputs) -> None:
        before = choice.num_tokens
        choice.add_delta(delta)
        if delta.embedding is not None:
            request.embedding = delta.embedding
        if delta.prompt_logprobs and request.prompt_logprobs is None:
            ids, found = request.prompt_token_ids[1:], delta.prompt_logprobs
            if self._lazy_logprobs:
                request.prompt_logprobs = LazyPromptLogprobs(LazyLogprobs(ids, found, choice.logprob_entry))
            else:
                request.prompt_logprobs = (None, *map(choice.logprob_entry, ids, found))
        if delta.finish_reason is None and choice.finish_reason is not None:
            done.to_abort.append(choice.sequence_id)
        if delta.finish_reason == "error":
            done.errors[request.request_id] = delta.error or "the engine failed"
        request.add_delta(delta, choice)
        if count := choice.num_tokens - before:
            request.record_token_time(now)
            done.new_tokens.append(NewTokens(request.request_id, choice.index, count, request.num_cached_tokens))

    def _forget(self, request: "_RequestState") -> None:
        del self._requests[request.request_id]
        for choice in request.choices:
            del self._sequences[choice.sequence_id]


@dataclass(slots=True, eq=False)
class _RequestState:
    """One request: its choices, and the times of its events."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    choices: list[ChoiceOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    embedding: tuple[float, ...] | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def add_delta(self, delta: TokenDelta, choice: ChoiceOutput) -> None:
        """Update what a delta of one choice says about the request as a whole."""
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.scheduled_time is not None:
            self.scheduled_time = min(self.scheduled_time or delta.scheduled_time, delta.scheduled_time)

    def record_token_time(self, now: float) -> None:
        """Record that tokens arrived."""
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now

    def fail(self) -> list[str]:
        """End all running choices with an error and return the ids of their sequences."""
        running = [choice for choice in self.choices if choice.finish_reason is None]
        self.finish_reason = "error"
        for choice in running:
            choice.fail()
        return [choice.sequence_id for choice in running]

    def output(self) -> RequestOutput | None:
        """The output to deliver now, or None."""
        kind = self.params.output_kind
        finished = self.finished
        ranked = self.params.num_sequences > self.params.n
        if (kind is RequestOutputKind.FINAL_ONLY or ranked) and not finished:
            return None
        whole = kind is not RequestOutputKind.DELTA or ranked
        outputs = tuple(choice.output(whole) for choice in self.choices if whole or choice.has_new_output)
        if ranked:
            outputs = self._best(outputs)
        if self.params.prompt_logprobs is not None and self.prompt_logprobs is None and len(self.prompt_token_ids) == 1:
            self.prompt_logprobs = (None,)
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, finished,
                             self.prompt_logprobs, metrics=self._metrics(), num_cached_tokens=self.num_cached_tokens,
                             embedding=self.embedding)

    def _best(self, outputs: Sequence[CompletionOutput]) -> tuple[CompletionOutput, ...]:
        """The n choices with the highest cumulative log probability, the best first."""
        best = sorted(outputs, key=lambda output: -(output.cumulative_logprob or 0.0))[: self.params.n]
        if self.params.logprobs is None:
            best = [replace(output, logprobs=None, text_offsets=()) for output in best]
        return tuple(replace(output, index=index) for index, output in enumerate(best))

    def end(self) -> FinishedRequest:
        """How and when a finished request has ended."""
        assert self.finish_reason is not None
        return FinishedRequest(self.request_id, self.finish_reason, self._metrics())

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(self.arrival_time, self.scheduled_time, self.first_token_time, self.last_token_time,
                              self.finished_time, sum(choice.num_preemptions for choice in self.choices))
