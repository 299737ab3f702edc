"""Grammars of whole answers: llguidance is asked, token by token, what may come."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxpaged.core.messages import Grammar
from jaxpaged.core.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningStart
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.core.tool_formats import TOOL_CALL_FORMATS
from jaxpaged.text.answer_grammar import CallGrammar, answer_grammar
from jaxpaged.text.structured_outputs import GrammarCompiler, GrammarVocabulary

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMS: dict[str, tuple[StructuredOutputsParams, str]] = {
    "json": (StructuredOutputsParams(json=SCHEMA), '{"a":1}'),
    "object": (StructuredOutputsParams(json_object=True), "{}"),
    "regex": (StructuredOutputsParams(regex="y[0-9]{2}"), "y12"),
    "choice": (StructuredOutputsParams(choice=["yes", "<yes>"]), "yes"),
    "lark": (StructuredOutputsParams(grammar='start: "y" /[0-9]/'), "y1"),
    "gbnf": (StructuredOutputsParams(grammar='root ::= "y" [0-9]'), "y1"),
}
R1, QWEN, MISTRAL = (REASONING_FORMATS[name] for name in ("deepseek_r1", "qwen3", "mistral"))
# The marks also as tokens of their own, and tokens that reach beyond a mark.
EXTRA = ("</think>", "<think>", "[/THINK]", "[THINK]", ">{", "]{", ">y", "]y", ">\n\n", "]\n\n", "</", "think", "THINK",
         "[TOOL_CALLS]")
SPECIAL = ("[THINK]", "[/THINK]", "[TOOL_CALLS]")


class Vocabulary:
    """Single bytes, and a few longer tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        self._tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in EXTRA] + [b"<end>"]
        end = len(self._tokens) - 1
        self._special = {text: self._tokens.index(text.encode()) for text in special}
        numbers = [*self._special.values(), end]
        self.llguidance: Any = LLTokenizer(GrammarVocabulary(self._tokens, numbers, [end]))  # type: ignore[arg-type]

    def special_id(self, text: str) -> int | None:
        return self._special.get(text)

    def ids_of_mark(self, mark: str) -> tuple[int, ...]:
        return tuple(number for number, token in enumerate(self._tokens) if token.strip() == mark.encode())

    def ids(self, *tokens: str) -> list[int]:
        """Each of the texts as one token, if there is one, or byte by byte."""
        return [number for text in tokens for number in (
            [self._tokens.index(text.encode())] if text.encode() in self._tokens else text.encode())]


BYTES, MARKS = Vocabulary(()), Vocabulary(SPECIAL)


def allowed(vocabulary: Vocabulary, form: str, start: ReasoningStart, *tokens: str) -> bool:
    """Whether this may be a whole answer."""
    wanted = FORMS[form][0]
    grammar = answer_grammar(GrammarCompiler().grammar(wanted), start, vocabulary, space=wanted.is_json)
    return matches(vocabulary, grammar, *tokens)


