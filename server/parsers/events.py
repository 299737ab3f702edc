"""What a parser finds in a model's text, and the loop that feeds parsers.

A parser is a generator that takes one character at each `yield` and hands events to `emit`. At the end of the text
`EndOfText` is raised inside it, so that it can release what it still holds back. Reading character by character makes
the result independent of how the text was cut into pieces.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Words of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Words of the reasoning before the answer."""

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
Steps = Generator[None, str, None]  # one parser at work
Read = Generator[None, str, str]  # a part of one, which returns what it has read
Grammar = Callable[[Emit], Steps]

SPACE = " \t\r\n"


class EndOfText(Exception):
    """Raised inside a parser once nothing more comes."""


class Parser:
    """Feeds one grammar with a text that comes in pieces."""

    def __init__(self, grammar: Grammar) -> None:
        self._news: list[Event] = []
        self._steps = grammar(self._news.append)
        next(self._steps)

    def add(self, text: str) -> list[Event]:
        """What more text leads to."""
        for char in text:
            self._steps.send(char)
        return self._take()

    def finish(self) -> list[Event]:
        """What the end leads to; nothing may be added afterwards."""
        try:
            self._steps.throw(EndOfText)
        except EndOfText:
            pass
        else:
            raise AssertionError("a grammar goes on after the end of the text")
        return self._take()

    def _take(self) -> list[Event]:
        news = merged(self._news)
        self._news.clear()
        return news


def merged(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one; calls stay apart."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallStart) or type(event) is not type(last):
            result.append(event)
        else:
            assert last is not None and not isinstance(last, CallStart)
            result[-1] = type(last)(last.text + event.text)
    return result


class Words:
    """Emits text, except white space that only stands around calls."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: str | None = ""  # None once there are words
        self._after_call = False

    def add(self, text: str) -> None:
        """Take words."""
        if self._held is not None:
            text = self._held + text
            self._held = text
            if not text.strip():
                return
            self._held = None
        self._emit(Text(text))

    def call(self) -> None:
        """Note that a call has been read."""
        self._held, self._after_call = "", True

    def end(self) -> None:
        """Note the end of the text."""
        if self._held and not self._after_call:
            self._emit(Text(self._held))


def until(tags: tuple[str, ...], release: Callable[[str], None], *, space: bool = False, held: str = "") -> Read:
    """Release text up to a tag, holding back only what may be the beginning of one; return the tag.

    Args:
        space: white space right before a tag belongs to it.
        held: text that has been read already.
    """
    try:
        while (found := held.lstrip() if space else held) not in tags:
            if any(tag.startswith(found) for tag in tags):
                held += yield
            else:
                release(held[0])
                held = held[1:]
    except EndOfText:
        release(held)
        raise
    return found


def solid() -> Read:
    """Drop white space, and return the first other character."""
    while (char := (yield)) in SPACE:
        pass
    return char


def everything(release: Callable[[str], None]) -> Steps:
    """Release all that still comes."""
    while True:
        release((yield))
