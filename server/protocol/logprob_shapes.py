"""Log probabilities as JSON of OpenAI's two endpoints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpaged.core.outputs import CompletionOutput, Logprob
from jaxpaged.server.protocol.error_answers import to_json
from jaxpaged.server.protocol.json_parts import json_list
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
        return {name: list(values) for name, values in self._lists(choice).items()}

    def parts(self, choice: CompletionOutput) -> Iterator[bytes]:
        """The `logprobs` object of a choice as JSON, in parts."""
        if not choice.logprobs:
            yield b"null"
            return
        before = b"{"
        for name, values in self._lists(choice).items():
            yield before + to_json(name) + b":"
            yield from json_list(values)
            before = b","
        yield b"}"

    def _lists(self, choice: CompletionOutput) -> dict[str, Iterator[Any]]:
        if self._chat:
            return {"content": self._content(choice)}
        ids, logprobs = choice.token_ids, choice.logprobs
        assert logprobs is not None and len(ids) == len(logprobs), "each token has log probabilities"
        return {
            "tokens": map(self._token_text, ids),
            # The first token of an echoed prompt has none.
            "token_logprobs": (_finite(entry[token].logprob) if entry else None
                               for token, entry in zip(ids, logprobs, strict=True)),
            "top_logprobs": (self._by_text(entry) if entry else None for entry in logprobs),
            "text_offset": iter(choice.text_offsets),
        }

    def _content(self, choice: CompletionOutput) -> Iterator[dict[str, Any]]:
        assert choice.logprobs is not None
        last = choice.token_ids[-1]
        hides_last = choice.finish_reason == "stop" and (
            last in self._eos or (last == choice.stop_reason and not self._keep_stop))
        for number, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True), 1):
            item = self._item(token, entry[token].logprob)
            if (self._skip_special and self._tokenizer.is_special(token)) or (
                    hides_last and number == len(choice.token_ids)):
                item["bytes"] = []
            best = sorted((other for other in entry.items()), key=lambda pair: pair[1].rank or 0)
            item["top_logprobs"] = [self._item(other, found.logprob) for other, found in best[:self._count]]
            yield item

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


def prompt_parts(logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> Iterator[bytes]:
    """vLLM's `prompt_logprobs` as JSON, in parts: log probability, rank and text of each prompt token and its
    alternatives, by id.
    """
    if logprobs is None:
        return iter((b"null",))
    return json_list(None if entry is None else {
        str(token): {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
        for token, item in entry.items()} for entry in logprobs)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