def matches(vocabulary: Vocabulary, grammar: Grammar, *tokens: str) -> bool:
    """Whether a grammar allows this as a whole text."""
    matcher = LLMatcher(vocabulary.llguidance, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for number in vocabulary.ids(*tokens):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if not mask[number // 32] >> (number % 32) & 1:
            return False
        assert matcher.consume_token(number)
    return matcher.is_accepting()


def prompt(form: ReasoningFormat, text: str) -> ReasoningStart:
    return form.start_of_answer(text, words=text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("vocabulary", "marks"), [(BYTES, R1), (BYTES, MISTRAL), (MARKS, MISTRAL)])
def test_the_form_begins_behind_the_reasoning(form: str, vocabulary: Vocabulary, marks: ReasoningFormat) -> None:
    text = FORMS[form][1]
    inside, before = ReasoningStart(marks, "inside"), ReasoningStart(marks, "before")
    assert allowed(vocabulary, form, inside, 'I {think} "so"\n', marks.end, text)
    assert allowed(vocabulary, form, inside, marks.end, text)
    assert allowed(vocabulary, form, before, text)
    assert allowed(vocabulary, form, before, marks.begin, "hm < >", marks.end, text)
    assert allowed(vocabulary, form, ReasoningStart(marks, "after"), text)
    for start in (inside, before):
        assert not allowed(vocabulary, form, start, marks.begin, "hm", marks.end, "So: ", text)
        assert not allowed(vocabulary, form, start, "hm")
    assert not allowed(vocabulary, form, inside, text)
    assert not allowed(vocabulary, form, ReasoningStart(marks, "after"), marks.begin, "hm", marks.end, text)
    spaced = allowed(vocabulary, form, inside, marks.end, "\n\n", text)
    assert spaced == FORMS[form][0].is_json


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("marks", [R1, MISTRAL])
def test_a_mark_of_several_tokens(form: str, marks: ReasoningFormat) -> None:
    text, (head, tail) = FORMS[form][1], (marks.end[:-1], marks.end[-1])
    inside = ReasoningStart(marks, "inside")
    assert allowed(BYTES, form, inside, "hm", *head, tail, text)
    assert allowed(BYTES, form, inside, "hm", head[:2], *head[2:], tail + text[0], text[1:])  # over the mark's end
    assert allowed(BYTES, form, inside, "hm", *head, f"{tail}\n\n", text) == FORMS[form][0].is_json
    assert allowed(BYTES, form, inside, f"{head}{head}{tail}", text)


def test_a_mark_without_a_token_is_opened_by_its_characters() -> None:
    form = ReasoningFormat("<reason>", "</reason>")
    for opening in ("<reason>", "\n\n<reason>"):
        assert allowed(BYTES, "json", form.start_of_answer(""), *opening, "hm", *"</reason>", '{"a":1}')
    assert not allowed(BYTES, "json", QWEN.start_of_answer(""), *"<think>", "hm", "</think>", '{"a":1}')


def test_a_mark_that_the_prompt_has_begun() -> None:
    start = prompt(R1, "<think>Done.</thi")
    assert allowed(BYTES, "choice", start, "nk>", "yes") and allowed(BYTES, "choice", start, "s is</think>", "yes")
    assert not allowed(BYTES, "choice", start, "nk>", "no") and not allowed(BYTES, "choice", start, "nk>a</think>yes")
    assert allowed(BYTES, "choice", prompt(R1, "<thi"), "nk>hm</think>", "yes")


def test_the_text_of_a_special_mark_is_no_reasoning() -> None:
    assert not allowed(MARKS, "choice", ReasoningStart(MISTRAL, "inside"), *"a[/THINK]", "[/THINK]", "yes")


def test_a_form_that_begins_as_a_mark_does() -> None:
    before = ReasoningStart(R1, "before")
    assert allowed(BYTES, "choice", before, "<yes>")
    assert allowed(BYTES, "choice", before, "<think>", "a", "</think>", "<yes>")


# Calls in place of the form

CALL_SCHEMA = {"type": "object", "properties": {"name": {"const": "f"}, "arguments": SCHEMA},
               "required": ["name", "arguments"], "additionalProperties": False}
CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(("name", "vocabulary", "single", "double"), [
    ("hermes", BYTES, f"<tool_call>\n{CALL}\n</tool_call>", "\n".join([f"<tool_call>{CALL}</tool_call>"] * 2)),
    ("mistral", BYTES, f"[TOOL_CALLS] [{CALL}]", f"[TOOL_CALLS][{CALL}, {CALL}]"),
    ("mistral", MARKS, f"[TOOL_CALLS] [{CALL}]", f"[TOOL_CALLS][{CALL}, {CALL}]"),
])
def test_an_answer_in_the_form_or_calls(name: str, vocabulary: Vocabulary, single: str, double: str, one: bool) -> None:
    form, call = (GrammarCompiler().grammar(StructuredOutputsParams(json=schema)) for schema in (SCHEMA, CALL_SCHEMA))
    calls = CallGrammar(call, TOOL_CALL_FORMATS[name], one)

    def good(start: ReasoningStart | None, *texts: str) -> bool:
        grammar = answer_grammar(form, start, vocabulary, space=True, calls=calls)
        return matches(vocabulary, grammar, *(piece for text in texts for piece in re.split(
            r"(\[TOOL_CALLS\]|\[/?THINK\]|</?think>)", text)))

    for start, before in ((None, ""), (ReasoningStart(MISTRAL, "inside"), "Hm.[/THINK]\n"),
                          (ReasoningStart(MISTRAL, "before"), "[THINK]Hm.[/THINK]"),
                          (ReasoningStart(MISTRAL, "before"), "")):
        assert good(start, before, '{"a":1}') and good(start, before, single)
        assert good(start, before, double) != one
        for wrong in (CALL, "So: " + single, single + '{"a":1}', '{"a":1}' + single, single.replace('"f"', '"g"'),
                      single.replace('"a"', '"b"')):
            assert not good(start, before, wrong), wrong
