"""Parsers by the names that flags use."""

from jaxpaged.server.parsers.events import Grammar
from jaxpaged.server.parsers.hermes import hermes
from jaxpaged.server.parsers.llama3 import llama3_json
from jaxpaged.server.parsers.mistral import mistral
from jaxpaged.server.parsers.think import BEGIN, think

TOOL_PARSERS: dict[str, Grammar] = {"hermes": hermes, "llama3_json": llama3_json, "mistral": mistral}
REASONING_PARSERS = ("deepseek_r1", "qwen3")


def reasoning_grammar(name: str, prompt: str) -> Grammar:
    """How reasoning is told from the answer.

    Args:
        name: deepseek_r1 for models that always reason; qwen3 for those that may, and then open it themselves.
        prompt: its text; where it ends in the middle of the model's turn with an opened reasoning, that goes on.
    """
    assert name in REASONING_PARSERS, name
    return think(always=name == "deepseek_r1" or prompt.rstrip().endswith(BEGIN))
