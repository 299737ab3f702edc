"""What a chat template reads and shows, found by rendering short conversations of marked messages.

Templates differ in what they take, and many leave out silently what their authors did not think of.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")
ContentFormat = Literal["auto", "string", "openai"]
# Renders messages, and tools if there are any; None where the template refuses or fails.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str | None]

_ID = "probe0001"  # nine letters and digits, as Mistral's templates demand


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What one template reads, and what it leaves out.

    Attributes:
        text_roles: roles whose content may be a string.
        part_roles: roles whose content may be a list of text parts.
        text_arguments: it wants the arguments of a call as JSON text instead of an object.
        null_content: a message with calls alone has null as its content, as in OpenAI's API; else an empty string.
        shows: of "system", "tool", "tools", "calls" and "calls beside text", those that it shows.
    """

    text_roles: frozenset[str] = frozenset(ROLES)
    part_roles: frozenset[str] = frozenset()
    text_arguments: bool = False
    null_content: bool = False
    shows: frozenset[str] = field(default_factory=lambda: frozenset(
        ("system", "tool", "tools", "calls", "calls beside text")))

    def describe(self) -> str:
        """What the template cannot show, for the log; empty if there is nothing."""
        parts = []
        refused = [f"messages of role {role}" for role in ("system", "tool") if role not in self.shows]
        if refused:
            parts.append(f"it does not show {' and '.join(refused)}: requests with these are refused")
        if "tools" not in self.shows:
            parts.append("it does not show tools: they are described in the " + (
                "system message" if "system" in self.shows else "first message of the user"))
        if "calls" not in self.shows:
            parts.append("it does not show earlier tool calls: they become a part of their message's text")
        if not self.part_roles:
            parts.append("it reads text alone: content given as a list of parts is joined by newlines")
        return "; ".join(parts)


def find_traits(render: Render, content_format: ContentFormat = "auto") -> TemplateTraits:
    """Probe a template.

    Args:
        content_format: string or openai: the template reads that form of content, whatever the probe finds.
    """
    user, system = _message("user", "user"), _message("system", "system")
    shows = set()
    if _shown(render, "system", [system, user]):
        shows.add("system")
    calls, text_arguments, null_content = _find_calls(render)
    call = _call_message(None if null_content else "", text_arguments)
    if calls:
        shows.add("calls")
        if _shown(render, "call", [user, {**call, "content": _mark("reply")}, _result()]):
            shows.add("calls beside text")
    if _shown(render, "result", [user, call, _result()]) or _shown(
            render, "result", [user, _message("assistant", "reply"), _result()]):
        shows.add("tool")
    if _shown(render, "tool", [user]) or _shown(render, "tool", [system, user]):
        shows.add("tools")
    if content_format == "auto":
        text_roles, part_roles = _find_content(render, call)
    else:
        text_roles = frozenset(ROLES if content_format == "string" else ())
        part_roles = frozenset(ROLES if content_format == "openai" else ())
    return TemplateTraits(text_roles, part_roles, text_arguments, null_content, frozenset(shows))


def _find_calls(render: Render) -> tuple[bool, bool, bool]:
    """Whether calls are shown, whether their arguments have to be text, and whether their content may be null."""
    user = _message("user", "user")
    name_alone: list[tuple[bool, bool, bool]] = []  # from a template that shows arguments of certain names, or none
    for text_arguments in (False, True):
        for null in (True, False):
            call = _call_message(None if null else "", text_arguments)
            for text in _texts(render, [user, call, _result()], [user, call]):
                # Python's notation, or JSON inside a JSON string: the template wants the other form.
                if _mark("call") in text and f"'{_mark('key')}'" not in text and '\\"' not in text \
                        and "None" not in text:
                    if _mark("value") in text:
                        return True, text_arguments, null
                    name_alone.append((True, text_arguments, null))
    return name_alone[0] if name_alone else (False, False, False)


def _find_content(render: Render, call: dict[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """The roles whose content may be text, and those whose content may be parts."""
    text_roles: set[str] = set()
    part_roles: set[str] = set()
    users: list[dict[str, Any]] = [_message("user", "user"), _with_parts(_message("user", "user"), "user")]
    for role in ROLES:
        message = _result() if role == "tool" else _message(role, "result")
        for given, found in ((message, text_roles), (_with_parts(message, "result", "more"), part_roles)):
            talks = {"user": [[given]], "system": [[given, user] for user in users],
                     "assistant": [[user, given] for user in users],
                     "tool": [[user, *calls, given] for user in users for calls in ([call], [])]}[role]
            for text in _texts(render, *talks):
                if _mark("result") in text and (given is message or _mark("more") in text) \
                        and not re.search("['\"]text['\"]:", text):
                    found.add(role)
    # What neither form shows may be shown in another conversation: it goes as text, which most templates read.
    return frozenset(text_roles | set(ROLES) - part_roles), frozenset(part_roles)


def _shown(render: Render, mark: str, messages: list[dict[str, Any]]) -> bool:
    """Whether a mark is shown, with the content of the messages as text or as parts."""
    parts = [message if message["content"] is None else {**message, "content": _parts(message["content"])}
             for message in messages]
    return any(_mark(mark) in text for text in _texts(render, messages, parts))


def _texts(render: Render, *talks: list[dict[str, Any]]) -> Iterator[str]:
    """What a template makes of conversations, with tools and without."""
    for talk in talks:
        for tools in (_TOOLS, None):
            text = render(talk, tools)
            if text is not None:
                yield text


def _mark(name: str) -> str:
    return f"zq{name}qz"


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _with_parts(message: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**message, "content": _parts(*map(_mark, names))}


def _message(role: str, name: str) -> dict[str, Any]:
    return {"role": role, "content": _mark(name)}


def _result() -> dict[str, Any]:
    return {**_message("tool", "result"), "tool_call_id": _ID, "name": "probe"}


def _call_message(content: str | None, text_arguments: bool) -> dict[str, Any]:
    arguments = f'{{"{_mark("key")}": "{_mark("value")}"}}' if text_arguments else {_mark("key"): _mark("value")}
    return {"role": "assistant", "content": content, "tool_calls": [
        {"id": _ID, "type": "function", "function": {"name": _mark("call"), "arguments": arguments}}]}


_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {
    "name": _mark("tool"), "description": "d", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "d"}}, "required": ["city"]}}}]


def content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message's content; parts are joined by a newline."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)
