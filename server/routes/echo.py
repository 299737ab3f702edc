"""`echo`: the prompt as the beginning of each choice of a completion."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.tokenizer import Tokenizer


class Echo:
    """Puts each request's prompt before its choices: its text, its ids, and its log probabilities where they are there.

    Args:
        logprobs: whether the answer tells log probabilities.
    """

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._echoed: dict[tuple[str, int], int] = {}  # choice -> length of its prompt's text

    def add(self, output: RequestOutput) -> RequestOutput:
        """The output with the prompt before the first part of each choice, and later offsets moved behind it."""
        return replace(output, outputs=tuple(self._add(output, choice) for choice in output.outputs))

    def _add(self, output: RequestOutput, choice: CompletionOutput) -> CompletionOutput:
        key = output.request_id, choice.index
        ids = output.prompt_token_ids
        if key in self._echoed:
            length = self._echoed[key]
            return replace(choice, text_offsets=tuple(place + length for place in choice.text_offsets))
        text, offsets = self._read(ids, output.prompt)
        self._echoed[key] = len(text)
        choice = replace(choice, text=text + choice.text, token_ids=ids + choice.token_ids)
        if not self._logprobs or output.prompt_logprobs is None:
            return choice
        return replace(
            choice,
            logprobs=(*(entry or {} for entry in output.prompt_logprobs), *(choice.logprobs or ())),
            text_offsets=(*offsets, *(place + len(text) for place in choice.text_offsets)))

    def _read(self, ids: Sequence[int], given: str | None) -> tuple[str, list[int]]:
        """The prompt's text, as it was given or as its ids say, and, if wanted, where each token begins in it."""
        if given is not None and not self._logprobs:
            return given, []
        if given is None:
            pieces = self._pieces(ids, 0, False)
            text = "".join(pieces)
        else:  # what the tokenizer has added itself is not in the given text: a first token, or every special one
            readings = (self._pieces(ids, unseen, skip) for unseen, skip in ((0, False), (1, False), (0, True)))
            pieces = min(readings, key=lambda pieces: _distance("".join(pieces), given))
            text = given
        ends = accumulate(map(len, pieces[:-1]), initial=0)
        return text, [min(end, len(text)) for end in ends][:-1]

    def _pieces(self, ids: Sequence[int], unseen: int, skip_special_tokens: bool) -> list[str]:
        """The text of each token, none of the first `unseen`, and what the end brings."""
        reader = IncrementalDetokenizer(self._tokenizer, (), skip_special_tokens)
        return [*("" for _ in ids[:unseen]), *(reader.add((token,)) for token in ids[unseen:]), reader.finish()]


def _distance(text: str, given: str) -> int:
    """0 where they are equal."""
    return 0 if text == given else 1 + abs(len(text) - len(given))
