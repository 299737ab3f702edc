"""Tool calls as small models write them: what can be understood is a call, its arguments are always a JSON object."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.server.parsers.events import CallArguments, CallStart, ParseFunction
from jaxpaged.server.parsers.lenient_json import MAX_DEPTH, repaired_object
from jaxpaged.server.parsers.tool_calls import make_tool_parser, named_call, required_calls
from jaxpaged.server.protocol.chat_answer import ChoiceParser, join_deltas
from tests.server.parsers.test_parsers import calls, content, names, parse, split, values, words

MARKUP = {"hermes": ("<tool_call>", "</tool_call>"), "llama3_json": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]",),
          "mistral_named": ("[TOOL_CALLS]",), "required": (), "named": ()}
FORMATS = tuple(MARKUP)
numbers = st.floats(allow_nan=False, allow_infinity=False)
objects = st.dictionaries(st.text(max_size=5), values | numbers, max_size=3)


def parser_of(form: str, offered: Any = ("f",)) -> ParseFunction:
    if form in ("required", "named"):
        return required_calls if form == "required" else named_call("f")
    return make_tool_parser("mistral" if form.startswith("mistral") else form, offered)


def written(form: str, found: list[tuple[str, Any]], dumps: Callable[[Any], str] = json.dumps) -> str:
    """Calls as a model of this format writes them."""
    if form == "named":
        return dumps(found[0][1])
    if form == "mistral_named":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in found)
    key = "parameters" if form in ("llama3_json", "required") else "arguments"
    texts = [dumps({"name": name, key: arguments}) for name, arguments in found]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if form == "llama3_json":
        return "; ".join(texts)
    return "[TOOL_CALLS]" * (form == "mistral") + f"[{', '.join(texts)}]"


def strict_calls(events: list[Any]) -> list[tuple[str, Any]]:
    """The calls; their arguments must be JSON objects, in no more than JSON's own words."""
    found: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            found.append([event.name, ""])
        elif isinstance(event, CallArguments):
            found[-1][1] += event.text

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    result = [(name, json.loads(arguments, parse_constant=refuse)) for name, arguments in found]
    assert all(isinstance(arguments, dict) for _, arguments in result)
    json.dumps(result, ensure_ascii=False).encode()  # no half of a surrogate pair
    return result


@st.composite
def mutated(draw: st.DrawFn, form: str) -> str:
    """A well-formed answer with characters removed, doubled, swapped or put in, and perhaps cut."""
    text = written(form, draw(st.lists(st.tuples(st.just("f"), objects), min_size=1, max_size=2)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(text)))
        put = draw(st.sampled_from(["", *"{}[]\"',:\\\n\t\0 tN1-<;x", '"', "}", "\\u12", "\\ud83d", "'", " and so on ",
                                    "None", "</tool_call>", "{{", "}}", "```", text[place:place + 1] * 2]))
        text = text[:place] + put + text[place + draw(st.integers(0, 2)):]
    return text[:draw(st.integers(0, len(text)) | st.just(len(text)))]


@given(data=st.data())
@pytest.mark.parametrize("form", FORMATS)
def test_whatever_is_written_arguments_are_json_and_streams_equal_the_whole(form: str, data: st.DataObject) -> None:
    text = data.draw(mutated(form))
    whole = parse(parser_of(form), text)
    strict_calls(whole)
    without = functools.reduce(lambda left, tag: left.replace(tag, ""), MARKUP[form], text)
    if not any(tag in without for tag in MARKUP[form]):  # a tag inside a tag
        assert not any(tag in content(whole) for tag in MARKUP[form])
    parser = ChoiceParser(None, parser_of(form))
    chunks = split(data, text)
    assert parse(parser_of(form), *chunks) == whole
    deltas = [delta for number, chunk in enumerate(chunks)
              for delta in parser.add_text(chunk, number == len(chunks) - 1)]
    messages = [join_deltas(deltas), join_deltas(ChoiceParser(None, parser_of(form)).add_text(text, True))]
    for message in messages:
        for call in message.get("tool_calls", ()):
            call.pop("id")
    assert messages[0] == messages[1]


