"""The text side of one sequence: its tokens, its text and log probabilities, and how it ended."""

from collections.abc import Sequence
from dataclasses import replace

from jaxpaged.detokenizer import IncrementalDetokenizer
from jaxpaged.messages import TokenDelta, TokenLogprobs
from jaxpaged.outputs import CompletionOutput, FinishReason, Logprob
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.stop_strings import StopStrings
from jaxpaged.tokenizer import Tokenizer


class Choice:
    """One sequence of a request.

    Attributes:
        index: which of the request's choices it is.
        sequence_id: the engine's name for it.
        num_tokens: tokens so far.
        num_preemptions: times that the engine has preempted it.
        finish_reason: None while it goes on.
        has_news: something has come since the last output.
    """

    def __init__(self, index: int, sequence_id: str, params: SamplingParams, tokenizer: Tokenizer | None,
                 prompt_token_ids: Sequence[int]) -> None:
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
        self._tells_logprobs = params.logprobs is not None
        self._decoded = tokenizer.token_text if tokenizer else None
        self._cumulative_logprob = 0.0
        self._text_length = 0
        # What no output has shown yet; for cumulative outputs, everything.
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._text_offsets: list[int] = []
        self.has_news = False

    def take(self, delta: TokenDelta) -> None:
        """Go on with the engine's newest tokens."""
        self.has_news = True
        ids, end = delta.token_ids, delta.finish_reason
        self.num_preemptions = max(self.num_preemptions, delta.num_preemptions)
        hidden = end == "stop" and not (self._keep_stop and delta.stop_reason is not None)
        shown = ids[:-1] if hidden else ids
        if self._detokenizer is not None:
            used = self._read(shown, end is not None)
            ids = ids if used is None else ids[:used]
        self._token_ids += ids
        self.num_tokens += len(ids)
        if self._tells_logprobs:
            self._take_logprobs(ids, delta.logprobs)
        if self.finish_reason is None and end is not None:
            self.finish_reason, self._stop_reason = end, delta.stop_reason

    def _read(self, ids: Sequence[int], last: bool) -> int | None:
        """Add the text of tokens; return how many they were up to the end of a stop string, None without one."""
        detokenizer, stops = self._detokenizer, self._stops
        assert detokenizer is not None
        if stops is None and not self._tells_logprobs:
            self._texts.append(detokenizer.add(ids) + (detokenizer.finish() if last else ""))
            return None
        for number, token_id in enumerate(ids, 1):
            if self._tells_logprobs:
                self._text_offsets.append(self._text_length)
            ends = self.num_tokens + number > self._min_tokens  # before that no stop string counts
            if ends and token_id in self._hidden_stops:
                self._finish_text(stops, detokenizer, ends)
                if self.finish_reason is None:
                    self.finish_reason, self._stop_reason = "stop", self._hidden_stops[token_id]
                return number
            if self._watch(stops, detokenizer.add((token_id,)), ends):
                return number
        if last:
            ends = self.num_tokens + len(ids) > self._min_tokens
            if self._finish_text(stops, detokenizer, ends):
                return len(ids)
        return None

    def _finish_text(self, stops: StopStrings | None, detokenizer: IncrementalDetokenizer, ends: bool) -> bool:
        """Add all text that is still held back; True if a stop string ends it."""
        found = self._watch(stops, detokenizer.finish(), ends)
        if not found and stops is not None:
            self._texts.append(stops.release())
        return found

    def _take_logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        for token_id, found in zip(ids, logprobs, strict=False):  # a stop string may have cut the ids
            self._cumulative_logprob += found.logprob
            self._logprobs.append(self.logprob_entry(token_id, found))
        hidden = len(self._logprobs) - len(self._text_offsets)
        self._text_offsets += [self._text_length] * hidden

    def logprob_entry(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        """One position: the token that is there, then the alternatives."""
        entry = {token_id: self._logprob(token_id, found.logprob, found.rank)}
        for rank, (other, logprob) in enumerate(found.top, 1):
            entry.setdefault(other, self._logprob(other, logprob, rank))
        return entry

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, self._decoded(token_id) if self._decoded else None)

    def _watch(self, stops: StopStrings | None, text: str, ends: bool) -> bool:
        """Add text as far as it is decided; True if a stop string ends it."""
        self._text_length += len(text)
        if stops is None:
            self._texts.append(text)
            return False
        text, found = stops.add(text, ends)
        if found is not None:
            self.finish_reason, self._stop_reason = "stop", found
            if not self._keep_stop:
                text = text[:-len(found)]
        self._texts.append(text)
        return found is not None

    def fail(self) -> None:
        """End with an error."""
        self.has_news = True
        self.finish_reason = "error"

    def output(self, whole: bool) -> CompletionOutput:
        """Everything so far, or what is new since the last call."""
        text = "".join(self._texts)
        output = CompletionOutput(self.index, text, tuple(self._token_ids), finish_reason=self.finish_reason,
                                  stop_reason=self._stop_reason)
        if self._tells_logprobs:
            output = replace(output, cumulative_logprob=self._cumulative_logprob, logprobs=tuple(self._logprobs),
                             text_offsets=tuple(self._text_offsets))
        self._texts = [text] if whole else []
        if not whole:
            self._token_ids, self._logprobs, self._text_offsets = [], [], []
        self.has_news = False
        return output
