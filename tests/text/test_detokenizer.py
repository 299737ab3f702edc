"""Streamed text against decoding everything at once, and against Python's own UTF-8 decoder."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.text.tokenizer_files import load_tokenizer
from tests.support.tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, wordpiece, wrap

SENTENCEPIECE = wrap(sentencepiece_metadata())
NO_PREFIX = wrap(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
BYTE_LEVEL = wrap(byte_level_metadata("gpt-2"))
WORDPIECE = wordpiece()
# The library's decoder does the same here and is written otherwise, so nothing is known of it.
BYTE_LEVEL_OTHERWISE = wrap(byte_level_metadata("gpt-2"), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))
BYTES = 3  # id of <0x00> in SENTENCEPIECE


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def stream(tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], skip: bool = True) -> list[str]:
    """The text of each chunk, then what the end releases."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*map(detokenizer.add_tokens, chunks), detokenizer.finish()]


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def new_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """decode(prompt + output) without the prompt's text, which excludes an unfinished character at its end."""
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode(prompt + ids, skip)
    if not whole.startswith(before):
        before = before.rstrip("\ufffd")
        assert whole.startswith(before)
    return whole[len(before):]


def ids_of(tokenizer: Tokenizer, *, min_size: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=min_size, max_size=30)


@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_chunks(smollm2: Tokenizer, data: st.DataObject, skip: bool) -> None:
    prompt, ids = data.draw(ids_of(smollm2, min_size=1)), data.draw(ids_of(smollm2))
    if smollm2.decode(prompt, skip).endswith("\ufffd"):
        prompt.append(504)  # " The": what an unfinished prompt does has a test of its own
    assert "".join(stream(smollm2, prompt, cut(ids, data), skip)) == new_text(smollm2, prompt, ids, skip)


@given(data=st.data(), prompt=st.text(min_size=1), text=st.text())
def test_any_text_in_any_chunks(smollm2: Tokenizer, data: st.DataObject, prompt: str, text: str) -> None:
    for tokenizer in (smollm2, BYTE_LEVEL, SENTENCEPIECE, NO_PREFIX):
        before, ids = tokenizer.encode(prompt), tokenizer.encode(text, False)
        assert "".join(stream(tokenizer, before, cut(ids, data))) == new_text(tokenizer, before, ids, True)


@given(data=st.data(), skip=st.booleans())
def test_a_decoder_that_joins_words(data: st.DataObject, skip: bool) -> None:
    assert WORDPIECE.byte_rule is None
    prompt, ids = data.draw(ids_of(WORDPIECE, min_size=1)), data.draw(ids_of(WORDPIECE))
    assert "".join(stream(WORDPIECE, prompt, cut(ids, data), skip)) == new_text(WORDPIECE, prompt, ids, skip)


RAW = st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode))).map(b"".join)


@given(data=st.data(), raw=RAW)
def test_any_bytes(data: st.DataObject, raw: bytes) -> None:
    """Byte-level text is what Python makes of the bytes; byte-fallback text has one U+FFFD per undecodable byte."""
    byte_ids = {BYTE_LEVEL.token_bytes(number): number for number in range(256)}
    chunks = cut([byte_ids[bytes([byte])] for byte in raw], data)
    assert "".join(stream(BYTE_LEVEL, [byte_ids[b"a"]], chunks)) == raw.decode(errors="replace")
    chunks = cut([BYTES + byte for byte in raw], data)
    assert "".join(stream(SENTENCEPIECE, [BYTES + 97], chunks)) == each(raw)


def each(raw: bytes) -> str:
    """Decode with one U+FFFD for each byte that is no part of a character."""
    text = raw.decode(errors="surrogateescape")
    return "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)


@given(data=st.data(), raw=RAW)
def test_any_bytes_with_a_decoder_of_unknown_rule(data: st.DataObject, raw: bytes) -> None:
    assert BYTE_LEVEL_OTHERWISE.byte_rule is None
    ids = byte_ids(BYTE_LEVEL, raw)
    assert "".join(stream(BYTE_LEVEL_OTHERWISE, byte_ids(BYTE_LEVEL, b"a"), cut(ids, data))) == raw.decode(
        errors="replace")


