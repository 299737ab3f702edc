"""The bytes that each token decodes to, and how long its text can be."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class ByteRule:
    """How the tokens' own bytes make up text, for the two decoders that nearly all language models have.

    Attributes:
        byte_level: tokens are spelled in GPT-2's byte alphabet; otherwise they are text with `▁` for a space, and
            tokens like `<0xE4>` for single bytes.
        strip: number of spaces removed at the very start of a text.
    """

    byte_level: bool
    strip: int = 0

    def bytes_of(self, token: str) -> bytes:
        """The bytes of a token, given as the vocabulary spells it."""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token is spelled as it is
                return token.encode()
        single = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
        return bytes.fromhex(single[1]) if single else token.replace("▁", " ").encode()


def find_byte_rule(backend: Backend) -> ByteRule | None:
    """Recognize the two decoders whose every step is known; None for any other, which the library decodes."""
    steps = _steps(backend.decoder, "decoders")
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteRule(byte_level=True)
    if steps[:3] != [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                     {"type": "Fuse"}]:
        return None
    if len(steps) == 3:
        return ByteRule(byte_level=False)
    last = steps[3]
    if len(steps) == 4 and last["type"] == "Strip" and last["content"] == " " and last["stop"] == 0:
        return ByteRule(byte_level=False, strip=last["start"])
    return None


def find_max_token_chars(backend: Backend, rule: ByteRule | None, added: Iterable[AddedToken]) -> int | None:
    """Longest text of one token in characters, where no step of the tokenizer drops or folds text without bound."""
    if rule is None or any(token.lstrip or token.rstrip for token in added):
        return None
    if not rule.byte_level and not getattr(backend.model, "byte_fallback", False):
        return None  # any run of unknown characters may become one token
    fold = 1
    for step in _steps(backend.normalizer, "normalizers"):
        kind = step["type"]
        if kind == "NFC":
            fold = 4  # maximum number of code points that compose one character
        elif kind != "Prepend" and not (kind == "Replace" and step["pattern"] == {"String": " "} and step["content"]):
            return None
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if step["type"] not in ("ByteLevel", "Digits", "Metaspace", "Split") or step.get("behavior") == "Removed":
            return None
    return fold * max(map(len, backend.get_vocab()))


def _steps(component: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, as the library writes them to JSON."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    return list(state[inner]) if state["type"] == "Sequence" else [state]


def _gpt2_alphabet() -> dict[str, int]:
    """The character of each byte in byte-level vocabularies: printable ones for themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _gpt2_alphabet()
