"""Text of a growing list of token ids, released as soon as it is decided."""

from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import takewhile

from jaxpaged.text.token_bytes import ByteRule
from jaxpaged.text.tokenizer import Tokenizer

_UNDECODABLE = "\ufffd"
# A character has at most four bytes, so at most three tokens can be waiting for the rest of one.
_MAX_UNDECIDED = 3
# Tokens before the new ones that are decoded with them where the decoder's rule is not known.
_CONTEXT = 8


class IncrementalDetokenizer:
    """Turns the new tokens of one sequence into new text.

    The returned texts, joined, are decode(prompt + output) without the text of the prompt. A character made of several
    tokens is returned whole, with its last token. Bytes that cannot become a character are returned as U+FFFD as soon
    as that is certain, at most three tokens later. One difference from decoding at once: in a byte-fallback vocabulary
    a stray byte spoils only itself, not the characters before it, which have been returned already.

    The API's `spaces_between_special_tokens` has no effect: the decoders put no spaces there.

    Args:
        tokenizer: of the ids.
        prompt_ids: the prompt, whose end may hold the first bytes of a character.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        rule = tokenizer.byte_rule
        self._stream: _ByteStream | _WindowStream = (
            _WindowStream(tokenizer, prompt_ids, skip_special_tokens) if rule is None
            else _ByteStream(tokenizer, rule, prompt_ids, skip_special_tokens))

    def add_tokens(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty where more are needed."""
        return self._stream.add_tokens(ids)

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character cut off by the end. Nothing may be added afterwards."""
        return self._stream.finish()


class _ByteStream:
    """For tokens that are bytes: one pass of an incremental UTF-8 decoder over them."""

    def __init__(self, tokenizer: Tokenizer, rule: ByteRule, prompt_ids: Sequence[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_level = rule.byte_level
        self._skip = skip
        self._pending = b""
        self._strip = 0
        tail = b""
        for token_id in reversed(prompt_ids):
            if not (skip and tokenizer.is_special(token_id)):
                tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) > _MAX_UNDECIDED:
                break
        else:
            # The text starts within these tokens, and the decoder strips spaces at its start.
            self._strip = rule.strip
        self._decode(tail, final=False)

    def add_tokens(self, ids: Sequence[int]) -> str:
        find, tokenizer = self._tokenizer.token_bytes, self._tokenizer
        if self._skip:
            ids = [token_id for token_id in ids if not tokenizer.is_special(token_id)]
        return self._decode(b"".join(map(find, ids)), final=False)

    def finish(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._pending + data
        if self._byte_level:
            text, used = utf_8_decode(data, "replace", final)
        else:
            text, used = self._decode_each(data, final)
        self._pending = data[used:]
        return self._stripped(text) if self._strip and text else text

    def _decode_each(self, data: bytes, final: bool) -> tuple[str, int]:
        """Decode with one U+FFFD for each undecodable byte, as byte-fallback decoders do."""
        text, start = "", 0
        while True:
            try:
                rest, used = utf_8_decode(data[start:], "strict", final)
                return text + rest, start + used
            except UnicodeDecodeError as error:
                good = data[start:start + error.start].decode()
                text += good + _UNDECODABLE * (error.end - error.start)
                start += error.end

    def _stripped(self, text: str) -> str:
        spaces = sum(1 for _ in takewhile(" ".__eq__, text[:self._strip]))
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]


class _WindowStream:
    """For any other decoder: the new tokens are decoded after a few earlier ones, whose text is then cut off."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._context = self._visible(prompt_ids[-4 * _CONTEXT:])[-_CONTEXT:]
        self._waiting: list[int] = []

    def add_tokens(self, ids: Sequence[int]) -> str:
        text = ""
        for token_id in self._visible(ids):
            self._waiting.append(token_id)
            if not self._decode(self._context + self._waiting).endswith(_UNDECODABLE):
                text += self._release(len(self._waiting))
            elif len(self._waiting) > _MAX_UNDECIDED:
                text += self._release(1)
        return text

    def finish(self) -> str:
        return self._release(len(self._waiting))

    def _release(self, count: int) -> str:
        tokens = self._context + self._waiting[:count]
        text = self._decode(tokens)[len(self._decode(self._context)):]
        self._context = tokens[-_CONTEXT:]
        del self._waiting[:count]
        return text

    def _visible(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if not (self._skip and self._tokenizer.is_special(token_id))]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
