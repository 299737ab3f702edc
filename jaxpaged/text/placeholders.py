"""Placeholders for special-token text in messages, while a chat template is rendered and its output tokenized."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxpaged.core.errors import RequestError

# Characters that replace special-token text of a message while a template is rendered: private use, plane 16.
_CHARACTERS = range(0x100000, 0x10FFFE)


class Placeholders:
    """Replaces each special-token text in one request's messages by one character that occurs nowhere in them.

    It is one character so that a template that cuts or compares strings cannot split it.
    """

    def __init__(self, pattern: re.Pattern[str], given: Any) -> None:
        self._pattern = pattern
        self._of: dict[str, str] = {}
        texts = list(_strings_in(given))
        found = {match for text in texts for match in pattern.findall(text)}
        if found:
            taken = {char for text in texts for char in text if ord(char) in _CHARACTERS}
            free = (chr(number) for number in _CHARACTERS if chr(number) not in taken)
            self._of = dict(zip(sorted(found), free, strict=False))
            if len(self._of) < len(found):
                raise RequestError("the messages use too many private-use characters", param="messages")

    @property
    def used(self) -> bool:
        """Whether anything had to be replaced."""
        return bool(self._of)

    def hide(self, value: Any) -> Any:
        """Replace special-token text in every string of a JSON-like value, keys included."""
        if not self._of:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._of[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Replace the placeholders by the original text."""
        return text.translate({ord(char): original for original, char in self._of.items()})


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the leftmost, and there the longest, of the texts, as the tokenizer does."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings_in(key)
            yield from _strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings_in(item)
