"""Calls that the request demands: the whole answer is JSON of a known form, held to it by structured output."""

from jaxpaged.server.parsers.events import (
    CallArguments,
    CallStart,
    Emit,
    EndOfText,
    Grammar,
    Steps,
    Words,
    everything,
    solid,
)
from jaxpaged.server.parsers.json_calls import calls_in_brackets


def required_calls(emit: Emit) -> Steps:
    """`[{"name": ..., "parameters": {...}}, ...]`"""
    words = Words(emit)
    try:
        char = yield from solid()
        if char == "[":
            yield from calls_in_brackets(emit, words, char)
        else:
            words.add(char)
        yield from everything(words.add)
    except EndOfText:
        words.end()
        raise


def named_call(name: str) -> Grammar:
    """The arguments of one call of this function, and nothing else."""

    def grammar(emit: Emit) -> Steps:
        char = yield from solid()
        emit(CallStart(name))
        emit(CallArguments(char))
        yield from everything(lambda text: emit(CallArguments(text)))

    return grammar
