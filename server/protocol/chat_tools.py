"""The tools of a chat request, and what they mean for the prompt, the sampling and the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.core.limits import LIMITS, Limits, check_at_most
from jaxpaged.core.sampling_params import SchemaPart, StructuredOutputsParams
from jaxpaged.core.tool_formats import TOOL_CALL_FORMATS, ToolCallFormat
from jaxpaged.server.parsers.events import ParseFunction
from jaxpaged.server.parsers.tool_calls import make_tool_parser, named_call, required_calls

# Keywords of an object's schema that say nothing of its properties. With these alone a function has no parameters.
_NO_PARAMETERS = frozenset({"type", "properties", "required", "title", "description", "$schema", "$id", "$defs",
                            "definitions", "default", "examples", "strict"})
_OTHER_TYPES = ("null", "boolean", "integer", "number", "string", "array")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools.

    Attributes:
        tools: for the template, in OpenAI's format; None to hide them from the model.
        parse: finds calls in the answer; None if there can be none.
        schema: JSON schema of the answer, for calls that the request requires.
        schema_parts: the parameters of each tool in it.
        finish_reason: of a complete answer with calls.
        one_call: drop all calls but the first.
        own_call: JSON schema of a call as the model writes it of itself, and the parameters of each tool in it.
        format: how the model writes it.
    """

    tools: list[dict[str, Any]] | None = None
    parse: ParseFunction | None = None
    schema: dict[str, Any] | None = None
    schema_parts: tuple[SchemaPart, ...] = ()
    finish_reason: str = "tool_calls"
    one_call: bool = False
    own_call: tuple[dict[str, Any], tuple[SchemaPart, ...]] | None = None
    format: ToolCallFormat | None = None

    def form_or_call(self, form: StructuredOutputsParams) -> tuple[StructuredOutputsParams,
                                                                   StructuredOutputsParams | None]:
        """Structured output for an answer in a JSON form or a call, and one for a call that tags tell from the form."""
        if self.own_call is None or self.format is None:
            return form, None
        schema, parts = self.own_call
        if self.format.tag:
            return form, StructuredOutputsParams(json=schema, schema_parts=parts)
        if form.json is None:
            return form, None  # any object, so a call is one, too
        parts = tuple(replace(part, pointer="/anyOf/1" + part.pointer) for part in parts)
        return StructuredOutputsParams(json={"anyOf": [form.json, schema]}, schema_parts=(
            SchemaPart("/anyOf/0", "response_format"), *parts)), None


def choose_tools(tools: Sequence[object] | None, choice: object, parallel: bool | None,
                 parser: str | None, limits: Limits = LIMITS) -> ToolUse:
    """Resolve `tools`, `tool_choice` and `parallel_tool_calls`. With tool_choice none the prompt has no tools.

    Args:
        parser: format of the model's own calls; None without --enable-auto-tool-choice.

    Raises:
        RequestError: names the field.
    """
    known = check_tools(tools, limits)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        known, choice = _allowed_tools(choice, known)
    names = [tool["function"]["name"] for tool in known]
    if choice is None:
        choice = "auto" if known else "none"
    if choice == "none" or (choice == "auto" and not known):
        return ToolUse()
    if not known:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    one = parallel is False
    if choice == "auto":
        if parser is None:
            raise RequestError("tool_choice auto needs a server started with --enable-auto-tool-choice and "
                               "--tool-call-parser; tool_choice none, required or a named function need neither",
                               param="tool_choice")
        format = TOOL_CALL_FORMATS[parser]
        return ToolUse(known, make_tool_parser(parser, names), one_call=one, format=format,
                       own_call=_own_call(known, format.arguments))
    if choice == "required":
        call, parts = _own_call(known, "parameters")
        schema = {"type": "array", "minItems": 1, "items": call} | ({"maxItems": 1} if one else {})
        parts = tuple(replace(part, pointer="/items" + part.pointer) for part in parts)
        return ToolUse(known, required_calls, schema, parts, one_call=one)
    name = _named(choice)
    if name not in names:
        raise RequestError("tool_choice names a function that is not in tools", param="tool_choice")
    index = names.index(name)
    return ToolUse(known, named_call(name), _arguments_schema(index, known[index]), (_part("", index, known[index]),),
                   finish_reason="stop")


