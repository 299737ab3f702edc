"""Tool calls in the formats of the models; anywhere else the text is content.

Small models write them carelessly. What can be understood becomes a call (see `lenient_json`); what cannot is content,
without its tags. A tagged call may name any function, offered or not: clients answer that with an error which the model
then reads.
"""

import re
from collections.abc import Callable, Collection

from jaxpaged.server.parsers.events import (
    Emit,
    EndOfText,
    ParseFunction,
    Parsing,
    TextEmitter,
)
from jaxpaged.server.parsers.json_calls import CallReader
from jaxpaged.server.parsers.reader import CharReader

_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA3_TAG = "<|python_tag|>"
_MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_MARKS = re.compile(r"\[ARGS\]|\[CALL_ID\][^\[\s]*")
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}\"']+)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*")


def hermes(emit: Emit, names: Collection[str] = ()) -> Parsing:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the last tag may be missing."""
    reader, text = CharReader(), TextEmitter(emit)
    calls = CallReader(reader, emit, text, _HERMES_BEGIN, _HERMES_END)
    tags = (_HERMES_BEGIN, _HERMES_END)
    try:
        while True:
            if (yield from reader.until(tags, text.add_text)) == _HERMES_BEGIN and (yield from calls.read_calls()):
                yield from calls.read_rest(tags)
    except EndOfText:
        text.finish()
        raise


def llama3_json(emit: Emit, names: Collection[str] = ()) -> Parsing:
    """Llama 3: `{"name": ..., "parameters": {...}}`, or several of these separated by semicolons.

    Without its tag a call looks like JSON for the user: it is one only if it has arguments and names one of `names`.
    """
    reader, text = CharReader(), TextEmitter(emit)
    calls = CallReader(reader, emit, text, _LLAMA3_TAG)
    try:
        while True:
            tag = yield from reader.until((_LLAMA3_TAG, "{", "["), text.add_text)
            if tag == _LLAMA3_TAG:
                yield from calls.read_calls(arguments_needed=True)
            else:
                reader.give_back(tag)
                yield from calls.read_calls(names, arguments_needed=True)
    except EndOfText:
        text.finish()
        raise


def mistral(emit: Emit, names: Collection[str] = ()) -> Parsing:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer models: `[TOOL_CALLS]name[ARGS]{...}`."""
    reader, text = CharReader(), TextEmitter(emit)
    calls = CallReader(reader, emit, text, _MISTRAL_BEGIN)
    try:
        while True:
            yield from reader.until((_MISTRAL_BEGIN,), text.add_text)
            char = yield from reader.next_non_space()
            reader.give_back(char)
            if char in "[{\"'`":
                yield from calls.read_calls()
            else:
                yield from _read_named(reader, calls, text)
    except EndOfText:
        text.finish()
        raise


def _read_named(reader: CharReader, calls: CallReader, text: TextEmitter) -> Parsing:
    """Read `name[ARGS]{...}`; anything else up to the end of the line is text, without its marks."""
    head: list[str] = []
    try:
        end = yield from reader.until(("{", "\n", _MISTRAL_BEGIN), head.append)
    except EndOfText:
        text.add_text("".join(head).partition("[")[0])
        raise
    found = _MISTRAL_NAME.fullmatch("".join(head))
    if found is not None and end == "{":
        yield from calls.read_arguments(found[1])
        return
    reader.give_back(end)
    text.add_text(_MISTRAL_MARKS.sub("", "".join(head)))


def required_calls(emit: Emit) -> Parsing:
    """Calls that tool_choice requires; the answer is `[{"name": ..., "parameters": {...}}, ...]`, and nothing else."""
    reader = CharReader()
    calls = CallReader(reader, emit, TextEmitter(lambda event: None), "")
    while True:
        reader.give_back((yield from reader.until(("{",), lambda text: None)))
        yield from calls.read_calls()


def named_call(name: str) -> ParseFunction:
    """The call that tool_choice names; structured output makes the answer its arguments."""

    def parse(emit: Emit) -> Parsing:
        reader = CharReader()
        calls = CallReader(reader, emit, TextEmitter(emit), "")
        if (yield from reader.next_non_space()) == "{":
            yield from calls.read_arguments(name)
        while True:
            yield from reader.next()

    return parse


ToolParser = Callable[[Emit, Collection[str]], Parsing]
TOOL_PARSERS: dict[str, ToolParser] = {"hermes": hermes, "llama3_json": llama3_json, "mistral": mistral}


def make_tool_parser(name: str, names: Collection[str]) -> ParseFunction:
    """The parser of this format, for a request that offers functions of these names."""
    return lambda emit: TOOL_PARSERS[name](emit, names)
