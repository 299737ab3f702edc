"""From a choice's text to the parts of a chat answer: reasoning, words, tool calls."""

import secrets
import string
from collections.abc import Iterable
from typing import Any

from jaxpaged.server.parsers.events import CallArguments, CallStart, Event, Grammar, Parser, Reasoning, Text

_LETTERS = string.ascii_letters + string.digits


class ChoiceReader:
    """Reads one choice as its text comes.

    Args:
        reasoning: tells reasoning from the answer; None where there is none.
        tools: finds calls in the answer; None where there are none.
        show_reasoning: whether the client wants it.
        one_call: drop all calls but the first.

    Attributes:
        called: whether a call has begun.
    """

    def __init__(self, reasoning: Grammar | None, tools: Grammar | None, *, show_reasoning: bool = True,
                 one_call: bool = False) -> None:
        self._reasoning = Parser(reasoning) if reasoning else None
        self._tools = Parser(tools) if tools else None
        self._show_reasoning, self._one_call = show_reasoning, one_call
        self._num_calls = 0

    @property
    def called(self) -> bool:
        return self._num_calls > 0

    def add(self, text: str, last: bool) -> list[dict[str, Any]]:
        """The deltas of a streamed answer that more text leads to; `last` where nothing follows."""
        events: list[Event] = [Text(text)] if text else []
        if self._reasoning is not None:
            events = self._reasoning.add(text) + (self._reasoning.finish() if last else [])
        if self._tools is not None:
            found: list[Event] = []
            for event in events:
                found += self._tools.add(event.text) if isinstance(event, Text) else [event]
            events = found + (self._tools.finish() if last else [])
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Text):
            return {"content": event.text} if event.text else None
        if isinstance(event, Reasoning):
            # the older name and the newer one: clients know either
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
    """The message that these deltas make up; content is null where there are calls alone."""
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
    """Nine letters and digits: what Mistral's templates ask of an id; others take any."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
