"""The count of reasoning tokens, compared with the text between the marks."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.reasoning import REASONING_FORMATS, ReasoningStart
from jaxpaged.server.protocol.reasoning_tokens import ReasoningTokens

R1, QWEN = REASONING_FORMATS["deepseek_r1"], REASONING_FORMATS["qwen3"]
pieces = st.sampled_from(["<think>", "</think>", "</", "<", "think", ">", "a", "bc", " ", "\n", "é", "k>", "</thi",
                          "n"])


def count(start: ReasoningStart, tokens: list[str], size: int = 1) -> int:
    counter = ReasoningTokens(start, lambda number: tokens[number].encode())
    for at in range(0, len(tokens), size):
        counter.add_tokens(range(at, min(at + size, len(tokens))), at + size >= len(tokens))
    return counter.count


def expected(start: ReasoningStart, tokens: list[str]) -> int:
    """Tokens with a character between the marks, found in the whole text."""
    text = start.held + "".join(tokens)
    opening = None if start.held and start.phase == "inside" else re.match(r"\s*<think>", text)
    if start.phase == "after" or (start.phase == "before" and not opening):
        return 0
    begin = opening.end() if opening else 0
    end = text.find("</think>", begin)
    span = range(begin, end if end >= 0 else len(text))
    found, at = 0, len(start.held)
    for token in tokens:
        found += bool(set(range(at, at + len(token))) & set(span))
        at += len(token)
    return found


@given(tokens=st.lists(pieces, min_size=1, max_size=12), size=st.integers(1, 3))
@pytest.mark.parametrize("start", [
    R1.start_of_answer(""), QWEN.start_of_answer(""), QWEN.start_of_answer("<think>a</th"),
    QWEN.start_of_answer("<thi", words="<thi"), QWEN.start_of_answer("<think></think>")])
def test_tokens_between_the_marks(start: ReasoningStart, tokens: list[str], size: int) -> None:
    assert count(start, tokens, size) == expected(start, tokens)


def test_cases() -> None:
    assert count(R1.start_of_answer("<think>\n"), ["Let", " me", "</think>", "\n\n", "Yes"]) == 2
    assert count(QWEN.start_of_answer(""), ["<think>", "\n", "Hm", "\n", "</", "think", ">", "Yes"]) == 3
    assert count(QWEN.start_of_answer(""), ["<think>", "cut", " off"]) == 2
    assert count(QWEN.start_of_answer(""), ["No", " reasoning"]) == 0
