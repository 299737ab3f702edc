"""The grammar of a whole answer: reasoning, if there is any, and behind it what structured output asks for, or calls.

It is made of grammars that are known to compile, and read like these by llguidance, byte by byte: it does not matter
how many tokens a mark takes, nor whether a token reaches from the reasoning into what follows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxpaged.core.messages import Grammar
from jaxpaged.core.reasoning import ReasoningStart
from jaxpaged.core.tool_formats import ToolCallFormat


class Vocabulary(Protocol):
    """What has to be known of a tokenizer."""

    def special_id(self, text: str) -> int | None: ...

    def ids_of_mark(self, mark: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Calls that an answer may consist of.

    Attributes:
        call: of the JSON object of one call.
        format: how the model writes calls; it has a tag.
        one: there is only one call.
    """

    call: Grammar
    format: ToolCallFormat
    one: bool = False


def answer_grammar(form: Grammar, start: ReasoningStart | None, vocabulary: Vocabulary, *, space: bool,
                   calls: CallGrammar | None = None) -> Grammar:
    """The grammar of an answer whose form begins behind the reasoning.

    Args:
        form: of the answer without reasoning.
        start: where the answer begins; None for a model that does not reason.
        space: white space between reasoning and form is allowed; it belongs to neither.
        calls: what may come in place of the form.
    """
    if start is not None and start.phase == "after":
        start = None
    if start is None and calls is None:
        return form
    lark = ["start: " + ("answer" if start is None else "thoughts rest" if start.phase == "inside"
                         else "reasoning rest | answer"),
            r"space: /[ \n\r\t]{0,8}/", "answer: @form" + " | calls" * (calls is not None)]
    parts = {"form": form}
    if start is not None:
        lark += ["reasoning: opening thoughts", f"rest: {'space ' * space}answer"]
        lark.append("opening: " + _mark(start.format.begin, start.held if start.phase == "before" else "", vocabulary))
        lark += _thoughts(start.format.end, start.held if start.phase == "inside" else "", vocabulary)
    if calls is not None:
        parts["call"] = calls.call
        lark += _calls(calls, vocabulary)
    text = json.dumps({"grammars": [{"lark_grammar": "\n".join(lark)}, *_named(parts)]})
    return replace(form, text=text, num_bytes=sum(part.num_bytes for part in parts.values()))


def _mark(mark: str, held: str, vocabulary: Vocabulary) -> str:
    """A mark that opens something, of which the prompt has the characters `held`."""
    ids = () if held else vocabulary.ids_of_mark(mark)
    if ids:  # a model that has a token for the mark writes that, and does not begin it by chance with a character
        return f"<[{','.join(map(str, ids))}]>"
    return f"space {_quoted(mark[len(held):])}"


def _thoughts(mark: str, held: str, vocabulary: Vocabulary) -> list[str]:
    number = vocabulary.special_id(mark)
    if number is not None:
        # Never the text of the mark in other tokens, which a reader of the text would take for it.
        return [f"thoughts: THOUGHT <[{number}]>",
                f"THOUGHT: /(?s:.*)/ & ~(/(?s:.*)/ {_quoted(mark)} /(?s:.*)/)"]
    # Lazy: it ends with the first mark, also with one that the prompt has begun.
    ends = [_quoted(mark[len(held):])] * bool(held) + [f"/(?s:.*)/ {_quoted(mark)}"]
    return ["thoughts[lazy]: THOUGHT", f"THOUGHT: {' | '.join(ends)}"]


def _calls(calls: CallGrammar, vocabulary: Vocabulary) -> list[str]:
    form = calls.format
    assert form.tag, "calls without tags are a part of the form's own schema"
    number = vocabulary.special_id(form.end_tag)
    end = f"<[{number}]>" if number is not None else _quoted(form.end_tag) if form.end_tag else ""
    opening, closing = (f"space {_quoted(text.strip())} space" if text.strip() else "space"
                        for text in (form.opening, form.closing))
    several = "" if calls.one or form.separator is None else f"(space {_quoted(form.separator)} space @call)*"
    group = f"group: {_mark(form.tag, '', vocabulary)} {opening} @call {several} {closing} {end}"
    return [group, "calls: group" + " (space group)*" * (form.separator is None and not calls.one)]


def _named(parts: Mapping[str, Grammar]) -> list[dict[str, Any]]:
    """The grammars to which a Lark grammar refers by name, as @name."""
    found: list[dict[str, Any]] = []
    for name, part in parts.items():
        first, *others = (json.loads(part.text)["grammars"] if part.text.startswith("{")
                          else [{"lark_grammar": part.text}])
        found += [{**first, "name": name}, *others]
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
