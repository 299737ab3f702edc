"""Running requests as text: the engine's token deltas in, RequestOutputs out.

A request has one choice per sequence of the engine. A choice detokenizes, finds stop strings and collects log
probabilities; the request puts its choices together.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxpaged.core.errors import RequestError
from jaxpaged.core.messages import PackedLogprobs, TokenDelta, TokenLogprobs
from jaxpaged.core.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.frontend.lazy_logprobs import LazyLogprobs, LazyPromptLogprobs
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.stop_strings import StopStrings
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
        self._sequences: dict[str, tuple[_RequestState, _Choice]] = {}

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
            choice = _Choice(index, sequence_id, engine_params, tokenizer, request.prompt_token_ids,
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

    def _add_delta(self, request: "_RequestState", choice: "_Choice", delta: TokenDelta, now: float,
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
    choices: list["_Choice"] = field(default_factory=list)
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

    def add_delta(self, delta: TokenDelta, choice: "_Choice") -> None:
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


class _Choice:
    """The output of one sequence of a request.

    Attributes:
        index: its index among the request's choices.
        sequence_id: the engine's id for it.
        num_tokens: number of tokens so far.
        num_preemptions: number of times that the engine has preempted it.
        finish_reason: None while it runs.
        has_new_output: whether something has come since the last output.
        weights_version: of the weights that made its newest tokens.
    """

    def __init__(self, index: int, sequence_id: str, params: SamplingParams, tokenizer: Tokenizer | None,
                 prompt_token_ids: Sequence[int], lazy_logprobs: bool) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.num_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._keep_stop = params.include_stop_str_in_output
        self._detokenizer = (IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
                             if tokenizer else None)
        self._stops = StopStrings(params.stop_strings) if params.stop_strings else None
        # A special token that the text does not show still ends it where its text is a stop string.
        self._hidden_stops: dict[int, str] = {} if tokenizer is None or not params.skip_special_tokens else {
            number: text for text in params.stop_strings if (number := tokenizer.special_id(text)) is not None}
        self._min_tokens = params.min_tokens
        self._wants_logprobs = params.logprobs is not None
        self._decoded = tokenizer.token_text if tokenizer else None
        self._cumulative_logprob = 0.0
        self._text_length = 0
        # What no output holds yet; for cumulative outputs, everything.
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._packed = PackedLogprobs() if lazy_logprobs else None  # instead
        self._text_offsets: list[int] = []
        self.has_new_output = False
        self.weights_version = -1
        self._weight_versions: tuple[tuple[int, int], ...] = ()

    def begin_weights(self, version: int) -> None:
        """Further tokens are made by these weights."""
        self.weights_version = version
        self._weight_versions += ((self.num_tokens, version),)

    def add_delta(self, delta: TokenDelta) -> None:
        """Add the engine's newest tokens."""
        self.has_new_output = True
        ids, end = delta.token_ids, delta.finish_reason
        self.num_preemptions = max(self.num_preemptions, delta.num_preemptions)
        hidden = end == "stop" and not (self._keep_stop and delta.stop_reason is not None)
        shown = ids[:-1] if hidden else ids
        if self._detokenizer is not None:
            used = self._add_text(shown, end is not None)
            ids = ids if used is None else ids[:used]
        self._token_ids += ids
        self.num_tokens += len(ids)
        if self._wants_logprobs:
            self._add_logprobs(ids, delta.logprobs)
        if self.finish_reason is None and end is not None:
            self.finish_reason, self._stop_reason = end, delta.stop_reason

    def _add_text(self, ids: Sequence[int], last: bool) -> int | None:
        """Add the text of tokens; return the number of tokens up to the end of a stop string, None without one."""
        detokenizer, stops = self._detokenizer, self._stops
        assert detokenizer is not None
        if stops is None and not self._wants_logprobs:
            self._texts.append(detokenizer.add_tokens(ids) + (detokenizer.finish() if last else ""))
            return None
        for number, token_id in enumerate(ids, 1):
            if self._wants_logprobs:
                self._text_offsets.append(self._text_length)
            ends = self.num_tokens + number > self._min_tokens  # before that no stop string counts
            if ends and token_id in self._hidden_stops:
                self._finish_text(stops, detokenizer, ends)
                if self.finish_reason is None:
                    self.finish_reason, self._stop_reason = "stop", self._hidden_stops[token_id]
                return number
            if self._release(stops, detokenizer.add_tokens((token_id,)), ends):
                return number
        if last:
            ends = self.num_tokens + len(ids) > self._min_tokens
            if self._finish_text(stops, detokenizer, ends):
                return len(ids)
        return None

    def _finish_text(self, stops: StopStrings | None, detokenizer: IncrementalDetokenizer, ends: bool) -> bool:
        """Add all text that is still held back; True if a stop string ends it."""
        found = self._release(stops, detokenizer.finish(), ends)
        if not found and stops is not None:
            self._texts.append(stops.release())
        return found

    def _add_logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        for token_id, found in zip(ids, logprobs, strict=False):  # a stop string may have cut the ids
            self._cumulative_logprob += found.logprob
            if self._packed is None:
                self._logprobs.append(self.logprob_entry(token_id, found))
        if self._packed is not None:
            self._packed.extend(logprobs[: len(ids)])
        hidden = len(self._token_ids) - len(self._text_offsets)
        self._text_offsets += [self._text_length] * hidden

    def logprob_entry(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        """One position: the token that is there, then the alternatives."""
        entry = {token_id: self._logprob(token_id, found.logprob, found.rank)}
        for rank, (other, logprob) in enumerate(found.top, 1):
            entry.setdefault(other, self._logprob(other, logprob, rank))
        return entry

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, self._decoded(token_id) if self._decoded else None)

    def _release(self, stops: StopStrings | None, text: str, ends: bool) -> bool:
        """Add text as far as it is decided; True if a stop string ends it."""
        self._text_length += len(text)
        if stops is None:
            self._texts.append(text)
            return False
        text, found = stops.add_text(text, ends)
        if found is not None:
            self.finish_reason, self._stop_reason = "stop", found
            if not self._keep_stop:
                text = text[:-len(found)]
        self._texts.append(text)
        return found is not None

    def fail(self) -> None:
        """End with an error."""
        self.has_new_output = True
        self.finish_reason = "error"

    def output(self, whole: bool) -> CompletionOutput:
        """Everything so far if `whole`, else what is new since the last call."""
        text = "".join(self._texts)
        output = CompletionOutput(self.index, text, tuple(self._token_ids), finish_reason=self.finish_reason,
                                  stop_reason=self._stop_reason, weight_versions=self._weight_versions)
        if self._wants_logprobs:
            output = replace(output, cumulative_logprob=self._cumulative_logprob, logprobs=self._entries(),
                             text_offsets=tuple(self._text_offsets))
        self._texts = [text] if whole else []
        if not whole:
            self._token_ids, self._logprobs, self._text_offsets = [], [], []
            self._packed = None if self._packed is None else PackedLogprobs()
        self.has_new_output = False
        return output

    def _entries(self) -> Sequence[dict[int, Logprob]]:
        if self._packed is None:
            return tuple(self._logprobs)
        return LazyLogprobs(tuple(self._token_ids), self._packed, self.logprob_entry)
