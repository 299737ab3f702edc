"""Reasoning before the answer, between the marks of the model's format."""

from collections.abc import Callable

from jaxpaged.core.reasoning import ReasoningStart
from jaxpaged.server.parsers.events import Emit, EndOfText, Event, ParseFunction, Parsing, Reasoning, Text
from jaxpaged.server.parsers.reader import CharReader


def split_reasoning(start: ReasoningStart, *, exact: bool = False) -> ParseFunction:
    """The parser that separates reasoning from the answer. White space around the reasoning belongs to neither.

    Args:
        start: where the answer begins.
        exact: the answer follows its mark at once, so that white space behind the mark is the answer's own.
    """
    begin, end = start.format.begin, start.format.end

    def parse(emit: Emit) -> Parsing:
        reader = CharReader()
        answer, reason = _releasing(emit, Text), _releasing(emit, Reasoning)
        phase, held, first = start.phase, start.held, ""
        if phase == "before" or (phase == "inside" and not held):
            other = _releasing(emit, Text if phase == "before" else Reasoning, skip=len(held))
            try:
                while held.lstrip() != begin and begin.startswith(held.lstrip()):
                    held += yield from reader.next()
            except EndOfText:
                other(held)
                raise
            if held.lstrip() == begin:
                phase, first = "inside", (yield from reader.next_non_space())
            elif phase == "before":
                phase = "after"
                other(held)
            else:
                first = held
        elif phase == "inside":
            reason, first = _releasing(emit, Reasoning, skip=len(held)), held
        if phase == "inside":
            reader.give_back(first)
            yield from reader.until((end,), reason, space=True)
            if not exact:
                answer((yield from reader.next_non_space()))
        yield from reader.rest(answer)

    return parse


def _releasing(emit: Emit, kind: Callable[[str], Event], skip: int = 0) -> Callable[[str], None]:
    """Emits text as events of one kind, without its first `skip` characters, which are the prompt's."""
    left = skip

    def release(text: str) -> None:
        nonlocal left
        cut = min(left, len(text))
        left -= cut
        if text[cut:]:
            emit(kind(text[cut:]))

    return release
