"""Directories with a SentencePiece file and no tokenizer.json: the ids are SentencePiece's own, and its models."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.errors import CheckpointError
from jaxpaged.text.sentencepiece import build_tokenizer, read_model
from jaxpaged.text.tokenizer_files import load_tokenizer

DATA = Path(__file__).parents[1] / "support" / "data"
ROWS: dict[str, list[dict[str, Any]]] = json.loads((DATA / "sentencepiece.json").read_text())
CONFIG = {"model_type": "llama"}


def write(folder: Path, name: str, **files: Any) -> Path:
    """A directory with the model and some JSON files."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes((DATA / f"sentencepiece_{name}.model").read_bytes())
    for file, content in {"config": CONFIG, **files}.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_ids_and_texts_are_sentencepieces(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, name))
    for row in ROWS[name]:
        assert tokenizer.encode(row["text"], False) == row["ids"], row["text"]
        assert tokenizer.encode(row["text"]) == [1, *row["ids"]]
        if "\u2581" not in row["text"]:  # of several marks of spaces that begin a text SentencePiece drops all
            assert tokenizer.decode(row["ids"]) == row["decoded"]
    assert tokenizer.eos_token_ids == {2}
    assert [tokenizer.is_special(number) for number in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("legacy", [True, False])
def test_texts_between_added_tokens_equal_transformers(name: str, legacy: bool, tmp_path: Path) -> None:
    """By the part of its conversion that needs no sentencepiece."""
    proto_of = pytest.importorskip("transformers.convert_slow_tokenizer").import_protobuf
    pytest.importorskip("google.protobuf", reason="transformers reads SentencePiece files with protobuf")
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import SpmConverter

    folder = write(tmp_path, name, tokenizer_config={"legacy": legacy})
    proto = proto_of().ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    vocabulary: Any = pieces if proto.trainer_spec.model_type == 1 else {
        text: number for number, (text, _) in enumerate(pieces)}
    theirs = SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary, legacy=legacy)
    theirs.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<s>", "</s>", "<unk>")])
    ours = load_tokenizer(folder)
    for text in ("the block", "a</s>the block", "</s> the</s>the  </s>", "x</s>\u2581y"):
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False).ids, text


@given(text=st.text())
def test_any_text_comes_back(text: str) -> None:
    model = read_model(DATA / "sentencepiece_bpe.model")
    assert model is not None
    backend = build_tokenizer(DATA / "nowhere", model).backend
    special = any(token in text for token in ("<s>", "</s>", "<unk>"))
    assert special or backend.decode(backend.encode(text, add_special_tokens=False).ids) == text.replace("\u2581", " ")


def test_what_the_json_files_say(tmp_path: Path) -> None:
    first = len(read_model(DATA / "sentencepiece_bpe.model").pieces)  # type: ignore[union-attr]
    decoder = {str(first): {"content": "<|im_end|>", "special": True}, str(first + 1): {"content": "<think>"}}
    config = {"added_tokens_decoder": decoder, "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False,
              "chat_template": "{{ messages[0].content }}<|im_end|>"}
    found = load_tokenizer(write(tmp_path / "new", "bpe", tokenizer_config=config))
    assert found.encode("<think>a<|im_end|>")[0] == first + 1 and found.encode("<think>a<|im_end|>")[-1] == first
    assert found.is_special(first) and not found.is_special(first + 1)
    assert found.eos_token_ids == {first} and found.vocab_size == first + 2
    text, ids = found.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=False)
    assert text == "a<|im_end|>" and ids[-1] == first
    old = load_tokenizer(write(tmp_path / "old", "bpe", added_tokens={"<|im_end|>": first, "<think>": first + 1},
                               special_tokens_map={"eos_token": "<|im_end|>"}))
    assert old.encode("<think>a<|im_end|>", False) == found.encode("<think>a<|im_end|>")
    assert old.eos_token_ids == {first}
    (tmp_path / "old" / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    assert load_tokenizer(tmp_path / "old").apply_chat_template([{"role": "user", "content": "a"}])[0] == "[a]"
    (tmp_path / "old" / "additional_chat_templates").mkdir()
    (tmp_path / "old" / "additional_chat_templates" / "tool_use.jinja").write_text(
        "({{ messages[0].content }}, {{ tools[0].function.name }})")
    assert load_tokenizer(tmp_path / "old").apply_chat_template([{"role": "user", "content": "a"}], tools=[
        {"type": "function", "function": {"name": "f"}}])[0] == "(a, f)"


@pytest.mark.parametrize(("files", "text"), [
    ({"added_tokens": {"<x>": 900}}, "the id 900, which does not follow the 500 pieces"),
    ({"added_tokens": {"<x>": "y"}}, "does not follow|damaged"),
    ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "are damaged"),
    ({"tokenizer_config": {"added_tokens_decoder": {"500": {"special": True}}}}, "are damaged"),
])
def test_files_that_contradict_each_other(files: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=text):
        load_tokenizer(write(tmp_path, "bpe", **files))


@given(data=st.data())
def test_damaged_files_do_no_worse_than_an_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = bytearray((DATA / "sentencepiece_bpe.model").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("damaged") / "tokenizer.model"
    file.write_bytes(whole[:data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])
    try:
        model = read_model(file)
        if model is not None:
            build_tokenizer(file.parent, model).backend.encode("the block")
    except CheckpointError:
        pass


@pytest.mark.parametrize("content", [b"", b"IQ== 0\nIg== 1\n", b"\xff" * 100, b"{}"])
def test_other_files_of_that_name_are_left_to_transformers(content: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path, "bpe")
    (folder / "tokenizer.model").write_bytes(content)
    assert read_model(folder / "tokenizer.model") is None
    with pytest.raises(CheckpointError, match="cannot read a tokenizer from"):
        load_tokenizer(folder)
