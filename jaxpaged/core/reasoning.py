"""How models mark their reasoning, and where in it an answer begins.

A parser of reasoning is data: the two marks, and whether the model reasons without opening the reasoning itself. All
else is shared: `jaxpaged.text.answer_grammar` lets a structured output begin behind the reasoning, and the server
separates the two and counts their tokens.
"""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["before", "inside", "after"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models writes reasoning.

    Attributes:
        begin, end: the marks around it.
        always: an answer starts inside the reasoning even where the prompt has not opened it.
    """

    begin: str
    end: str
    always: bool = False

    def start_of_answer(self, turn: str, *, words: str = "") -> "ReasoningStart":
        """Where an answer begins that continues a conversation.

        Args:
            turn: what the prompt has of the answer's own turn: its header, and what is prefilled.
            words: of `turn`, the words of the message that the answer continues; empty if it starts a message.
        """
        begun, ended = turn.rfind(self.begin), turn.rfind(self.end)
        if begun > ended:
            return ReasoningStart(self, "inside", _held(turn[begun + len(self.begin):], self.end), opened=True)
        if ended >= 0:
            return ReasoningStart(self, "after")
        words = words.lstrip()
        if words:
            part = self.begin.startswith(words)
            return ReasoningStart(self, "before", words) if part else ReasoningStart(self, "after")
        return ReasoningStart(self, "inside" if self.always else "before")

    def start_of_text(self, prompt: str) -> "ReasoningStart":
        """Where the continuation of a text without turns begins: in reasoning only if that is open at its end."""
        if prompt.rfind(self.begin) > prompt.rfind(self.end):
            return self.start_of_answer(prompt)
        return ReasoningStart(self, "after")


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """Where an answer begins.

    Attributes:
        phase: before the reasoning, if there is any; inside it; or after it.
        held: end of the prompt that may turn out to be the first part of the next mark.
        opened: the prompt has opened the reasoning.
    """

    format: ReasoningFormat
    phase: Phase
    held: str = ""
    opened: bool = False


def _held(text: str, mark: str) -> str:
    """The longest end of `text` that a mark, cut off, starts with."""
    return next((mark[:size] for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), "")


REASONING_FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