def check_tools(tools: Sequence[object] | None, limits: Limits = LIMITS) -> list[dict[str, Any]]:
    """Tools in OpenAI's format, without null entries.

    Raises:
        RequestError: they have another format, or are too many.
    """
    check_at_most("tools", "tools", len(tools or ()), limits.max_tools)
    known = [_check_tool(f"tools[{index}]", tool, limits) for index, tool in enumerate(tools or ())]
    if len({tool["function"]["name"] for tool in known}) < len(known):
        raise RequestError("two tools have the same name", param="tools")
    return known


def _allowed_tools(choice: Mapping[str, Any], known: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The tools that `tool_choice` allows, and how they are chosen: auto or required. The model sees no others."""
    allowed = choice.get("allowed_tools", choice)  # OpenAI's other API has its keys here
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise RequestError("tool_choice.allowed_tools must have a mode, auto or required, and a list of tools",
                           param="tool_choice")
    names = {_function_name(tool) for tool in tools}
    if None in names:
        raise RequestError("each of tool_choice.allowed_tools.tools must be an object of type function with a "
                           "function's name", param="tool_choice")
    if not names <= {tool["function"]["name"] for tool in known}:
        raise RequestError("tool_choice.allowed_tools names a function that is not in tools", param="tool_choice")
    return [tool for tool in known if tool["function"]["name"] in names], mode


def _function_name(tool: object) -> str | None:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _named(choice: object) -> str:
    _refuse_custom("tool_choice", choice, "tool_choice")
    name = _function_name(choice)
    if name is None:
        raise RequestError("tool_choice must be none, auto, required, an object of type function with a function's "
                           "name, or one of type allowed_tools", param="tool_choice")
    return name


def _refuse_custom(where: str, value: object, param: str) -> None:
    if isinstance(value, Mapping) and value.get("type") == "custom":
        raise NotSupportedError(f"{where} of type custom is not supported; use one of type function", param=param)


def _check_tool(where: str, tool: object, limits: Limits) -> dict[str, Any]:
    _refuse_custom(where, tool, "tools")
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object of type function with a function", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a non-empty string", param="tools")
    check_at_most("tools", "characters in a name", len(name), limits.max_tool_name_chars)
    for key, kinds in (("description", str), ("parameters", Mapping)):
        if function.get(key) is not None and not isinstance(function[key], kinds):
            raise RequestError(f"{where}.function.{key} must be {'a string' if kinds is str else 'a JSON schema'}",
                               param="tools")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise RequestError(f"{where}.function.strict must be true or false", param="tools")
    return {**tool, "function": {key: value for key, value in function.items() if value is not None}}


def _arguments_schema(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a function's arguments, which are an object even if its parameters do not say so.

    Raises:
        RequestError: the parameters allow no object.
    """
    parameters = tool["function"].get("parameters") or {}
    kind = parameters.get("type") or "object"
    if kind in _OTHER_TYPES or (isinstance(kind, list) and "object" not in kind):
        raise RequestError(f"tools[{index}].function.parameters must be of type object", param="tools")
    schema = {**parameters, "type": "object" if isinstance(kind, list) else kind}
    if not parameters.keys() - _NO_PARAMETERS and not parameters.get("properties") and not parameters.get("required"):
        schema["additionalProperties"] = False
    return schema


def _part(pointer: str, index: int, tool: Mapping[str, Any]) -> SchemaPart:
    """Where the parameters of a tool are in the schema of the answer."""
    return SchemaPart(pointer, f"tools[{index}].function.parameters", tool["function"].get("strict", False))


def _own_call(tools: Sequence[Mapping[str, Any]], arguments: str) -> tuple[dict[str, Any], tuple[SchemaPart, ...]]:
    """Schema of one call, whose arguments have this key, and where the parameters of each tool are in it."""
    calls = [{"type": "object", "properties": {"name": {"const": tool["function"]["name"]},
                                               arguments: _arguments_schema(index, tool)},
              "required": ["name", arguments], "additionalProperties": False} for index, tool in enumerate(tools)]
    return {"anyOf": calls}, tuple(_part(f"/anyOf/{index}/properties/{arguments}", index, tool)
                                   for index, tool in enumerate(tools))
