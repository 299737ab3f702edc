"""`echo`: each choice of a completion starts with the prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.frontend.input_processor import ProcessedRequest
from jaxpaged.frontend.lazy_logprobs import EchoedLogprobs
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.tokenizer import Tokenizer


class Echo:
    """Prepends each request's prompt to its choices: its text, its ids, and its log probabilities if there are any.

    Args:
        logprobs: whether the answer reports log probabilities.
    """

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._prompts: dict[str, tuple[str, list[int]]] = {}  # request -> its prompt's text, and its tokens' offsets
        self._echoed: set[tuple[str, int]] = set()  # choices

    def read_prompts(self, requests: Iterable[ProcessedRequest]) -> None:
        """Find the text of each prompt. This takes microseconds per token: run it beside the event loop."""
        for request in requests:
            self._prompts[request.request_id] = self._prompt_text(request.prompt_token_ids, request.prompt)

    def prepend_prompt(self, output: RequestOutput) -> RequestOutput:
        """The output with the prompt before the first part of each choice; later text offsets move by its length."""
        return replace(output, outputs=tuple(self._prepend_to(output, choice) for choice in output.outputs))

    def _prepend_to(self, output: RequestOutput, choice: CompletionOutput) -> CompletionOutput:
        key = output.request_id, choice.index
        text, offsets = self._prompts[output.request_id]
        if key in self._echoed:
            return replace(choice, text_offsets=tuple(offset + len(text) for offset in choice.text_offsets))
        self._echoed.add(key)
        choice = replace(choice, text=text + choice.text, token_ids=output.prompt_token_ids + choice.token_ids)
        if not self._logprobs or output.prompt_logprobs is None:
            return choice
        return replace(
            choice,
            logprobs=EchoedLogprobs(output.prompt_logprobs, choice.logprobs or ()),
            text_offsets=(*offsets, *(offset + len(text) for offset in choice.text_offsets)))

    def _prompt_text(self, ids: Sequence[int], given: str | None) -> tuple[str, list[int]]:
        """The prompt's text, as given or decoded from its ids, and, if wanted, the offset of each token in it."""
        if given is not None and not self._logprobs:
            return given, []
        if given is None:
            parts = self._token_texts(ids, 0, False)
            text = "".join(parts)
        else:  # the given text lacks what the tokenizer added: a first token, or every special token
            parts, text = self._token_texts(ids, 0, False), given
            for unseen, skip in ((1, False), (0, True)):
                if "".join(parts) == given:
                    break
                other = self._token_texts(ids, unseen, skip)
                parts = min(parts, other, key=lambda texts: _distance("".join(texts), given))
        ends = accumulate(map(len, parts[:-1]), initial=0)
        return text, [min(end, len(text)) for end in ends][:-1]

    def _token_texts(self, ids: Sequence[int], unseen: int, skip_special_tokens: bool) -> list[str]:
        """The text of each token, empty for the first `unseen`, and the text released at the end."""
        decoder = IncrementalDetokenizer(self._tokenizer, (), skip_special_tokens)
        seen = [decoder.add_tokens((token,)) for token in ids[unseen:]]
        return [*[""] * len(ids[:unseen]), *seen, decoder.finish()]


def _distance(text: str, given: str) -> int:
    """0 where they are equal."""
    return 0 if text == given else 1 + abs(len(text) - len(given))
