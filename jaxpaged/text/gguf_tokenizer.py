"""Building a tokenizer from a GGUF file's metadata: tokens, merges or scores, token types, name of the pre-tokenizer.

A GGUF file has no tokenizer.json, only what llama.cpp needs. What follows from the name of the pre-tokenizer alone
is in a table. An unknown name is an error, since a wrong split gives ids that the model was never trained on.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from jaxpaged.core.errors import CheckpointError
from jaxpaged.text.gguf_end_tokens import end_tokens
from jaxpaged.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, unnamed_pre_tokenizer

_log = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# What transformers and the file call the special tokens.
_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer that the metadata describes.

    Attributes:
        backend: the tokenizer, post-processor included.
        special_tokens: bos_token, eos_token, unk_token, pad_token: texts of the ones that the file names.
        chat_template: Jinja source, if the file has one; by name, if it has several.
        end_ids: ids of eos, end of turn and end of message, and of tokens known as such; see `end_tokens`.
    """

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None
    end_ids: frozenset[int]


def read_gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> GgufTokenizer:
    """Build the tokenizer of a GGUF file.

    Args:
        metadata: the file's key-value pairs, arrays as lists.
        path: the file, for error texts.

    Raises:
        CheckpointError: no tokenizer in the file, one of an unknown kind, or damaged entries.
    """
    return _Builder(metadata, path).build()


