"""How the tokenizers of GGUF files cut text before merging, by the name of their pre-tokenizer.

A file names no regular expression, only the pre-tokenizer; the expressions are those of the models' own tokenizers.
Where there are several, each cuts the pieces that the one before has left.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORD_TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORD_TAIL
_QWEN35 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(contractions: str, digits: str) -> str:
    """Words are cut where lower case changes to upper case."""
    return (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contractions}"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contractions}|{digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
              r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The cased letters that DeepSeek's first tokenizer knows.
_CASED_LETTERS = ("[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d"
                  "\ua790-\uab68\U00010570-\U000105bc\U00010d50-\U00010d8f\U00016e40-\U00016ebf\U0001d400-\U0001d7cb"
                  "\U0001df00-\U0001dfff]]")
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BAILING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
_SEED = _CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut, and what else follows from the name.

    Attributes:
        splits: regular expressions, each applied to the pieces of the one before.
        nfc: characters are composed first.
        ignore_merges: a piece that is a token is taken whole, whatever the merges say.
        add_bos: a BOS token is added, unless the file says otherwise.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer, with bytes spelled as characters."""
        splits = self.splits
        builtin = splits[-1] == _GPT2
        steps: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated")
                            for split in (splits[:-1] if builtin else splits)]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=builtin)])


_PLAIN = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_CUTS = PreTokenizer((_LLAMA3,))
_QWEN2_NFC = PreTokenizer((_QWEN2,), nfc=True)
_QWEN2_CUTS = PreTokenizer((_QWEN2,))
_O200K = PreTokenizer((_GPT4O,))
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
                     "a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en",
                     "jina-v2-es", "jina-v2-de", "jina-v2-code"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b", "mellum2"),
                    _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                     "jina-v5-nano"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_CUTS),
    **dict.fromkeys(("qwen2", "kormo", "f2llmv2"), _QWEN2_NFC),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2_CUTS),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K),
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK),
    "deepseek-llm": PreTokenizer((
        r"[\r\n]", rf"\s?{_CASED_LETTERS}+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$", _ASIAN, r"\p{N}+")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
    "seed-coder": PreTokenizer((_SEED,)),
    "ufakzeka": PreTokenizer((r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORD_TAIL,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "exaone-moe": PreTokenizer((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + _WORD_TAIL),
                             ignore_merges=True),
}


def unnamed_pre_tokenizer(architecture: object, tokens: Collection[str]) -> tuple[str, PreTokenizer]:
    """The pre-tokenizer of a file that names none, as files from before April 2024 do, and why it is that one."""
    if architecture in ("qwen2", "qwen3"):
        return f"the architecture {architecture}", PRE_TOKENIZERS["qwen2"]
    if "<|begin_of_text|>" in tokens and "<|eot_id|>" in tokens:
        return "its tokens, which are Llama 3's", _LLAMA_BPE
    return "nothing, so that it may cut otherwise than the model was trained", _DEFAULT
