"""Reasoning in `<think>...</think>` before the answer."""

from jaxpaged.server.parsers.events import Emit, EndOfText, Grammar, Reasoning, Steps, Text, everything, solid, until

BEGIN, END = "<think>", "</think>"


def think(*, always: bool) -> Grammar:
    """White space around the reasoning belongs to neither part.

    Args:
        always: the text begins with reasoning, since the prompt has opened it or the model never leaves it out;
            otherwise only where the text itself opens it.
    """

    def grammar(emit: Emit) -> Steps:
        def answer(text: str) -> None:
            emit(Text(text))

        def reason(text: str) -> None:
            emit(Reasoning(text))

        held = ""
        try:
            while held.lstrip() != BEGIN and BEGIN.startswith(held.lstrip()):
                held += yield
        except EndOfText:
            (reason if always else answer)(held)
            raise
        first = held.lstrip()
        if first == BEGIN:
            first = yield from solid()
        elif not always:
            answer(held)
            yield from everything(answer)
        yield from until((END,), reason, space=True, held=first)
        answer((yield from solid()))
        yield from everything(answer)

    return grammar
