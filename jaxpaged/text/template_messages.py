"""Bringing a conversation into the form that one chat template reads, and seeing whether it shows all of it."""

import json
from typing import Any

from jaxpaged.core.tool_formats import ToolCallFormat
from jaxpaged.text.template_traits import TemplateTraits, content_text

Message = dict[str, Any]

# A text of this length that the prompt has is no accident.
_LONG = 32


def adapt(messages: list[Message], tools: list[dict[str, Any]] | None, traits: TemplateTraits,
          calls: ToolCallFormat) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages and tools for a template.

    Tools and earlier calls that it does not show become a part of the text.

    Args:
        messages: normalized ones.
        calls: how the model writes tool calls.
    """
    if tools and "tools" not in traits.shows:
        messages, tools = _with_description(messages, tools, traits, calls), None
    return [_adapt_message(message, traits, calls) for message in messages], tools


def _adapt_message(message: Message, traits: TemplateTraits, format: ToolCallFormat) -> Message:
    calls, content = message.get("tool_calls"), message["content"]
    shown = "calls beside text" if content_text(content).strip() else "calls"
    if calls and shown not in traits.shows:
        written = [format.call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        text = "\n".join(filter(None, (content_text(content), *written)))
        message = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
        calls, content = None, text
    role, normal = message["role"], dict(message)
    if isinstance(content, str):
        normal["content"] = content if role in traits.text_roles else [{"type": "text", "text": content}]
    elif role not in traits.part_roles:
        normal["content"] = content_text(content)
    if calls:
        if traits.null_content and not content_text(content).strip():
            normal["content"] = None
        if traits.text_arguments:
            normal["tool_calls"] = [{**call, "function": {
                **call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
                for call in calls]
    return normal


def _with_description(messages: list[Message], tools: list[dict[str, Any]], traits: TemplateTraits,
                      calls: ToolCallFormat) -> list[Message]:
    """The messages with a description of the tools in the system message, or in the first one of the user."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    form = calls.call("NAME", {}).replace("{}", "{...}")
    text = "\n".join(("You can call functions. Each of these lines describes one:", *lines,
                      "To call a function, write its name and arguments in this form:", form))
    role = "system" if "system" in traits.shows else "user"
    index = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if index is None or (role == "system" and index > 0):
        return [{"role": role, "content": text}, *messages]
    content = messages[index]["content"]
    both = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[:index], {**messages[index], "content": both}, *messages[index + 1:]]


class MarkedChat:
    """A conversation of the same form as another, with a mark in place of each text and name.

    Attributes:
        messages, tools: to be rendered.
        form: equal for conversations of the same form.
    """

    def __init__(self, messages: list[Message], tools: list[dict[str, Any]] | None, *, last: bool = True) -> None:
        self._originals = messages
        # What the template has to show: mark, index of its message (None for tools), and what it stands for.
        self._marks: list[tuple[str, int | None, str]] = []
        count = len(messages) if last else len(messages) - 1
        self.messages = [self._marked(index, message, index < count) for index, message in enumerate(messages)]
        self.tools = tools and [self._marked_tool(tool) for tool in tools]
        unnamed = [{key: value for key, value in message.items() if key not in ("name", "tool_call_id", "tool_calls")}
                   for message in self.messages]
        numbers = [[bool(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
                   for message in messages]
        self.form = repr((unnamed, numbers, len(tools or ()), last))

    def missing(self, shown: str, text: str) -> str | None:
        """What the template leaves out, in words; None if it shows everything.

        Args:
            shown: what it makes of the marked conversation.
            text: what it makes of the original one.
        """
        for mark, index, what in self._marks:
            if mark in shown:
                continue
            if index is not None and what == "content":
                content = content_text(self._originals[index]["content"]).strip()
                if len(content) >= _LONG and content in text:
                    continue
            role = "" if index is None else f", of role {self._originals[index]['role']}"
            return f"messages[{index}].{what}{role}" if index is not None else what
        return None

    def _mark(self, index: int | None, what: str, needed: bool) -> str:
        mark = f"zq{len(self._marks):06d}qz"
        self._marks.append((mark if needed else "", index, what))
        return mark

    def _marked(self, index: int, message: Message, needed: bool) -> Message:
        calls, content = message.get("tool_calls"), message["content"]
        # A template may leave out what the assistant said beside its calls: those are not the user's words.
        needed_text = needed and not calls
        marked = dict(message)
        if isinstance(content, str):
            marked["content"] = self._mark(index, "content", needed_text) if content.strip() else content
        elif content is not None:
            marked["content"] = [{**part, "text": self._mark(index, "content", needed_text)}
                                 if part["text"].strip() else part for part in content]
        for key in ("reasoning_content", "reasoning", "thinking"):
            if key in marked:
                marked[key] = "r"
        if calls:
            marked["tool_calls"] = [{**call, "function": {
                "name": self._mark(index, "tool_calls", needed), "arguments": _short(call["function"]["arguments"])}}
                for call in calls]
        return marked

    def _marked_tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function")
        if not isinstance(function, dict):
            return tool
        return {**tool, "function": {**function, "name": self._mark(None, "tools", True)}}


def _short(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return "{}" if arguments == "{}" else '{"a": "b"}'
    return {"a": "b"} if arguments else {}


