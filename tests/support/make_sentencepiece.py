"""Write data/sentencepiece_*.model, small SentencePiece models, and data/sentencepiece.json, the ids they give.

    python tests/support/make_sentencepiece.py

It needs the package sentencepiece, which the tests do not. The models are trained on this repository's documents.
"""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "data"
TEXTS = (
    "Hello, world! It's John's.", "  leading and  trailing   ", "def f(x):\n    return x ** 2\n", "tabs\t\tand\u00a0no",
    "Größe, naïve café 日本語 👍", "\uff21\uff22 \ufb01 e\u0301", "", "a", " ", "x" * 50,
    "the block pool and the KV cache", "<tool> hello <tool>x", "\u2581under", "a\u2581b  c",
)
COMMON: dict[str, Any] = {"vocab_size": 500, "byte_fallback": True, "normalization_rule_name": "identity"}
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "remove_extra_whitespaces": False},
    "unigram": {"model_type": "unigram"},
    "tools": {"model_type": "bpe", "remove_extra_whitespaces": False, "add_dummy_prefix": False,
              "user_defined_symbols": ["<tool>", "\u2581\u2581"]},
}


def main() -> None:
    lines = [line for page in sorted((ROOT / "docs").glob("*.md")) for line in page.read_text().splitlines() if line]
    rows = {}
    for name, kind in KINDS.items():
        stream = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=stream, minloglevel=2,
                                                 **COMMON, **kind)
        (FOLDER / f"sentencepiece_{name}.model").write_bytes(stream.getvalue())
        model = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
        rows[name] = [{"text": text, "ids": model.encode(text), "decoded": model.decode(model.encode(text))}
                      for text in TEXTS]
    (FOLDER / "sentencepiece.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
