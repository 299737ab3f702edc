"""Reasoning in `<think>...</think>` before the answer."""

from jaxpaged.server.parsers.events import (
    Emit,
    EndOfText,
    ParseFunction,
    Parsing,
    Reasoning,
    Text,
    pass_through,
    read_non_space,
    read_until,
)

REASONING_PARSERS = ("deepseek_r1", "qwen3")
BEGIN, END = "<think>", "</think>"


def think(*, always: bool) -> ParseFunction:
    """`<think>...</think>` before the answer. White space around the reasoning belongs to neither part.

    Args:
        always: the text starts with reasoning, tag or not; otherwise only after an opening tag.
    """

    def parse(emit: Emit) -> Parsing:
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
            first = yield from read_non_space()
        elif not always:
            answer(held)
            yield from pass_through(answer)
        yield from read_until((END,), reason, space=True, held=first)
        answer((yield from read_non_space()))
        yield from pass_through(answer)

    return parse


def make_reasoning_parser(name: str, prompt: str) -> ParseFunction:
    """The parser that separates reasoning from the answer.

    Args:
        name: deepseek_r1 for models that always reason; qwen3 for those that may, and then open it themselves.
        prompt: its text; if it ends with an open reasoning tag, the answer starts inside the reasoning.
    """
    assert name in REASONING_PARSERS, name
    return think(always=name == "deepseek_r1" or prompt.rstrip().endswith(BEGIN))
