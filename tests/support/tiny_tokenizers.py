"""Small tokenizers of the kinds that models have, as GGUF metadata, as wrapped objects and in Hugging Face's files."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxpaged.text.gguf_tokenizer import read_gguf_tokenizer
from jaxpaged.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEMPLATE = ("{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")
_PIECES = ("▁", *"abcdefghijklmnopqrstuvwxyz[]<>/.,!'\né你", "he", "ll", "▁t", "hell", "hello", "▁the", "▁▁", "th",
           "the", "or", "▁w", "▁wor", "ld", "▁world", "▁hello", "▁a", "</", "</s")


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A vocabulary as SentencePiece makes it: word-start markers, byte fallback, scores in place of merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, "<think>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(_PIECES) + [USER_DEFINED]
    scores = [0.0] * 259 + [-float(index) for index in range(len(_PIECES))] + [0.0]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0, "tokenizer.chat_template": TEMPLATE, **more}


def byte_level_metadata(pre: str, **more: Any) -> dict[str, Any]:
    """All bytes, a few merges and one special token."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "12 3", "Ġ w"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), "<|end|>"]
    types = [NORMAL] * (len(tokens) - 1) + [CONTROL]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": len(tokens) - 1, "tokenizer.ggml.eos_token_id": len(tokens) - 1, **more}


def wrap(metadata: dict[str, Any], decoder: decoders.Decoder | None = None) -> Tokenizer:
    """The wrapped tokenizer that the metadata describes, with another decoder if one is given."""
    found = read_gguf_tokenizer(metadata, Path("model.gguf"))
    if decoder is not None:
        found.backend.decoder = decoder
    hf = PreTrainedTokenizerFast(tokenizer_object=found.backend, chat_template=found.chat_template,
                                 **found.special_tokens)
    return Tokenizer(hf, found.end_ids)


def metaspace(metadata: dict[str, Any]) -> Tokenizer:
    """A SentencePiece vocabulary as many tokenizer.json files read and write it, without bytes."""
    found = wrap(metadata, decoders.Metaspace(prepend_scheme="first"))
    found.backend.normalizer = None
    found.backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return found


def wordpiece() -> Tokenizer:
    """A tokenizer whose decoder is of neither common kind: it joins tokens with spaces."""
    words = ["[UNK]", "[SEP]", "a", "walk", "##ing", "##s", "dog", ".", "the"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]"))