def spell(data: st.DataObject, value: Any) -> str:
    """A value as a model between JSON and Python writes it."""
    if isinstance(value, dict | list):
        more = data.draw(st.sampled_from(["", "", ",", " , ", "\n"]))
        if isinstance(value, list):
            return f"[{', '.join(spell(data, item) for item in value)}{more}]"
        members = (f"{spell(data, key)} : {spell(data, item)}" for key, item in value.items())
        return f"{{{','.join(members)}{more}}}"
    if isinstance(value, str):
        quote = data.draw(st.sampled_from("\"'"))
        raw = data.draw(st.booleans())
        return quote + "".join(f"\\{char}" if char in (quote, "\\") else char if char >= " " or raw else
                               f"\\u{ord(char):04x}" for char in value) + quote
    return data.draw(st.sampled_from([json.dumps, repr]))(value)


@given(found=st.lists(st.tuples(names, objects), min_size=1, max_size=2), data=st.data())
@pytest.mark.parametrize("form", FORMATS)
def test_python_and_raw_characters_are_understood(form: str, found: list[Any], data: st.DataObject) -> None:
    text = written(form, found, lambda value: spell(data, value))
    expected = [("f", found[0][1])] if form == "named" else found
    events = parse(parser_of(form, {name for name, _ in found}), *split(data, text))
    assert strict_calls(events) == expected and not content(events).strip()


@given(found=st.tuples(names, objects), missing=st.integers(0, 9), data=st.data())
@pytest.mark.parametrize("form", FORMATS)
def test_brackets_missing_at_the_end_are_put_there(form: str, found: Any, missing: int, data: st.DataObject) -> None:
    end = "\n</tool_call>" if form == "hermes" else ""
    text = written(form, [found]).removesuffix(end)
    brackets = len(text) - len(text.rstrip("]}"))
    if form != "named":  # where nothing is left of the arguments, there is no call
        brackets = min(brackets, brackets - 1 if not found[1] else brackets)
    text = text[:len(text) - min(missing, brackets)] + data.draw(st.sampled_from(["", end]))
    events = parse(parser_of(form, [found[0]]), *split(data, text))
    assert strict_calls(events) == [("f" if form == "named" else found[0], found[1])] and not content(events)


@given(found=st.tuples(names, objects), more=st.sampled_from(["}", "}}", "]}", "}}}}"]), behind=words, data=st.data())
@pytest.mark.parametrize("form", FORMATS[:-1])
def test_brackets_one_too_many_and_text_behind(form: str, found: Any, more: str, behind: str, data: st.DataObject
                                               ) -> None:
    if form == "hermes":
        text = written(form, [found]).replace("</tool_call>", more + data.draw(st.sampled_from(["", "</tool_call>"])))
    else:
        text = written(form, [found]) + more
    events = parse(parser_of(form, [found[0]]), *split(data, text + "\n" + behind))
    assert strict_calls(events) == [found]
    separators = " \n\t\r,;}])`"
    expected = "" if form == "required" else behind.lstrip(separators).strip()
    assert content(events).lstrip(separators).strip() == expected


@given(found=calls.filter(lambda found: len(found) > 1), between=st.sampled_from(["", "\n", ", ", ";", " }\n"]),
       data=st.data())
def test_several_objects_in_one_tag(found: list[Any], between: str, data: st.DataObject) -> None:
    objects = between.join(json.dumps({"name": name, "arguments": arguments}) for name, arguments in found)
    for inner in (objects, f"[{objects}]", f"```json\n{objects}\n```"):
        events = parse(parser_of("hermes"), *split(data, f"<tool_call>{inner}</tool_call>"))
        assert strict_calls(events) == found and not content(events)


@given(found=st.tuples(names, objects), data=st.data())
def test_doubled_and_missing_braces(found: Any, data: st.DataObject) -> None:
    plain = json.dumps({"name": found[0], "arguments": found[1]})
    if not any(brace in json.dumps([*found]).replace("{", "", 1).replace("}", "", 1) for brace in "{}"):
        for text in (plain.replace("{", "{{").replace("}", "}}"), "{" + plain + "}", plain[1:], "{" + plain):
            events = parse(parser_of("hermes"), *split(data, f"<tool_call>{text}</tool_call>"))
            assert strict_calls(events) == [found] and not content(events)


