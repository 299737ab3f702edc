"""The grammar of a whole answer: reasoning, if there is any, and behind it what structured output asks for.

It is made of grammars that are known to compile, and read like these by llguidance, byte by byte: it does not matter
how many tokens a mark takes, nor whether a token reaches from the reasoning into what follows.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from jaxpaged.core.messages import Grammar
from jaxpaged.core.reasoning import ReasoningStart

_SPACE = r"/[ \n\r\t]{0,8}/"


class Vocabulary(Protocol):
    """What has to be known of a tokenizer."""

    def special_id(self, text: str) -> int | None: ...

    def ids_starting_with(self, text: str) -> tuple[int, ...]: ...


def answer_grammar(form: Grammar, start: ReasoningStart | None, vocabulary: Vocabulary, *, space: bool) -> Grammar:
    """The grammar of an answer whose form begins behind the reasoning.

    Args:
        form: of the answer without reasoning.
        start: where the answer begins; None for a model that does not reason.
        space: white space between reasoning and form is allowed; it belongs to neither.
    """
    if start is None or start.phase == "after":
        return form
    lark = ["start: " + ("reasoning rest | @form" if start.phase == "before" else "thoughts rest"),
            "reasoning: opening thoughts", f"rest: {'space ' * space}@form", f"space: {_SPACE}"]
    lark += _opening(start.format.begin, start.held if start.phase == "before" else "", vocabulary)
    lark += _thoughts(start.format.end, start.held if start.phase == "inside" else "", vocabulary)
    return Grammar(_joined("\n".join(lark), form), form.num_bytes)


def _opening(mark: str, held: str, vocabulary: Vocabulary) -> list[str]:
    ids = () if held else vocabulary.ids_starting_with(mark)
    if ids:  # a model that has a token for the mark opens its reasoning with it, and not by chance with a character
        return [f"opening: <[{','.join(map(str, ids))}]>"]
    return [f"opening: space {_quoted(mark[len(held):])}"]


def _thoughts(mark: str, held: str, vocabulary: Vocabulary) -> list[str]:
    number = vocabulary.special_id(mark)
    if number is not None:
        # Never the text of the mark in other tokens, which a reader of the text would take for it.
        return [f"thoughts: THOUGHT <[{number}]>",
                f"THOUGHT: /(?s:.*)/ & ~(/(?s:.*)/ {_quoted(mark)} /(?s:.*)/)"]
    # Lazy: it ends with the first mark, also with one that the prompt has begun.
    ends = [_quoted(mark[len(held):])] * bool(held) + [f"/(?s:.*)/ {_quoted(mark)}"]
    return ["thoughts[lazy]: THOUGHT", f"THOUGHT: {' | '.join(ends)}"]


def _joined(lark: str, form: Grammar) -> str:
    """A Lark grammar that refers to another one as @form."""
    grammars: Sequence[dict[str, Any]] = (
        json.loads(form.text)["grammars"] if form.text.startswith("{") else [{"lark_grammar": form.text}])
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**grammars[0], "name": "form"}, *grammars[1:]]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
