"""Where the end of a prompt leaves the reasoning."""

import pytest

from jaxpaged.core.reasoning import REASONING_FORMATS


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize(("turn", "words", "phase", "held"), [
    ("<a>\n", "", None, ""), ("", "", None, ""),
    ("<a>BEGIN\n", "", "inside", ""), ("<a>BEGIN\nLet me", "BEGIN\nLet me", "inside", ""),
    ("<a>BEGIN\nDone.END_PART", "BEGIN\nDone.END_PART", "inside", "END_PART"),
    ("<a>BEGIN\n\nEND\n\n", "", "after", ""), ("<a>BEGINxEND\n\nThe", "The", "after", ""), ("<a>xEND", "", "after", ""),
    ("<a>BEGIN\nEND\nBEGINLet", "BEGINLet", "inside", ""),  # a template that adds an empty one of its own
    ("<a>The", "The", "after", ""), ("<a>  ", "  ", None, ""), ("<a>BEGIN_PART", "BEGIN_PART", "before", "BEGIN_PART"),
])
def test_where_an_answer_begins(name: str, turn: str, words: str, phase: str | None, held: str) -> None:
    form = REASONING_FORMATS[name]

    def spelled(text: str) -> str:
        for mark, part, whole in (("BEGIN", "BEGIN_PART", form.begin), ("END", "END_PART", form.end)):
            text = text.replace(part, whole[:-2]).replace(mark, whole)
        return text

    found = form.start_of_answer(spelled(turn), words=spelled(words))
    assert found.phase == (phase or ("inside" if form.always else "before"))
    assert found.held == spelled(held)


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_a_text_without_turns_reasons_only_where_it_says_so(name: str) -> None:
    form = REASONING_FORMATS[name]
    assert form.start_of_text("The capital").phase == form.start_of_text(f"{form.begin}a{form.end}").phase == "after"
    assert form.start_of_text(f"a {form.begin}\n").phase == "inside"
