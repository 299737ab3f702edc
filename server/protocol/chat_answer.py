"""Splits a choice's text into the parts of a chat answer: reasoning, content, tool calls."""

import secrets
import string
from collections.abc import Iterable
from typing import Any

from jaxpaged.server.parsers.events import CallArguments, CallStart, Event, ParseFunction, Reasoning, StreamParser, Text
from jaxpaged.server.protocol.reasoning_tokens import ReasoningTokens

_ID_CHARS = string.ascii_letters + string.digits


class ChoiceParser:
    """Parses the text of one choice as it is generated.

    Args:
        reasoning: separates reasoning from the answer; None for models without.
        tools: finds calls in the answer; None without tools.
        reasoning_tokens: counts the tokens of the reasoning; None for models without.
        show_reasoning: whether the client wants it.
        one_call: drop all calls but the first.

    Attributes:
        called: whether there is a call.
    """

    def __init__(self, reasoning: ParseFunction | None, tools: ParseFunction | None, *,
                 reasoning_tokens: ReasoningTokens | None = None, show_reasoning: bool = True,
                 one_call: bool = False) -> None:
        self.reasoning_tokens = reasoning_tokens
        self._reasoning = StreamParser(reasoning) if reasoning else None
        self._tools = StreamParser(tools) if tools else None
        self._show_reasoning, self._one_call = show_reasoning, one_call
        self._num_calls = 0

    @property
    def called(self) -> bool:
        return self._num_calls > 0

    def add_text(self, text: str, last: bool) -> list[dict[str, Any]]:
        """The deltas of a streamed answer for the next text; `last` if nothing follows."""
        events: list[Event] = [Text(text)] if text else []
        if self._reasoning is not None:
            events = self._reasoning.add_text(text) + (self._reasoning.finish() if last else [])
        if self._tools is not None:
            found: list[Event] = []
            for event in events:
                found += self._tools.add_text(event.text) if isinstance(event, Text) else [event]
            events = found + (self._tools.finish() if last else [])
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Text):
            return {"content": event.text} if event.text else None
        if isinstance(event, Reasoning):
            # the old name and the new one; clients read either
            return ({"reasoning_content": event.text, "reasoning": event.text}
                    if event.text and self._show_reasoning else None)
        if isinstance(event, CallStart):
            self._num_calls += 1
        if self._one_call and self._num_calls > 1:
            return None
        index = self._num_calls - 1
        if isinstance(event, CallArguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}
        return {"tool_calls": [{"index": index, "id": _call_id(), "type": "function",
                                "function": {"name": event.name, "arguments": ""}}]}


def join_deltas(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that these deltas add up to; content is null if there are only calls."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls or reasoning else "")}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return message | ({"tool_calls": calls} if calls else {})


def _call_id() -> str:
    """Nine letters and digits, as Mistral's templates require; other models accept any id."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
