"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several of these with semicolons between."""

from collections.abc import Generator

from jaxpaged.server.parsers.events import SPACE, Emit, EndOfText, Steps, Words, everything
from jaxpaged.server.parsers.json_calls import one_call

_TAG = "<|python_tag|>"


def llama3_json(emit: Emit) -> Steps:
    """An answer that begins otherwise has no calls. An object without arguments is JSON for the user."""
    words = Words(emit)
    separators = SPACE
    try:
        while (before := (yield from _opening(words, separators))) is not None:
            if not (yield from one_call(emit, words, before, "{", arguments_needed=True)):
                break
            separators = SPACE + ";"
        yield from everything(words.add)
    except EndOfText:
        words.end()
        raise


def _opening(words: Words, separators: str) -> Generator[None, str, str | None]:
    """Read to the brace of a call, and return what stood before it; None where something else comes: it is words."""
    held = ""
    try:
        while True:
            char = yield
            if char == "{" and held.strip(separators) in ("", _TAG):
                return held
            held += char
            rest = held.lstrip(separators)
            if not _TAG.startswith(rest) and rest.rstrip(SPACE) != _TAG:
                words.add(held)
                return None
    except EndOfText:
        words.add(held)
        raise
