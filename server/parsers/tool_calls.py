"""Tool calls in the formats of the models; anywhere else the text is content."""

from collections.abc import Generator

from jaxpaged.server.parsers.events import (
    SPACE,
    CallArguments,
    CallStart,
    Emit,
    EndOfText,
    ParseFunction,
    Parsing,
    TextEmitter,
    pass_through,
    read_non_space,
    read_until,
)
from jaxpaged.server.parsers.json_calls import MAX_NAME_CHARS, JsonCall, read_call, read_call_list

_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA3_TAG = "<|python_tag|>"
_MISTRAL_BEGIN = "[TOOL_CALLS]"


def hermes(emit: Emit) -> Parsing:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the last tag may be missing."""
    text = TextEmitter(emit)
    tags: tuple[str, ...] = (_HERMES_BEGIN,)
    try:
        while True:
            if (yield from read_until(tags, text.add_text)) == _HERMES_END:
                tags = (_HERMES_BEGIN,)
            elif (yield from read_call(emit, text, _HERMES_BEGIN)):
                tags = (_HERMES_BEGIN, _HERMES_END)
    except EndOfText:
        text.finish()
        raise


def llama3_json(emit: Emit) -> Parsing:
    """Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several of these separated by semicolons.

    An answer that starts otherwise has no calls. An object without arguments is JSON for the user.
    """
    text = TextEmitter(emit)
    separators = SPACE
    try:
        while (before := (yield from _read_opening(text, separators))) is not None:
            if not (yield from read_call(emit, text, before, "{", arguments_needed=True)):
                break
            separators = SPACE + ";"
        yield from pass_through(text.add_text)
    except EndOfText:
        text.finish()
        raise


def _read_opening(text: TextEmitter, separators: str) -> Generator[None, str, str | None]:
    """Read up to the brace of a call and return what precedes it; None where the text is no call and was emitted."""
    held = ""
    try:
        while True:
            char = yield
            if char == "{" and held.strip(separators) in ("", _LLAMA3_TAG):
                return held
            held += char
            rest = held.lstrip(separators)
            if not _LLAMA3_TAG.startswith(rest) and rest.rstrip(SPACE) != _LLAMA3_TAG:
                text.add_text(held)
                return None
    except EndOfText:
        text.add_text(held)
        raise


def mistral(emit: Emit) -> Parsing:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer models: `[TOOL_CALLS]name[ARGS]{...}`."""
    text = TextEmitter(emit)
    try:
        while True:
            yield from read_until((_MISTRAL_BEGIN,), text.add_text)
            before = _MISTRAL_BEGIN
            try:
                while (char := (yield)) in SPACE:
                    before += char
            except EndOfText:
                text.add_text(before)
                raise
            if char == "[":
                yield from read_call_list(emit, text, before + char)
            else:
                yield from _read_mistral_call(emit, text, before, char)
    except EndOfText:
        text.finish()
        raise


def _read_mistral_call(emit: Emit, text: TextEmitter, before: str, char: str) -> Parsing:
    head = ""
    try:
        while char != "{":
            head += char
            if char == "\n" or len(head) > MAX_NAME_CHARS:
                text.add_text(before + head)
                return
            char = yield
    except EndOfText:
        text.add_text(before + head)
        raise
    name = head.partition("[")[0].strip()  # then come marks such as [CALL_ID]... and [ARGS]
    if not name:
        text.add_text(before + head + char)
        return
    yield from JsonCall(emit).read_arguments(name, char)
    text.end_call()


def required_calls(emit: Emit) -> Parsing:
    """Calls that tool_choice requires; the answer is `[{"name": ..., "parameters": {...}}, ...]`."""
    text = TextEmitter(emit)
    try:
        char = yield from read_non_space()
        if char == "[":
            yield from read_call_list(emit, text, char)
        else:
            text.add_text(char)
        yield from pass_through(text.add_text)
    except EndOfText:
        text.finish()
        raise


def named_call(name: str) -> ParseFunction:
    """The call that tool_choice names; structured output makes the answer its arguments."""

    def parse(emit: Emit) -> Parsing:
        char = yield from read_non_space()
        emit(CallStart(name))
        emit(CallArguments(char))
        yield from pass_through(lambda text: emit(CallArguments(text)))

    return parse


TOOL_PARSERS: dict[str, ParseFunction] = {"hermes": hermes, "llama3_json": llama3_json, "mistral": mistral}
