"""Tool calls written as JSON objects, `{"name": ..., "arguments": {...}}`, emitted while the model writes them."""

import contextlib
import json
from collections.abc import Collection, Generator

from jaxpaged.server.parsers.events import (
    CallArguments,
    CallStart,
    Emit,
    EndOfText,
    Parsing,
    TextEmitter,
)
from jaxpaged.server.parsers.lenient_json import BrokenError, LenientJson, repaired_object
from jaxpaged.server.parsers.reader import CharReader

MAX_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")
_ABOUT_THE_CALL = ("id", "type", "index")  # other members beside the name are arguments, where there are none elsewhere
_BETWEEN_CALLS = " \t\r\n,;}])`"  # what separates calls, and brackets that are one too many


class NotACallError(Exception):
    """The text is not a call; nothing was emitted."""


class CallReader:
    """Reads calls. Their arguments are always emitted as one valid JSON object, whatever the model writes.

    Args:
        text: takes what is not a call.
        begin, end: the tags before and after calls, if there are any; they are never text.
    """

    def __init__(self, reader: CharReader, emit: Emit, text: TextEmitter, begin: str, end: str = "") -> None:
        self._reader, self._emit, self._text = reader, emit, text
        self._json = LenientJson(reader, begin, end)
        self._tags, self._end = (begin, end), end

    def read_calls(self, names: Collection[str] | None = None, *, arguments_needed: bool = False
                   ) -> Generator[None, str, bool]:
        """Read calls that follow one another, as a list or not. What is no call is text.

        Args:
            names: of functions that may be called; None for any.
            arguments_needed: an object without arguments is not a call; otherwise it is a call without any.

        Returns:
            Whether the last call ends where it cannot be understood.
        """
        reader = self._reader
        reader.start_recording()
        try:
            if (yield from reader.accept("```")):
                yield from reader.accept("json")
            yield from reader.accept("[")
            while True:
                call = _Call(reader, self._json, self._emit, names, arguments_needed, self._end)
                broken = yield from call.read()
                self._text.end_call()
                if broken:
                    return True
                reader.start_recording()
                if not (yield from self._another_follows()):
                    reader.stop_recording()
                    return False
        except NotACallError:
            self._release_recorded()
            return False
        except EndOfText:
            self._release_recorded()
            raise

    def read_arguments(self, name: str) -> Parsing:
        """Read the arguments of a call of this name, whose opening brace has been read, and what separates calls."""
        self._emit(CallStart(name))
        with contextlib.suppress(BrokenError):
            yield from self._json.container("{", self._emit_arguments)
        self._text.end_call()
        yield from self._another_follows()

    def read_rest(self, tags: tuple[str, ...]) -> Parsing:
        """Drop the rest of a call up to one of its tags, which is left; without one it is text."""
        rest: list[str] = []
        try:
            self._reader.give_back((yield from self._reader.until(tags, rest.append)))
        except EndOfText:
            self._text.add_text("".join(rest))
            raise

    def _release_recorded(self) -> None:
        text = self._reader.stop_recording()
        for tag in filter(None, self._tags):
            text = text.replace(tag, "")
        self._text.add_text(text)

    def _emit_arguments(self, text: str) -> None:
        self._emit(CallArguments(text))

    def _another_follows(self) -> Generator[None, str, bool]:
        """Drop what separates calls; whether an opening brace follows."""
        try:
            while (char := (yield from self._reader.next())) in _BETWEEN_CALLS:
                pass
        except EndOfText:
            self._reader.stop_recording()
            raise
        self._reader.give_back(char)
        return char == "{"


class _Call:
    """Reads one call; see `CallReader` for the arguments."""

    def __init__(self, reader: CharReader, values: LenientJson, emit: Emit, names: Collection[str] | None,
                 arguments_needed: bool, end: str) -> None:
        self._reader, self._json, self._emit = reader, values, emit
        self._names, self._arguments_needed, self._end = names, arguments_needed, end
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that precede the name
        self._beside: list[str] = []  # members beside the name
        self._started = False

    def read(self) -> Generator[None, str, bool]:
        """Read an object to its closing brace, or as far as it can be understood; returns whether that is not far.

        Raises:
            NotACallError: it is not a call.
            EndOfText: the text has ended. If nothing was emitted, it was not a call.
        """
        reader, broken = self._reader, False
        try:
            char = yield from reader.next_non_space()
            if char not in "{\"'":  # the brace may be missing
                reader.give_back(char)
                raise NotACallError
            yield from self._members(char)
        except BrokenError:
            broken = True
            if not self._started:
                char = yield from reader.next()
                reader.give_back(char)
                if char != self._end[:1]:
                    raise NotACallError from None
        except EndOfText:
            if self._name is not None and self._early is not None:
                self._start_late()
            raise
        self._start_late()
        return broken

    def _start_late(self) -> None:
        """Start a call whose arguments preceded its name, or that has none."""
        if self._started:
            return
        if self._name is None or (self._arguments_needed and self._early is None):
            raise NotACallError
        self._start()
        self._emit_arguments("".join(self._early or ["{", ", ".join(self._beside), "}"]))

    def _members(self, char: str) -> Parsing:
        """Read the members of an object to its closing brace; `char` is its first character."""
        while char != "}":
            if char not in "{,":
                key = json.loads((yield from self._json.key(char)))
                colon = yield from self._reader.accept(":")
                if not colon:
                    raise BrokenError
                yield from self._member(key, (yield from self._reader.next_non_space()))
            char = yield from self._reader.next_non_space()

    def _member(self, key: str, char: str) -> Parsing:
        unnamed = self._name is None
        if key == "function" and char == "{" and unnamed and self._early is None:  # the whole call, as clients see it
            yield from self._members(char)
        elif unnamed and (key == "name" or (key == "function" and char in "\"'")):
            name = json.loads((yield from self._value(char)))
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
                raise NotACallError
            if self._names is not None and name not in self._names:
                raise NotACallError
            self._name = name
        elif self._started or self._early is not None:
            yield from self._json.value(char, lambda text: None)
        elif key not in _ARGUMENTS:
            value = yield from self._value(char)
            if key not in _ABOUT_THE_CALL:
                self._beside.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
        elif char == "{":
            if self._name is None:
                self._early = []
            else:
                self._start()
            yield from self._json.container(char, self._emit_arguments)
        else:
            yield from self._written_otherwise(char)

    def _written_otherwise(self, char: str) -> Parsing:
        """Read arguments that are not an object: JSON inside a string, or none."""
        parts: list[str] = []
        ended = False
        try:
            yield from self._json.value(char, parts.append)
        except EndOfText:
            ended = True
        value = json.loads("".join(parts) or "null")
        if ended and not value:
            raise EndOfText
        text = "{}" if value is None else repaired_object(value or "{}") if isinstance(value, str) else None
        if text is None:
            raise NotACallError
        self._early = [text]
        if self._name is not None:
            self._start_late()

    def _value(self, char: str) -> Generator[None, str, str]:
        parts: list[str] = []
        yield from self._json.value(char, parts.append)
        return "".join(parts)

    def _start(self) -> None:
        assert self._name is not None
        self._started = True
        self._reader.stop_recording()
        self._emit(CallStart(self._name))

    def _emit_arguments(self, text: str) -> None:
        if self._started:
            self._emit(CallArguments(text))
        else:
            assert self._early is not None
            self._early.append(text)
