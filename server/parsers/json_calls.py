"""Tool calls written as JSON objects, `{"name": ..., "arguments": {...}}`, emitted while the model writes them."""

import json
from collections.abc import Callable, Generator

from jaxpaged.server.parsers.events import (
    SPACE,
    CallArguments,
    CallStart,
    Emit,
    EndOfText,
    Parsing,
    Read,
    TextEmitter,
    read_non_space,
)

MAX_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")


class NotACallError(Exception):
    """The text is not a call; none of it was emitted."""


class JsonCall:
    """Parses one call.

    Args:
        arguments_needed: an object without arguments is not a call; otherwise it is a call without any.

    Attributes:
        consumed: the characters read so far, to be emitted as text if they turn out not to be a call.
        started: whether anything was emitted.
    """

    def __init__(self, emit: Emit, *, arguments_needed: bool = False) -> None:
        self.consumed: list[str] = []
        self.started = False
        self._emit = emit
        self._arguments_needed = arguments_needed
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that precede the name

    def read_object(self, first: str = "") -> Parsing:
        """Read an object to its closing brace.

        Args:
            first: its opening brace, if the caller has read that already.

        Raises:
            NotACallError: it is not a call.
        """
        self.consumed += first
        try:
            _expect((first or (yield from self._next_non_space())) == "{")
            char = yield from self._next_non_space()
            while char != "}":
                key = yield from self._string(char)
                _expect((yield from self._next_non_space()) == ":")
                char = yield from self._member(key, (yield from self._next_non_space()))
                _expect(char in ",}")
                if char == ",":
                    char = yield from self._next_non_space()
            _expect(self.started or (self._name is not None and not (self._arguments_needed and self._early is None)))
        except NotACallError:
            if not self.started:
                raise
            return  # what was emitted stays
        if not self.started:
            self._start()
            self._emit_arguments("".join(self._early or ["{}"]))

    def read_arguments(self, name: str, char: str) -> Parsing:
        """Read a bare object of arguments, whose opening brace is `char`, for a call of this name."""
        self._name = name
        self._start()
        yield from self._nested(char, self._emit_arguments)

    def _member(self, key: str, char: str) -> Read:
        """Read a value, and return the first character after it that is not white space."""
        if key == "name" and self._name is None:
            self._name = yield from self._string(char)
            _expect(0 < len(self._name) <= MAX_NAME_CHARS)
        elif key in _ARGUMENTS and not self.started and self._early is None:
            return (yield from self._arguments_value(char))
        elif char == '"':
            yield from self._string(char)
        elif char in "{[":
            yield from self._nested(char, lambda text: None)
        else:
            return (yield from self._scalar(char))[1]
        return (yield from self._next_non_space())

    def _arguments_value(self, char: str) -> Read:
        after = ""
        if char == "{":
            if self._name is None:
                self._early = []
            else:
                self._start()
            yield from self._nested(char, self._emit_arguments)
        else:
            if char == '"':  # JSON inside a string
                text = (yield from self._string(char)).strip()
            else:
                text, after = yield from self._scalar(char)
                _expect(text == "null")
                text = ""
            self._early = [text or "{}"]
            if self._name is not None:
                self._start()
                self._emit_arguments(text or "{}")
        return after or (yield from self._next_non_space())

    def _start(self) -> None:
        assert self._name is not None
        self.started = True
        self._emit(CallStart(self._name))

    def _emit_arguments(self, text: str) -> None:
        if self.started:
            self._emit(CallArguments(text))
        else:
            assert self._early is not None
            self._early.append(text)

    def _next_char(self) -> Read:
        char = yield
        if not self.started:
            self.consumed.append(char)
        return char

    def _next_non_space(self) -> Read:
        """The next character that is not white space."""
        while (char := (yield from self._next_char())) in SPACE:
            pass
        return char

    def _string(self, char: str) -> Read:
        _expect(char == '"')
        raw = [char]
        while (char := (yield from self._next_char())) != '"':
            raw.append(char)
            if char == "\\":
                raw.append((yield from self._next_char()))
        try:
            return str(json.loads("".join(raw) + '"', strict=False))
        except ValueError:
            raise NotACallError from None

    def _nested(self, char: str, release: Callable[[str], None]) -> Parsing:
        """Release an object or array as it is. Brackets are matched; nothing else is checked."""
        release(char)
        depth = 1
        while depth:
            char = yield from self._next_char()
            release(char)
            depth += (char in "{[") - (char in "}]")
            if char == '"':
                while (char := (yield from self._next_char())) != '"':
                    release(char)
                    if char == "\\":
                        release((yield from self._next_char()))
                release(char)

    def _scalar(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A number or word, and the first character after it that is not white space."""
        text = ""
        while char not in ",}" and char not in SPACE:
            text += char
            _expect(len(text) < 64)
            char = yield from self._next_char()
        try:
            json.loads(text)
        except ValueError:
            raise NotACallError from None
        return text, char if char not in SPACE else (yield from self._next_non_space())


def read_call(emit: Emit, text: TextEmitter, before: str, first: str = "", *,
             arguments_needed: bool = False) -> Generator[None, str, bool]:
    """Read one call; what is not a call is emitted as text.

    Args:
        before: text that precedes it and is held back.
        first: see `JsonCall.read_object`.

    Returns:
        Whether it was a call.
    """
    call = JsonCall(emit, arguments_needed=arguments_needed)
    try:
        yield from call.read_object(first)
    except (NotACallError, EndOfText) as error:
        if not call.started:
            text.add_text(before + "".join(call.consumed))
        if isinstance(error, EndOfText):
            raise
        return False
    text.end_call()
    return True


def read_call_list(emit: Emit, text: TextEmitter, before: str) -> Parsing:
    """Read `{...}, {...}]` after an opening bracket, a call each.

    Args:
        before: text that precedes the first and is held back, bracket included.
    """
    while (yield from read_call(emit, text, before)):
        before = ""
        char = yield from read_non_space()
        if char != ",":
            if char != "]":
                text.add_text(char)
            return


def _expect(good: bool) -> None:
    if not good:
        raise NotACallError