@pytest.mark.parametrize(("inner", "expected"), [
    ('{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}', {"a": "b"}),
    ('{"name": "f", "arguments": "{\\"a\\": \\"b"}', {"a": "b"}),
    ('{"name": "f", "arguments": "{\'a\': True}"}', {"a": True}),
    ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
    ('{"parameters": {"a": 1}, "name": "f"', {"a": 1}),
    ('{"name": "f", "arguments": {"a": "say "hi" to them"}}', {"a": 'say "hi" to them'}),
    ("{'name': 'f', 'arguments': {'a': 'it's'}}", {"a": "it's"}),
    ('{name: "f", arguments: {a: New York, b: [x, y]}}', {"a": "New York", "b": ["x", "y"]}),
    ('{"name": "f"\n "arguments": {"a": 1 "b": "x"\n"c": "x" , , "d": [1 , ]}}',
     {"a": 1, "b": "x", "c": "x", "d": [1]}),
    ('{"name": "f", "arguments": {"a": "one\ntwo\tthree\x01"}}', {"a": "one\ntwo\tthree\x01"}),
    ('{"name": "f", "arguments": {"a": "C:\\data\\x41\\u12", "b": "\\ud83d\\ude00 \\ud83d"}}',
     {"a": "C:\\dataA\\u12", "b": "\U0001f600 \ufffd"}),
    ('{"name": "f", "arguments": {"a": NaN, "b": -Infinity, "c": .5, "d": 1_000, "e": +1, "f": 01, "g": 1.}}',
     {"a": None, "b": None, "c": 0.5, "d": 1000, "e": 1, "f": "01", "g": 1.0}),
    ('{"name": "f", "arguments": {"b": {"c": 3]}, "a": [1, 2}}', {"a": [1, 2], "b": {"c": 3}}),
    ('{"name": "f", "arguments": {"a": , "b": "x", "c"}}', {"a": None, "b": "x"}),
    ('{"name": "f", "arguments": {"a": "Paris}}', {"a": "Paris}}"}),
    ('{"name": "f", "arguments": {"a": "write </tool_call> there"}}', {"a": "write </tool_call> there"}),
    ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", {"a": "9" * 5000}),
    ('{"name": "f", "type": "function", "a": "b", "c": [1]}', {"a": "b", "c": [1]}),
    ('{"name": "f"', {}), ('{"name": "f", "arguments": {}', {}),
    ('{"type": "function", "function": {"name": "f", "arguments": {"a": {"b": 1}}}}', {"a": {"b": 1}}),
    ('{"id": "c1", "function": {"arguments": "{\\"a\\": 1}", "name": "f"}, "type": "function"}', {"a": 1}),
    ('{"type": "function", "function": {"name": "f"', {}), ('{"function": "f", "parameters": {"a": 1}}', {"a": 1}),
    ('{"name": "f", "function": {"name": "g"}}', {"function": {"name": "g"}}),
])
def test_what_is_understood(inner: str, expected: Any) -> None:
    assert strict_calls(parse(parser_of("hermes"), f"<tool_call>{inner}</tool_call>")) == [("f", expected)]


@pytest.mark.parametrize("inner", [
    "so be it", '{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}', '{"arguments": {"a": 1}}', "[1, 2]",
    '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "Paris"}', '{"name": "f", "arguments": 3}',
    '{"name": "f" and so on}', "", '{"function": {"arguments": {"a": 1}}}', '{"function": 3, "arguments": {}}',
])
def test_what_is_not_understood_is_content_without_its_tags(inner: str) -> None:
    events = parse(parser_of("hermes"), f"Well. <tool_call>{inner}</tool_call> So.")
    assert not strict_calls(events) and content(events) == f"Well. {inner} So."


def test_an_unclosed_string_ends_where_the_next_call_begins() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\n<tool_call>{"name": "g", "arguments": {}}'
    assert strict_calls(parse(parser_of("hermes"), text)) == [("f", {"a": "x"}), ("g", {})]


def test_the_rest_of_a_broken_call_is_dropped_up_to_its_tag() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, *** }}</tool_call>So.'
    events = parse(parser_of("hermes"), text)
    assert strict_calls(events) == [("f", {"a": 1})] and content(events) == "So."


def test_arguments_are_no_deeper_than_parsers_read() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000
    events = parse(parser_of("hermes"), text)
    [(name, arguments)] = strict_calls(events)
    assert name == "f" and json.dumps(arguments).count("[") == MAX_DEPTH - 1


@given(found=objects, indent=st.sampled_from([None, 2]), plain=st.booleans())
def test_valid_json_is_left_as_it_is(found: Any, indent: int | None, plain: bool) -> None:
    text = json.dumps(found, indent=indent, ensure_ascii=plain)
    assert repaired_object(text) == text
