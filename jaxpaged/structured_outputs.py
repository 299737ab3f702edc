"""What a client may ask a text to look like, as a grammar for llguidance, checked before anything is scheduled.

A grammar here is llguidance's JSON text. The compiler's own limits, in fuel, and those on a client's text keep nearly
all of it short; some keywords (`multipleOf` a large number) cost what their value says, so that a server compiles in a
process that it can end.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import StructuredOutputsParams

MAX_SCHEMA_CHARS = 128 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARS = 16 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 64 * 1024
MAX_CHECKED = 256  # grammars that are known to be good

# A model in doubt writes spaces for ever: a run of them has an end.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}


def grammar_of(wanted: StructuredOutputsParams) -> str:
    """The grammar of a constraint.

    Raises:
        RequestError: it is too large, or no text that could be one.
    """
    from llguidance import LLMatcher, gbnf_to_lark

    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if wanted.json is not None:
        return LLMatcher.grammar_from_json_schema(_schema(wanted.json), overrides=_JSON_OPTIONS)
    if wanted.regex is not None:
        _check_length("regex", wanted.regex, MAX_REGEX_CHARS)
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        if len(wanted.choice) > MAX_CHOICES or sum(map(len, wanted.choice)) > MAX_CHOICE_CHARS:
            raise _bad(f"choice must hold at most {MAX_CHOICES} texts of {MAX_CHOICE_CHARS} characters together")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(
            json.dumps(text, ensure_ascii=False) for text in wanted.choice))
    assert wanted.grammar is not None
    _check_length("grammar", wanted.grammar, MAX_GRAMMAR_CHARS)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark.any_to_lark(wanted.grammar))
    except Exception:  # the reader of GBNF raises whatever it trips over
        raise _bad("grammar is neither a Lark nor a GBNF grammar") from None


class GrammarChecker:
    """Compiles grammars to see whether they can be, and remembers the good ones. May be used by several threads."""

    def __init__(self) -> None:
        self._good: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes: Any = None

    def grammar(self, wanted: StructuredOutputsParams) -> str:
        """The grammar of a constraint, known to be good.

        Raises:
            RequestError: there is none, it cannot be compiled, or it allows nothing.
        """
        grammar = grammar_of(wanted)
        self.check(grammar)
        return grammar

    def check(self, grammar: str) -> None:
        """Compile it for a vocabulary of single bytes.

        Raises:
            RequestError: it cannot be compiled, or allows nothing.
        """
        from llguidance import LLMatcher, LLTokenizer

        with self._lock:
            if grammar in self._good:
                self._good.move_to_end(grammar)
                return
            if self._bytes is None:
                single = [bytes([byte]) for byte in range(256)]
                self._bytes = LLTokenizer(Vocabulary([*single, b"<end>"], [256], [256]))  # type: ignore[arg-type]
        matcher = LLMatcher(self._bytes, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _bad(_reason(matcher.get_error()))
        with self._lock:
            self._good[grammar] = None
            while len(self._good) > MAX_CHECKED:
                self._good.popitem(last=False)


class Vocabulary:
    """A vocabulary in the form that `LLTokenizer` reads.

    Args:
        tokens: the bytes of each id.
        special: ids that stand for no text.
        ends: ids that end a text.
        encode: text to ids; without it ids are matched greedily.
    """

    def __init__(self, tokens: list[bytes], special: list[int], ends: list[int], encode: Any = None) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.is_tokenizer_wrapper = True
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text)) if self._encode is not None else list(text.encode())


def _schema(given: str | Mapping[str, Any]) -> str:
    text = given if isinstance(given, str) else json.dumps(given)
    if len(text) > MAX_SCHEMA_CHARS:
        raise _bad(f"the JSON schema must have at most {MAX_SCHEMA_CHARS} characters")
    if _depth(text) > MAX_SCHEMA_DEPTH:
        raise _bad(f"the JSON schema must not be nested deeper than {MAX_SCHEMA_DEPTH}")
    try:
        schema = json.loads(text)
    except ValueError:
        raise _bad("the JSON schema is not valid JSON") from None
    if not isinstance(schema, dict):
        raise _bad("the JSON schema must be an object")
    return text


def _depth(text: str) -> int:
    """An upper bound of the nesting; brackets in strings count, too."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _check_length(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise _bad(f"{name} must have at most {most} characters")


def _reason(error: str) -> str:
    if error.startswith("Unimplemented keys"):  # the rest of its messages may repeat what the client has sent
        return "the JSON schema uses what is not supported: " + error.splitlines()[0][:150]
    return "the schema, regular expression or grammar cannot be compiled: it is invalid, too large or not supported"


def _bad(text: str) -> RequestError:
    return RequestError(text, param="structured_outputs")
