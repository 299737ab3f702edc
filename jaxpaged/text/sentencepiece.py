"""A tokenizer from a SentencePiece file, tokenizer.model, of a directory that has no tokenizer.json.

The file is a message of protocol buffers; the few fields that matter here are read by hand, so that neither
sentencepiece nor protobuf is needed.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.json_files import read_json

FILE = "tokenizer.model"
_MAX_BYTES = 1 << 26
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NAMES = ("bos", "eos", "unk", "pad")


@dataclass(slots=True)
class SentencePieceModel:
    """What a file says.

    Attributes:
        pieces: text, score and type of each.
        ids: of the pieces bos, eos, unk and pad; -1: none.
        charsmap: a compiled table of characters to replace.
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    add_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True


def read_model(file: Path) -> SentencePieceModel | None:
    """Read a SentencePiece file; None if it is something else, such as a list of tokens of tiktoken.

    Raises:
        CheckpointError: it cannot be read, or is too large.
    """
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes")
        return _parse(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, IndexError, TypeError, struct.error):
        return None


@dataclass(frozen=True, slots=True)
class SentencePieceTokenizer:
    """The tokenizer of a directory; for the fields see `GgufTokenizer`."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None


def build_tokenizer(folder: Path, model: SentencePieceModel) -> SentencePieceTokenizer:
    """The tokenizer that `model` and the JSON files next to it describe.

    Raises:
        CheckpointError: they contradict each other.
    """
    config, named, added = (_optional_json(folder / f"{name}.json")
                            for name in ("tokenizer_config", "special_tokens_map", "added_tokens"))
    tokens = _added_tokens(config, named, added, folder)
    texts = [text for text, _, _ in model.pieces]
    for number, token in tokens.items():
        if number < len(texts) and token.content not in texts:
            texts[number] = token.content  # a spare piece that a fine-tuned model has given a name
    legacy = config.get("legacy") is not False
    backend = _backend(model, texts, legacy)
    special = {f"{name}_token": text for name in _NAMES
               if (text := _special_token(name, config, named, model, texts)) is not None}
    control = {text for text, (_, _, kind) in zip(texts, model.pieces, strict=True) if kind in (_UNKNOWN, _CONTROL)}
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True)
                                for text in texts if text in control | set(special.values())])
    for number in sorted(tokens):
        token = tokens[number]
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != number:
            raise CheckpointError(f"{folder}: the added token {token.content!r:.64} has the id {number}, which does "
                                  f"not follow the {len(texts)} pieces of {FILE}")
    _add_post_processor(backend, config, special)
    return SentencePieceTokenizer(backend, special, _chat_templates(folder, config.get("chat_template")))


def _chat_templates(folder: Path, configured: Any) -> str | dict[str, str] | None:
    """The chat template, or several by name, from tokenizer_config.json or, instead, from files of their own."""
    files = {"default": folder / "chat_template.jinja",
             **{path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.exists()}
    if not found and isinstance(configured, list):
        found = {item["name"]: item["template"] for item in configured
                 if isinstance(item, dict) and isinstance(item.get("name"), str)
                 and isinstance(item.get("template"), str)}
    elif not found and isinstance(configured, str):
        found = {"default": configured}
    return found if found.keys() - {"default"} else found.get("default")


def _backend(model: SentencePieceModel, texts: list[str], legacy: bool) -> Tokenizer:
    whole = [text for text, (_, _, kind) in zip(texts, model.pieces, strict=True) if kind == _USER_DEFINED]
    unk = model.ids["unk"]
    try:
        if model.kind == _BPE:
            backend = Tokenizer(models.BPE(
                {text: number for number, text in enumerate(texts)}, _merges(model, texts),
                unk_token=texts[unk], fuse_unk=True, byte_fallback=model.byte_fallback, ignore_merges=bool(whole)))
        elif model.kind == _UNIGRAM:
            scored = [(text, score) for text, (_, score, _) in zip(texts, model.pieces, strict=True)]
            backend = Tokenizer(models.Unigram(scored, unk, model.byte_fallback))
        else:
            raise CheckpointError(f"{FILE} is of a kind that is not supported; supported are BPE and unigram")
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{FILE} has an inconsistent vocabulary ({error})") from None
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_prefix and legacy:  # each text between added tokens gets one
        steps.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence([*steps, *[normalizers.Replace(" ", "▁")] * model.escape_spaces])
    cuts: list[Any] = []
    if model.add_prefix and not legacy:  # the first alone
        cuts.append(pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
    if whole:
        pattern = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
        cuts.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), *[decoders.ByteFallback()] * model.byte_fallback, decoders.Fuse(),
        *[decoders.Strip(" ", 1, 0)] * model.add_prefix])
    return backend


def _merges(model: SentencePieceModel, texts: list[str]) -> list[tuple[str, str]]:
    """Each way to make a normal piece of two others, best score first."""
    normal = {text: (score, number) for number, (text, (_, score, kind))
              in enumerate(zip(texts, model.pieces, strict=True)) if kind == _NORMAL}
    found = [(-score, number, text[:cut], text[cut:]) for text, (score, number) in normal.items()
             for cut in range(1, len(text)) if text[:cut] in normal and text[cut:] in normal]
    return [(left, right) for _, _, left, right in sorted(found)]


def _added_tokens(
    config: dict[str, Any], named: dict[str, Any], added: dict[str, Any], folder: Path
) -> dict[int, AddedToken]:
    """The tokens that the JSON files add, by id."""
    try:
        if config.get("added_tokens_decoder"):
            keys = ("single_word", "lstrip", "rstrip", "special")
            return {int(number): AddedToken(item["content"], normalized=False,
                                            **{key: bool(item.get(key)) for key in keys})
                    for number, item in config["added_tokens_decoder"].items()}
        special = {_text(value) for value in named.values()} | {_text(config.get(f"{name}_token")) for name in _NAMES}
        return {int(number): AddedToken(text, normalized=False, special=text in special)
                for text, number in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{folder}: the added tokens in tokenizer_config.json or added_tokens.json are damaged"
                              ) from None


def _special_token(
    name: str, config: dict[str, Any], named: dict[str, Any], model: SentencePieceModel, texts: list[str]
) -> str | None:
    for table in (config, named):
        if f"{name}_token" in table:
            return _text(table[f"{name}_token"])
    number = model.ids[name]
    return texts[number] if 0 <= number < len(texts) else None


def _text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _add_post_processor(backend: Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """BOS unless the files say otherwise, as SentencePiece's models were trained."""
    wanted = {"bos_token": config.get("add_bos_token", True), "eos_token": config.get("add_eos_token", False)}
    bos, eos = ([special[name]] if wanted[name] and name in special else [] for name in ("bos_token", "eos_token"))
    backend.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1",
                                        *(f"{token}:1" for token in eos)],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}])


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            model.pieces.append(_piece(value))
        elif number == 2:
            for key, item in _fields(value):
                if key == 3:
                    model.kind = item
                elif key == 35:
                    model.byte_fallback = bool(item)
                elif key in (40, 41, 42, 43):
                    model.ids[("unk", "bos", "eos", "pad")[key - 40]] = item - (1 << 64) * (item >> 63)
        elif number == 3:
            for key, item in _fields(value):
                if key == 2:
                    model.charsmap = item
                elif key == 3:
                    model.add_prefix = bool(item)
                elif key == 4:
                    model.remove_extra_spaces = bool(item)
                elif key == 5:
                    model.escape_spaces = bool(item)
    if not model.pieces or not 0 <= model.ids["unk"] < len(model.pieces):
        raise ValueError
    return model


def _piece(data: Any) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, _NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = value.decode()
        elif number == 2:
            [score] = struct.unpack("<f", value)
        elif number == 3:
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: an int, or bytes of fixed or given length."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: -1, 5: 4}[kind] if kind in (1, 2, 5) else None
        if size is None:
            raise ValueError
        size = varint() if size < 0 else size
        if size > len(data) - at:
            raise ValueError
        yield key >> 3, data[at:at + size]
        at += size
