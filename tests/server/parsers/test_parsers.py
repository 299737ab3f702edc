"""Tool calls and reasoning in what models write: the result does not depend on how the text is split."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.reasoning import REASONING_FORMATS
from jaxpaged.server.parsers.events import (
    CallArguments,
    CallStart,
    ParseFunction,
    Reasoning,
    StreamParser,
    Text,
    merge_events,
)
from jaxpaged.server.parsers.reasoning import split_reasoning
from jaxpaged.server.parsers.tool_calls import TOOL_PARSERS, make_tool_parser, named_call, required_calls

# Characters that make tags, brackets and strings likely.
noise = st.text(st.sampled_from('<>/[]{}"\\:,; \nabcdefglmnrtuo_|TOOLCALS'), max_size=30)
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", '{"name": "f", ',
        '"arguments": {', '"parameters": "', "}", "[", "]", "[ARGS]")
messy = st.lists(noise | st.sampled_from(TAGS), max_size=8).map("".join)
values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner,
                                                                                  max_size=3), max_leaves=6)
names = st.text(st.characters(categories=("L", "N"), include_characters="_-."), min_size=1, max_size=12)
calls = st.lists(st.tuples(names, st.dictionaries(st.text(max_size=5), values, max_size=3)), max_size=3)
words = st.text(st.characters(codec="utf-8", exclude_characters="<[{"), max_size=15)
OFFERED = ("f", "g")
PARSERS: dict[str, ParseFunction] = {name: make_tool_parser(name, OFFERED) for name in TOOL_PARSERS} | {
    "required": required_calls, "named": named_call("f"),
    "r1": split_reasoning(REASONING_FORMATS["deepseek_r1"].start_of_answer("")),
    "qwen3": split_reasoning(REASONING_FORMATS["qwen3"].start_of_answer(""))}


def parse(function: ParseFunction, *chunks: str) -> list[Any]:
    parser = StreamParser(function)
    events = [event for chunk in chunks for event in parser.add_text(chunk)]
    return merge_events(events + parser.finish())


def split(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def content(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def found_calls(events: list[Any]) -> list[tuple[str, Any]]:
    result: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            result.append([event.name, ""])
        elif isinstance(event, CallArguments):
            result[-1][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in result]


@given(text=messy, data=st.data())
@pytest.mark.parametrize("name", PARSERS)
def test_any_split_of_any_text_gives_the_same(name: str, text: str, data: st.DataObject) -> None:
    assert parse(PARSERS[name], *split(data, text)) == parse(PARSERS[name], text)


@given(text=messy.filter(lambda text: not any(tag in text for tag in (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "<think>", "<|python_tag|>"))))
@pytest.mark.parametrize("name", [*TOOL_PARSERS, "qwen3"])
def test_a_text_without_calls_is_left_alone(name: str, text: str) -> None:
    assert content(parse(PARSERS[name], text)) == text


def spelled(data: st.DataObject, name: str, arguments: Any, key: str) -> str:
    """A call as a model may write it."""
    indent = data.draw(st.sampled_from([None, 2]))
    plain = data.draw(st.booleans())
    if data.draw(st.booleans()):
        arguments = json.dumps(arguments, ensure_ascii=plain)
    members = [("name", name), (key, arguments), ("id", data.draw(st.sampled_from([3, None, "x", [1]])))]
    order = data.draw(st.permutations(members))
    return json.dumps(dict(order), indent=indent, ensure_ascii=plain)


@given(before=words, calls=calls, between=st.sampled_from(["", "\n", " \n\n"]), after=words, data=st.data())
def test_hermes(before: str, calls: list[Any], between: str, after: str, data: st.DataObject) -> None:
    tagged = [f"<tool_call>\n{spelled(data, name, arguments, 'arguments')}\n"
              f"{data.draw(st.sampled_from(['</tool_call>', '']))}" for name, arguments in calls]
    events = parse(PARSERS["hermes"], *split(data, between.join([before, *tagged, after])))
    assert found_calls(events) == calls
    if tagged and not tagged[-1].endswith("</tool_call>"):
        after = (between + after).lstrip(" \t\r\n,;}])`")  # brackets that are one too many belong to the call
    assert "".join(content(events).split()) == "".join((before + after).split())


@given(calls=calls.filter(bool), separator=st.sampled_from([";", " ; ", "\n"]), tag=st.booleans(), data=st.data())
def test_llama3(calls: list[Any], separator: str, tag: bool, data: st.DataObject) -> None:
    text = separator.join(spelled(data, name, arguments, "parameters") for name, arguments in calls)
    offered = () if tag else {name for name, _ in calls}
    events = parse(make_tool_parser("llama3_json", offered), *split(data, "<|python_tag|>" * tag + text))
    assert found_calls(events) == calls and not content(events)


@given(before=words, calls=calls.filter(bool), data=st.data())
def test_mistral(before: str, calls: list[Any], data: st.DataObject) -> None:
    old = f"[TOOL_CALLS] [{', '.join(spelled(data, name, arguments, 'arguments') for name, arguments in calls)}]"
    mark = data.draw(st.sampled_from(["", "[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]"]))
    new = "".join(f"[TOOL_CALLS]{name}{mark}{json.dumps(arguments)}" for name, arguments in calls)
    for text in (old, new):
        events = parse(PARSERS["mistral"], *split(data, before + text))
        assert found_calls(events) == calls
        assert content(events) == before * bool(before.strip())


@given(calls=calls.filter(bool), data=st.data())
def test_required_calls(calls: list[Any], data: st.DataObject) -> None:
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls],
                      indent=data.draw(st.sampled_from([None, 1])))
    events = parse(required_calls, *split(data, text))
    assert found_calls(events) == calls and not content(events)
    name, arguments = calls[0]
    assert found_calls(parse(named_call(name), *split(data, json.dumps(arguments)))) == [(name, arguments)]


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [CallStart("f"), CallArguments("{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', [CallStart("f"), CallArguments("{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}', [CallStart("f"), CallArguments("{}")]),
    ("hermes", "<tool_call>so be it</tool_call>", [Text("so be it")]),
    ("hermes", "<tool_call></tool_call>", []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', [Text('{"name": 3, "arguments": {}}')]),
    ("hermes", '<tool_call>{"name": "f", "argum', [Text('{"name": "f", "argum')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [CallStart("f"), CallArguments('{"a": "b"}')]),
    ("hermes", '<tool_call>{"name": "unheard_of", "arguments": {}}', [CallStart("unheard_of"), CallArguments("{}")]),
    ("hermes", "a <tool_ca", [Text("a <tool_ca")]),
    ("hermes", " \n", [Text(" \n")]),
    ("llama3_json", '{"name": "Bob", "age": 3}', [Text('{"name": "Bob", "age": 3}')]),
    ("llama3_json", 'Sure: {"name": "f", "parameters": {}}', [Text("Sure: "), CallStart("f"), CallArguments("{}")]),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', [Text('{"name": "Bob", "parameters": {}}')]),
    ("llama3_json", '[{"name": "Bob"}, 1]', [Text('[{"name": "Bob"}, 1]')]),
    ("llama3_json", '<|python_tag|>{"name": "Bob", "parameters": {}}', [CallStart("Bob"), CallArguments("{}")]),
    ("llama3_json", "<|python_tag|>search.call()", [Text("search.call()")]),
    ("mistral", "[TOOL_CALLS] f\n", [Text("f\n")]),
    ("mistral", "[TOOL_CALLS]", []),
    ("required", "", []), ("required", "[", []), ("named", "", []),
    ("r1", "hmm\n</think>\n\nYes", [Reasoning("hmm"), Text("Yes")]),
    ("r1", "<think>\nhmm</think>Yes", [Reasoning("hmm"), Text("Yes")]),
    ("r1", "</think>Yes", [Text("Yes")]), ("r1", "cut off", [Reasoning("cut off")]),
    ("qwen3", "<think>a\nb</thi", [Reasoning("a\nb</thi")]), ("qwen3", "plain", [Text("plain")]),
    ("qwen3", " <thin", [Text(" <thin")]), ("qwen3", "<think>a</think>b</think>", [Reasoning("a"), Text("b</think>")]),
])
def test_cases(name: str, text: str, expected: list[Any]) -> None:
    assert parse(PARSERS[name], text) == expected


def test_a_prompt_that_opens_the_reasoning() -> None:
    start = REASONING_FORMATS["qwen3"].start_of_answer("...<think>\n")
    assert parse(split_reasoning(start), "hm</think>Yes") == [Reasoning("hm"), Text("Yes")]


@pytest.mark.parametrize(("turn", "text", "expected"), [
    ("<think>\nLet me", " see</think>\n\nYes", [Reasoning(" see"), Text("Yes")]),
    ("<think>Done.</thi", "nk> Yes", [Text("Yes")]), ("<think>Done.</thi", "s is", [Reasoning("s is")]),
    ("<think>\n\n</think>\n\n", "<think> is a tag", [Text("<think> is a tag")]),
    ("<thi", "nk>hm</think>Yes", [Reasoning("hm"), Text("Yes")]), ("<thi", "s is", [Text("s is")]),
    ("The answer", " is 4</think>", [Text(" is 4</think>")]), ("<think>a</think>The", " end", [Text(" end")]),
])
@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "mistral"])
def test_an_answer_goes_on_where_the_prompt_stops(name: str, turn: str, text: str, expected: list[Any]) -> None:
    form = REASONING_FORMATS[name]

    def spelled(given: str) -> str:
        marks = {"<think>": form.begin, "</think>": form.end, "<thi": form.begin[:4], "</thi": form.end[:5],
                 "nk>": form.begin[4:]}
        return re.sub("|".join(map(re.escape, marks)), lambda found: marks[found[0]], given)

    start = form.start_of_answer(spelled(turn), words=spelled(turn))
    events = [type(event)(spelled(event.text)) for event in expected]
    for chunks in ([spelled(text)], list(spelled(text))):
        assert parse(split_reasoning(start), *chunks) == events


def test_an_exact_answer_keeps_its_white_space() -> None:
    start = REASONING_FORMATS["deepseek_r1"].start_of_answer("")
    assert parse(split_reasoning(start, exact=True), "hm\n</think>\n yes") == [Reasoning("hm"), Text("\n yes")]


def test_arguments_are_emitted_while_they_are_written() -> None:
    parser = StreamParser(PARSERS["hermes"])
    assert parser.add_text('<tool_call>{"name": "f", "arguments": {"text": "a lon') == [
        CallStart("f"), CallArguments('{"text": "a lon')]
    assert parser.add_text("g story") == [CallArguments("g story")]
