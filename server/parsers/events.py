"""The events that parsers find in a model's text, and the loop that feeds the parsers.

A parser is a generator: each `yield` returns one character, and events go to `emit`. At the end of the text `EndOfText`
is raised inside it, so that it can release what it still holds back. Reading character by character makes the result
independent of how the text was split into chunks.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Content of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the newest call's arguments."""

    text: str


Event = Text | Reasoning | CallStart | CallArguments
Emit = Callable[[Event], None]
Parsing = Generator[None, str, None]  # a running parser
Read = Generator[None, str, str]  # a part of one, which returns what it read
ParseFunction = Callable[[Emit], Parsing]

SPACE = " \t\r\n"


class EndOfText(Exception):
    """Raised inside a parser at the end of the text."""


class StreamParser:
    """Feeds a text that arrives in chunks to one parser."""

    def __init__(self, parse: ParseFunction) -> None:
        self._events: list[Event] = []
        self._parsing = parse(self._events.append)
        next(self._parsing)

    def add_text(self, text: str) -> list[Event]:
        """The events of the next chunk of text."""
        for char in text:
            self._parsing.send(char)
        return self._take_events()

    def finish(self) -> list[Event]:
        """The events of the end of the text."""
        try:
            self._parsing.throw(EndOfText)
        except EndOfText:
            pass
        else:
            raise AssertionError("a parser continues after the end of the text")
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events = merge_events(self._events)
        self._events.clear()
        return events


def merge_events(events: list[Event]) -> list[Event]:
    """Join adjacent events of one kind; calls stay separate."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallStart) or type(event) is not type(last):
            result.append(event)
        else:
            assert last is not None and not isinstance(last, CallStart)
            result[-1] = type(last)(last.text + event.text)
    return result


class TextEmitter:
    """Emits text, but drops white space that only surrounds calls."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[str] | None = []  # white space; None after other text
        self._after_call = False

    def add_text(self, text: str) -> None:
        """Emit text, or hold it back while it is white space."""
        if not text:
            return
        if self._held is not None:
            self._held.append(text)
            if not text.strip():
                return
            text, self._held = "".join(self._held), None
        self._emit(Text(text))

    def end_call(self) -> None:
        """Note the end of a call."""
        self._held, self._after_call = [], True

    def finish(self) -> None:
        """Note the end of the text."""
        if self._held and not self._after_call:
            self._emit(Text("".join(self._held)))