class _Builder:
    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path

    def build(self) -> GgufTokenizer:
        kind = self._get("model", str)
        if kind is None:
            self._fail("has no tokenizer")
        if kind not in ("gpt2", "llama"):
            self._fail(f"has a tokenizer of the kind {kind!r}; supported are gpt2 and llama")
        self._tokens: list[str] = self._strings("tokens")
        self._types: list[int] = self._get("token_type", list) or [1] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            self._fail(f"has {len(self._tokens)} tokens and {len(self._types)} token types")
        defaults = {"bos": 1, "eos": 2, "unk": 0, "pad": None} if kind == "llama" else dict.fromkeys(_KEYS)
        ids = {f"{name}_token": self._special_id(_KEYS[name], default) for name, default in defaults.items()}
        special = {name: self._tokens[number] for name, number in ids.items() if number is not None}

        try:
            backend, add_bos = self._byte_level() if kind == "gpt2" else self._sentencepiece(special.get("unk_token"))
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exceptions
            self._fail(f"has an inconsistent vocabulary ({error})")
        self._add_tokens(backend, set(special.values()))
        self._add_post_processor(backend, special, add_bos)

        templates = self._chat_templates()
        default = templates.get("default") if isinstance(templates, dict) else templates
        named = [ids["eos_token"], self._special_id("eot", None), self._special_id("eom", None)]
        ends = end_tokens(self._vocabulary(), self._control(set(special.values())), default)
        return GgufTokenizer(backend, special, templates, ends | {number for number in named if number is not None})

    def _chat_templates(self) -> str | dict[str, str] | None:
        """The default template alone, or by name where the file has others: `tokenizer.chat_template.NAME`."""
        key = "tokenizer.chat_template"
        found = {name.removeprefix(f"{key}."): source for name, source in self._metadata.items()
                 if name.startswith(f"{key}.") and isinstance(source, str)}
        default = self._metadata.get(key)
        if isinstance(default, str):
            found["default"] = default
        return found if found.keys() - {"default"} else found.get("default")

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        pre = self._pre_tokenizer()
        backend = Tokenizer(models.BPE(self._vocabulary(), self._merges(), ignore_merges=pre.ignore_merges))
        if pre.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre.build()
        backend.decoder = decoders.ByteLevel()
        return backend, pre.add_bos

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._get("pre", str)
        if name:
            if name not in PRE_TOKENIZERS:
                self._fail(f"names the pre-tokenizer {name!r}; known are {', '.join(PRE_TOKENIZERS)}")
            return PRE_TOKENIZERS[name]
        why, found = unnamed_pre_tokenizer(self._metadata.get("general.architecture"), set(self._tokens))
        _log.warning("%s names no pre-tokenizer; it is chosen by %s (a newer conversion of the model names it)",
                     self._path, why)
        return found

    def _sentencepiece(self, unk_token: str | None) -> tuple[Tokenizer, bool]:
        if "tokenizer.ggml.merges" in self._metadata:
            merges = self._merges()
        else:
            merges = _merges_from_scores(self._tokens, self._types, self._scores())
        backend = Tokenizer(models.BPE(self._vocabulary(), merges, unk_token=unk_token, fuse_unk=True,
                                       byte_fallback=True))
        # As in SentencePiece and llama.cpp, every run of text between special tokens gets the leading space.
        prefix = self._get("add_space_prefix", bool) is not False
        replace = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
        decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(decoding + [decoders.Strip(" ", 1, 0)] * prefix)
        return backend, True

    def _add_tokens(self, backend: Tokenizer, special: set[str]) -> None:
        """Match control and user-defined tokens whole in text; only the former count as special."""
        control, plain = self._control(special), []
        for token, kind in zip(self._tokens, self._types, strict=True):
            if kind == _USER_DEFINED and token not in control:
                plain.append(AddedToken(token, normalized=False, special=False))
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                    for token in self._tokens if token in control])
        backend.add_tokens(plain)

    def _control(self, special: set[str]) -> frozenset[str]:
        """The tokens that are no text."""
        return frozenset(token for token, kind in zip(self._tokens, self._types, strict=True)
                         if kind in (_UNKNOWN, _CONTROL) or token in special)

    def _add_post_processor(self, backend: Tokenizer, special: dict[str, str], add_bos: bool) -> None:
        wanted = {"bos_token": self._get("add_bos_token", bool), "eos_token": self._get("add_eos_token", bool)}
        if wanted["bos_token"] is None:
            wanted["bos_token"] = add_bos
        for name, value in wanted.items():
            if value and name not in special:
                self._fail(f"wants a {name} added and does not name one")
        bos, eos = ([special[name]] if wanted[name] else [] for name in ("bos_token", "eos_token"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1",
                                            *(f"{token}:1" for token in eos)],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}])

    def _vocabulary(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self._tokens)}

    def _merges(self) -> list[tuple[str, str]]:
        pairs = [merge.split(" ", 1) for merge in self._strings("merges")]
        return [(left, right) for left, right in pairs]

    def _scores(self) -> list[float]:
        scores = self._get("scores", list)
        if scores is None or len(scores) != len(self._tokens):
            self._fail("has neither merges nor one score per token")
        return scores

    def _special_id(self, key: str, default: int | None) -> int | None:
        number = self._get(f"{key}_token_id", int)
        number = default if number is None else number
        if number is not None and not 0 <= number < len(self._tokens):
            self._fail(f"has {key}_token_id {number}, outside its {len(self._tokens)} tokens")
        return number

    def _strings(self, key: str) -> list[str]:
        items = self._get(key, list)
        if not items or not isinstance(items[0], str):
            self._fail(f"has no strings in tokenizer.ggml.{key}")
        return items

    def _get(self, key: str, kind: type) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not isinstance(value, kind):
            self._fail(f"has a tokenizer.ggml.{key} of the wrong type")
        return value

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} {what}; name a directory with the model's tokenizer.json by --tokenizer")


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges a SentencePiece vocabulary implies: each way to make a token of two others, best score first.

    Control and byte tokens are never made of others: ordinary text must not yield them.
    """
    known = set(tokens)
    found = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind not in (_UNKNOWN, _CONTROL, _BYTE):
            found += [(score, cut, token) for cut in range(1, len(token))
                      if token[:cut] in known and token[cut:] in known]
    found.sort(key=lambda item: item[:2], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, token in found]
