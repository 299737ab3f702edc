"""How models write tool calls, for what has to write one in their place: prompts and grammars. Reading them is the
server's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How one family of models writes a call.

    Attributes:
        begin, end: what surrounds the JSON object of a call.
        arguments: the key of the arguments in it.
    """

    begin: str = ""
    end: str = ""
    arguments: str = "arguments"

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model would write it."""
        return self.begin + json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False) + self.end


PLAIN_CALLS = ToolCallFormat()
TOOL_CALL_FORMATS = {
    "hermes": ToolCallFormat("<tool_call>\n", "\n</tool_call>"),
    "llama3_json": ToolCallFormat(arguments="parameters"),
    "mistral": ToolCallFormat("[TOOL_CALLS] [", "]"),
}
