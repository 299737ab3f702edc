"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""

from jaxpaged.server.parsers.events import Emit, EndOfText, Steps, Words, until
from jaxpaged.server.parsers.json_calls import one_call

_BEGIN, _END = "<tool_call>", "</tool_call>"


def hermes(emit: Emit) -> Steps:
    """A closing tag may be missing."""
    words = Words(emit)
    tags: tuple[str, ...] = (_BEGIN,)
    try:
        while True:
            if (yield from until(tags, words.add)) == _END:
                tags = (_BEGIN,)
            elif (yield from one_call(emit, words, _BEGIN)):
                tags = (_BEGIN, _END)
    except EndOfText:
        words.end()
        raise
