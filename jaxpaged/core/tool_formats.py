"""How models write tool calls, for what has to write or expect one: prompts and grammars. Reading them is the server's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How one family of models writes a call.

    Attributes:
        tag, end_tag: what surrounds a call, or several; empty where calls have no tags.
        opening, closing: what is between the tags and the JSON object of the call.
        arguments: the key of the arguments in it.
        separator: what is between the objects of several calls; None where each call has tags of its own.
    """

    tag: str = ""
    end_tag: str = ""
    opening: str = ""
    closing: str = ""
    arguments: str = "arguments"
    separator: str | None = None

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model would write it."""
        written = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return self.tag + self.opening + written + self.closing + self.end_tag


PLAIN_CALLS = ToolCallFormat()
TOOL_CALL_FORMATS = {
    "hermes": ToolCallFormat("<tool_call>", "</tool_call>", "\n", "\n"),
    "llama3_json": ToolCallFormat(arguments="parameters"),
    "mistral": ToolCallFormat("[TOOL_CALLS]", opening=" [", closing="]", separator=","),
}
