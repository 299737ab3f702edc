"""Log probabilities as JSON of OpenAI's two endpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpaged.core.outputs import CompletionOutput, Logprob
from jaxpaged.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON lacks


class LogprobShape:
    """Writes the log probabilities of one request's choices.

    A token that is only part of a character is written as `bytes:` and its bytes, as OpenAI does. In a chat, `bytes` of
    a token that the text omits (an end token, a special token) is empty, so that all `bytes` joined are the UTF-8 of
    the text, except that the part of the last token after a stop string is included.

    Args:
        chat: the format of chat completions, else of completions.
        count: requested number of alternatives.
        skip_special_tokens, keep_stop: as in the request.
        eos_token_ids: the model's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, count: int, skip_special_tokens: bool = True,
                 keep_stop: bool = False, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._chat, self._count = tokenizer, chat, count
        self._eos = eos_token_ids
        self._skip_special, self._keep_stop = skip_special_tokens, keep_stop

    def choice_logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        """The `logprobs` object of a choice, or of the part of it in a chunk; None without tokens."""
        if not choice.logprobs:
            return None
        if self._chat:
            return {"content": self._content(choice)}
        return self.completion(choice.token_ids, choice.logprobs, choice.text_offsets)

    def completion(self, ids: Iterable[int], logprobs: Iterable[Mapping[int, Logprob] | None],
                   offsets: Iterable[int]) -> dict[str, Any]:
        """The lists of a completion; the first token of an echoed prompt has no entry."""
        pairs = list(zip(ids, logprobs, strict=True))
        return {
            "tokens": [self._token_text(token) for token, _ in pairs],
            "token_logprobs": [_finite(entry[token].logprob) if entry else None for token, entry in pairs],
            "top_logprobs": [self._by_text(entry) if entry else None for _, entry in pairs],
            "text_offset": list(offsets),
        }

    def _content(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        assert choice.logprobs is not None
        content = []
        for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
            item = self._item(token, entry[token].logprob)
            if self._skip_special and self._tokenizer.is_special(token):
                item["bytes"] = []
            best = sorted((other for other in entry.items()), key=lambda pair: pair[1].rank or 0)
            item["top_logprobs"] = [self._item(other, found.logprob) for other, found in best[:self._count]]
            content.append(item)
        last = choice.token_ids[-1]
        hidden = last in self._eos or (last == choice.stop_reason and not self._keep_stop)
        if choice.finish_reason == "stop" and hidden:
            content[-1]["bytes"] = []
        return content

    def _item(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token_text(token), "logprob": _finite(logprob),
                "bytes": list(self._tokenizer.token_bytes(token))}

    def _by_text(self, entry: Mapping[int, Logprob]) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, item in entry.items():
            name = self._token_text(token)
            found[f"token_id:{token}" if name in found else name] = _finite(item.logprob)
        return found

    def _token_text(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_entries(logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: log probability, rank and text of each prompt token and its alternatives, by id."""
    if logprobs is None:
        return None
    return [None if entry is None else {
        str(token): {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
        for token, item in entry.items()} for entry in logprobs]


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
