"""`echo`: the prompt as the beginning of each choice of a completion."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from jaxpaged.detokenizer import IncrementalDetokenizer
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.tokenizer import Tokenizer


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
        """The prompt's text, as it was given or as its ids say, and where each token begins in it."""
        for skip_special_tokens in (False, True):  # what the tokenizer has added itself is not in the given text
            reader = IncrementalDetokenizer(self._tokenizer, (), skip_special_tokens)
            pieces = [reader.add((token,)) for token in ids]
            text = "".join(pieces) + reader.finish()
            if given is None or text == given:
                break
        text = text if given is None else given
        ends = accumulate(map(len, pieces), initial=0)
        return text, [min(end, len(text)) for end in ends][:-1]