def test_undecodable_bytes_with_a_decoder_of_unknown_rule() -> None:
    ids = byte_ids(BYTE_LEVEL, b"\xff" * 20)
    texts = stream(BYTE_LEVEL_OTHERWISE, byte_ids(BYTE_LEVEL, b"a"), [[number] for number in ids])
    assert texts == [""] * 3 + ["\ufffd"] * 17 + ["\ufffd" * 3]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@pytest.mark.parametrize("char", ["é", "日", "👍"])
def test_a_character_of_several_tokens_is_released_whole(tokenizer: Tokenizer, char: str) -> None:
    ids = byte_ids(tokenizer, char.encode())
    texts = stream(tokenizer, byte_ids(tokenizer, b"a"), [[number] for number in ids])
    assert texts == [""] * (len(ids) - 1) + [char, ""]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    single = {tokenizer.token_bytes(number): number for number in reversed(range(tokenizer.vocab_size))}
    if tokenizer is SENTENCEPIECE:
        return [BYTES + byte for byte in raw]
    return [single[bytes([byte])] for byte in raw]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_undecodable_bytes_are_not_held_back(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"\xff" * 50)
    assert stream(tokenizer, byte_ids(tokenizer, b"a"), [[number] for number in ids]) == ["\ufffd"] * 50 + [""]
    # A lead byte could still become a character; the next one shows that it does not.
    ids = byte_ids(tokenizer, b"\xe6" * 5)
    assert stream(tokenizer, byte_ids(tokenizer, b"a"), [[number] for number in ids]) == ["", *["\ufffd"] * 4, "\ufffd"]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_a_character_cut_off_by_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "日".encode()[:2])
    *texts, last = stream(tokenizer, byte_ids(tokenizer, b"a"), [[number] for number in ids])
    assert texts == ["", ""] and set(last) == {"\ufffd"}


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@pytest.mark.parametrize("size", [1, 2])
def test_a_character_begun_in_the_prompt(tokenizer: Tokenizer, size: int) -> None:
    raw = "日".encode()
    prompt, ids = byte_ids(tokenizer, b"a" + raw[:size]), byte_ids(tokenizer, raw[size:])
    assert "".join(stream(tokenizer, prompt, [ids])) == "日"


def test_stray_bytes_spoil_no_neighbor() -> None:
    ids = [*SENTENCEPIECE.encode("日", False)[1:], BYTES + 0xFF, *SENTENCEPIECE.encode("本", False)[1:]]
    assert "".join(stream(SENTENCEPIECE, SENTENCEPIECE.encode("a"), [ids])) == "日\ufffd本"


def test_spaces_at_the_start() -> None:
    """Of the whole text one space is the marker's; a space at the start of the output is the model's own."""
    hello = SENTENCEPIECE.encode("hello", False)
    assert "".join(stream(SENTENCEPIECE, SENTENCEPIECE.encode("the"), [hello])) == " hello"
    assert "".join(stream(SENTENCEPIECE, [1], [hello], skip=True)) == "hello"
    assert "".join(stream(SENTENCEPIECE, [1], [hello], skip=False)) == " hello"
    assert "".join(stream(SENTENCEPIECE, [1, 1, 2], [hello, hello])) == "hello hello"
    two = SENTENCEPIECE.encode(" hello", False)
    assert "".join(stream(SENTENCEPIECE, [1], [[number] for number in two])) == " hello"
    assert "".join(stream(NO_PREFIX, [1], [hello])) == " hello"


def test_special_tokens() -> None:
    hello = SENTENCEPIECE.encode("hello", False)
    prompt = SENTENCEPIECE.encode("the")
    assert "".join(stream(SENTENCEPIECE, prompt, [[2, *hello, 2]], skip=True)) == " hello"
    assert "".join(stream(SENTENCEPIECE, prompt, [[2, *hello, 2]], skip=False)) == "</s> hello</s>"


def test_ids_outside_the_vocabulary_are_ignored(smollm2: Tokenizer) -> None:
    assert stream(smollm2, [504], [[50_000], [504]]) == ["", smollm2.decode([504]), ""]
