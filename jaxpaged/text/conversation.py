"""Conversations in OpenAI's form: checked, and brought into the form that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.core.errors import NotSupportedError, RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_SUPPORTED = ("function_call", "audio", "refusal")  # ignoring these would silently change the prompt
_FIELDS = {"role", "content", "name", "tool_call_id", "reasoning_content", "reasoning", "tool_calls", *_NOT_SUPPORTED}
_PART_FIELDS = {"type", "text"}
_CALL_FIELDS = {"id", "type", "function", "index"}  # some clients send back the index of a streamed call
_FUNCTION_FIELDS = {"name", "arguments"}


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Check a conversation in OpenAI's form and bring it into the one that chat templates read.

    Content is a string or a list of text parts; an assistant's missing content is an empty string. Role `developer`,
    the newer name of `system`, becomes `system`. The arguments of tool calls become objects. `name`, `tool_call_id` and
    `reasoning_content` (also spelled `reasoning`) are kept, any other field is dropped.

    Raises:
        RequestError: anything but text in one of the known roles; names the message.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_normalize_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def unknown_message_fields(messages: Sequence[object]) -> list[str]:
    """Names of the fields that `normalize_messages` drops, as `messages[].content[].name`; each once."""
    found: dict[str, None] = {}

    def look(where: str, items: object, known: set[str]) -> list[Mapping[str, Any]]:
        objects = [item for item in items if isinstance(item, Mapping)] if isinstance(items, (list, tuple)) else []
        for item in objects:
            found.update((f"{where}.{key}", None) for key in item if key not in known and item[key] is not None)
        return objects

    for message in look("messages[]", messages, _FIELDS):
        look("messages[].content[]", message.get("content"), _PART_FIELDS)
        for call in look("messages[].tool_calls[]", message.get("tool_calls"), _CALL_FIELDS):
            look("messages[].tool_calls[].function", [call.get("function")], _FUNCTION_FIELDS)
    return list(found)


def _normalize_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(f"{where} must be an object")
    role = message.get("role")
    if role not in _ROLES or not isinstance(role, str):
        raise _bad(f"{where}.role must be one of {', '.join(_ROLES)}")
    for key in _NOT_SUPPORTED:
        if message.get(key):
            raise NotSupportedError(f"{where}.{key} is not supported; leave it out", param="messages")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    normal: dict[str, Any] = {"role": "system" if role == "developer" else role,
                              "content": _check_content(f"{where}.content", content)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key, message.get("reasoning") if key == "reasoning_content" else None)
        if value is not None:
            if not isinstance(value, str):
                raise _bad(f"{where}.{key} must be a string")
            normal[key] = value
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, (list, tuple)):
            raise _bad(f"{where}.tool_calls must be a list in an assistant's message")
        normal["tool_calls"] = [_normalize_call(f"{where}.tool_calls[{index}]", call)
                                for index, call in enumerate(calls)]
    return normal


def _check_content(where: str, content: object) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _bad(f"{where} must be a string or a list of text parts")
    return [{"type": "text", "text": _part_text(f"{where}[{index}]", part)} for index, part in enumerate(content)]


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise _bad(f"{where} must be a part of type text; this model takes nothing else")
    text = part.get("text")
    if not isinstance(text, str):
        raise _bad(f"{where}.text must be a string")
    return text


def _normalize_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(f"{where} must be an object with a function and its name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise _bad(f"{where}.function.arguments is not valid JSON") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _bad(f"{where}.function.arguments must be an object")
    normal = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {"id": call["id"], **normal} if isinstance(call.get("id"), str) else normal


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _bad(text: str) -> RequestError:
    return RequestError(text, param="messages")
