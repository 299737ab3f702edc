"""The output of one choice of a request: detokenized, cut at stop strings, with log probabilities."""

from collections.abc import Sequence
from dataclasses import replace

from jaxpaged.core.messages import PackedLogprobs, TokenDelta, TokenLogprobs
from jaxpaged.core.outputs import CompletionOutput, FinishReason, Logprob
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.frontend.lazy_logprobs import LazyLogprobs
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.stop_strings import StopStrings
from jaxpaged.text.tokenizer import Tokenizer


class ChoiceOutput:
    """The output of one sequence of a request: its text, which stop strings end, and its log probabilities.

    Args:
        index: its index among the request's choices.
        sequence_id: the engine's id for it.
        params: the engine's.
        tokenizer: None where only ids are wanted.
        prompt_token_ids: of the prompt that it continues.
        lazy_logprobs: make log probabilities only where they are read.

    Attributes:
        index, sequence_id: as given.
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
