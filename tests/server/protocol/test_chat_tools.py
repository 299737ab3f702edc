"""What `tools` and `tool_choice` of a request mean."""

from typing import Any

import pytest

from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.core.tool_formats import TOOL_CALL_FORMATS
from jaxpaged.server.parsers.events import CallArguments, CallStart, StreamParser
from jaxpaged.server.parsers.tool_calls import TOOL_PARSERS
from jaxpaged.server.protocol.chat_tools import ToolUse, choose_tools
from jaxpaged.server.protocol.requests import ChatCompletionRequest
from jaxpaged.text.structured_outputs import GrammarCompiler
from tests.text.test_answer_grammar import BYTES, matches


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("a"), tool("b"), tool("c")]


def offered(use: ToolUse) -> list[str]:
    return [item["function"]["name"] for item in use.tools or ()]


@pytest.mark.parametrize("allowed", [[tool("c"), tool("a")], [{"type": "function", "name": "a"}, tool("c")]])
@pytest.mark.parametrize("nested", [True, False])
def test_allowed_tools_are_the_only_ones(allowed: list[Any], nested: bool) -> None:
    """In the form of OpenAI's chat completions, and in that of its responses."""
    def choose(mode: str) -> ToolUse:
        choice: dict[str, Any] = {"mode": mode, "tools": allowed}
        choice = {"type": "allowed_tools", **({"allowed_tools": choice} if nested else choice)}
        return choose_tools(TOOLS, choice, None, "hermes")

    auto, required = choose("auto"), choose("required")
    assert offered(auto) == offered(required) == ["a", "c"]
    assert auto.schema is None and auto.parse is not None
    assert required.schema is not None
    assert [item["properties"]["name"]["const"] for item in required.schema["items"]["anyOf"]] == ["a", "c"]


@pytest.mark.parametrize("allowed", [
    None, [], {}, {"mode": "auto"}, {"tools": [tool("a")]}, {"mode": "none", "tools": [tool("a")]},
    {"mode": "auto", "tools": []}, {"mode": "auto", "tools": "a"}, {"mode": "auto", "tools": ["a"]},
    {"mode": "auto", "tools": [tool("unheard_of")]}, {"mode": "auto", "tools": [{"type": "function"}]},
    {"mode": ["auto"], "tools": [tool("a")]},
])
def test_allowed_tools_that_mean_nothing_are_refused(allowed: Any) -> None:
    with pytest.raises(RequestError) as caught:
        choose_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}, None, "hermes")
    assert caught.value.param == "tool_choice"


def test_custom_tools_are_refused_by_name() -> None:
    custom = {"type": "custom", "custom": {"name": "a"}}
    for tools, choice, param in (([custom], None, "tools"), (TOOLS, custom, "tool_choice")):
        with pytest.raises(NotSupportedError, match="custom") as caught:
            choose_tools(tools, choice, None, "hermes")
        assert caught.value.param == param


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_arguments_are_an_object_whatever_the_parameters_say(choice: Any) -> None:
    def schema(parameters: dict[str, Any]) -> Any:
        use = choose_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], choice, None,
                           "hermes")
        found: Any = use.own_call[0] if use.own_call else use.schema
        if isinstance(choice, dict):
            return found
        return list(found.get("items", found)["anyOf"][0]["properties"].values())[1]

    for bad in ("string", "array", "null", ["string", "null"]):
        with pytest.raises(RequestError, match=r"tools\[0\].function.parameters must be of type object") as caught:
            schema({"type": bad})
        assert caught.value.param == "tools"
    for good in ("object", ["null", "object"], None):
        assert schema({"type": good, "minProperties": 1}) == {"type": "object", "minProperties": 1}


# An answer in a form, or a call in the model's own notation

ANSWER_FORM = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}},
                                            "required": ["a"], "additionalProperties": False,
                                            "$defs": {"n": {"type": "integer"}}})
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}, "required": ["b"], "additionalProperties": False,
    "$defs": {"n": {"type": "boolean"}}}}}


def test_a_call_without_tags_is_a_part_of_the_answers_schema() -> None:
    form, call = choose_tools([TOOL], "auto", None, "llama3_json").form_or_call(ANSWER_FORM)
    assert call is None
    grammar = GrammarCompiler().grammar(form)
    for text, good in (('{"a": 1}', True), ('{"name": "f", "parameters": {"b": true}}', True), ('{"a": true}', False),
                       ('{"name": "f", "parameters": {"b": 1}}', False), ('{"name": "f"}', False)):
        assert matches(BYTES, grammar, text) == good, text
    objects = StructuredOutputsParams(json_object=True)
    assert choose_tools([TOOL], "auto", None, "llama3_json").form_or_call(objects) == (objects, None)


def test_each_parser_has_a_format() -> None:
    assert TOOL_CALL_FORMATS.keys() == TOOL_PARSERS.keys()
    for name, format in TOOL_CALL_FORMATS.items():
        use = choose_tools([TOOL], "auto", None, name)
        assert use.parse is not None
        parser = StreamParser(use.parse)
        text = format.call("f", {"b": True})
        assert parser.add_text(text) + parser.finish() == [CallStart("f"), CallArguments('{"b": true}')]


def test_special_tokens_that_mark_reasoning_are_never_hidden_from_the_parser() -> None:
    for given in (None, True, False):
        body = ChatCompletionRequest.model_validate({"messages": [], "skip_special_tokens": given})
        assert not body.chat_sampling_params({}, ToolUse(), marks_are_special=True).skip_special_tokens
        assert body.chat_sampling_params({}, ToolUse()).skip_special_tokens == (given is not False)
