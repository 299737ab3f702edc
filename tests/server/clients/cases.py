"""What the tests of all client libraries share: what the model writes, and the type that a structured answer has.

Nothing but pydantic is needed here, since these tests run in environments of the clients.
"""

import itertools
import json
import time
import urllib.request
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel

MODEL, KEY = "m", "sesame"


class Color(StrEnum):
    """An enumeration."""

    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    """Where to."""

    street: str
    zip: int | None = None


class Line(BaseModel):
    """A number of things."""

    name: str
    count: int


class Card(BaseModel):
    """Paid by card."""

    kind: Literal["card"]
    number: str


class Cash(BaseModel):
    """Paid in cash."""

    kind: Literal["cash"]


class Order(BaseModel):
    """An order, of everything that types offer."""

    id: UUID
    placed: date
    shipped: datetime
    total: Decimal
    color: Color
    to: Address
    lines: list[Line]
    paid: Card | Cash
    code: int | str
    note: str | None = None


VALUES: dict[str, Any] = {
    "id": "12345678-1234-4234-8234-123456789abc", "placed": "2026-02-28", "shipped": "2026-03-01T12:30:00Z",
    "total": "12.50", "color": "blue", "to": {"street": "1 Main St", "zip": None},
    "lines": [{"name": "pen", "count": 2}, {"name": "ink", "count": 1}], "paid": {"kind": "card", "number": "42"},
    "code": "A7", "note": None}
ORDER = Order.model_validate(VALUES)
WEATHER = {"city": "Oslo", "days": 2}
WEATHER_TOOL: dict[str, Any] = {"type": "function", "function": {
    "name": "weather", "description": "The weather of some days.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"], "additionalProperties": False}, "strict": True}}


def _pieces(indent: int) -> list[str]:
    """The order as JSON in three pieces, which are others for each indentation."""
    text = json.dumps(VALUES, indent=indent)
    cuts = [0, text.index('"color"'), text.index('"paid"'), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


# Name -> the tokens of the answer. A last message that is the name, of whatever role, is answered with them.
SCRIPTS: dict[str, list[str]] = {
    "chat": ["The sea", " is", " deep."],
    "think": ["<think>\n", "The user", " asks.", "\n</think>", "\n\nIt is", " two."],
    "call": ["<tool_call>\n", '{"name": "weather", ', '"arguments": {"city": "Oslo", ', '"days": 2}}',
             "\n</tool_call>"],
    "calls": ["<tool_call> ", '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}', "</tool_call> ",
              "<tool_call>  ", '{"name": "weather", "arguments": {"city": "Rome", ', '"days": 1}}', "</tool_call>  "],
    "sunny": ["Sun", " in Oslo."],  # what the tool returns
    "arguments": ['{"city":  "Oslo", ', '"days":  2}'],
    "forced": ['[{"name": "weather", "parameters": ', '{"city": "Oslo",  "days": 2}}]'],
    "order": _pieces(1),
    "thought": ["<think>  ", "An order", " it is.", "</think>\n\n", *_pieces(2)],
    "final": ['[{"name": "final_result", "parameters": ', *_pieces(3), " }]"],
    "tool": [f'[{{"name": "Order", "parameters": {json.dumps(VALUES, indent=4)}}}]'],
    "own": [f'<tool_call>{{"name": "Order", "arguments": {json.dumps(VALUES, indent=5)}}}</tool_call>'],
    "text": ['{"content": "Hello"}'],
    "list": ['{"tasks": [{"city": "Oslo",   ', '"days": 2}, {"city": "Rome",   "days": 1}]}'],
    "loop": ["la"],
}
ENDLESS = ["loop"]


def script(name: str) -> dict[str, Any]:
    """The `extra_body` for answers of this script, where the last message is the client's own."""
    return {"chat_template_kwargs": {"script": name}}


def wait_idle(url: str, timeout: float = 60) -> None:
    """Wait until the server runs nothing: an answer that nobody awaits has been ended."""
    request = urllib.request.Request(f"{url}/engine/state", headers={"Authorization": f"Bearer {KEY}"})
    start = time.monotonic()
    while True:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            state = json.load(answer)
        if not state["running"] + state["waiting"]:
            return
        assert time.monotonic() - start < timeout, state
        time.sleep(0.05)
