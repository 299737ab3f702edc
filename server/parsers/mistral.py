"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or newer `[TOOL_CALLS]name[ARGS]{...}` for each."""

from jaxpaged.server.parsers.events import SPACE, Emit, EndOfText, Steps, Words, until
from jaxpaged.server.parsers.json_calls import MAX_NAME_CHARS, JsonCall, calls_in_brackets

_BEGIN = "[TOOL_CALLS]"


def mistral(emit: Emit) -> Steps:
    """Both forms; the older models write the first."""
    words = Words(emit)
    try:
        while True:
            yield from until((_BEGIN,), words.add)
            before = _BEGIN
            try:
                while (char := (yield)) in SPACE:
                    before += char
            except EndOfText:
                words.add(before)
                raise
            if char == "[":
                yield from calls_in_brackets(emit, words, before + char)
            else:
                yield from _named_call(emit, words, before, char)
    except EndOfText:
        words.end()
        raise


def _named_call(emit: Emit, words: Words, before: str, char: str) -> Steps:
    head = ""
    try:
        while char != "{":
            head += char
            if char == "\n" or len(head) > MAX_NAME_CHARS:
                words.add(before + head)
                return
            char = yield
    except EndOfText:
        words.add(before + head)
        raise
    name = head.partition("[")[0].strip()  # the rest are marks such as [CALL_ID]... and [ARGS]
    if not name:
        words.add(before + head + char)
        return
    yield from JsonCall(emit).arguments(name, char)
    words.call()
