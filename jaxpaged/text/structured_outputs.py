"""Structured outputs as grammars for llguidance, compiled once before anything is scheduled.

A grammar here is llguidance's JSON text. The compiler's own limits, in fuel, and those on a client's text bound nearly
every compilation. What they miss (several `multipleOf` whose remainders multiply), a server compiles in a process that
it can end.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import LIMITS, Limits, check_at_most
from jaxpaged.core.messages import Grammar
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.loading.host_memory import allocated_bytes

_PARAM = "structured_outputs"

# A model in doubt writes spaces for ever: a run of them is bounded.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}


def grammar_text(wanted: StructuredOutputsParams, limits: Limits) -> str:
    """The grammar of structured outputs, as llguidance's JSON text.

    Raises:
        RequestError: it is too large or malformed.
    """
    try:
        return _to_llguidance(wanted, limits)
    except RequestError:
        raise
    except Exception:  # readers of schemas and grammars raise whatever they trip over
        raise _bad(_reason("")) from None


def _to_llguidance(wanted: StructuredOutputsParams, limits: Limits) -> str:
    from llguidance import LLMatcher, gbnf_to_lark

    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if wanted.json is not None:
        return LLMatcher.grammar_from_json_schema(_schema(wanted.json, limits), overrides=_JSON_OPTIONS)
    if wanted.regex is not None:
        check_at_most(_PARAM, "characters of a regular expression", len(wanted.regex), limits.max_regex_chars)
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        check_at_most(_PARAM, "texts to choose from", len(wanted.choice), limits.max_choices)
        check_at_most(_PARAM, "characters to choose from", sum(map(len, wanted.choice)), limits.max_choices_chars)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(
            json.dumps(text, ensure_ascii=False) for text in wanted.choice))
    assert wanted.grammar is not None
    check_at_most(_PARAM, "characters of a grammar", len(wanted.grammar), limits.max_grammar_chars)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark.any_to_lark(wanted.grammar))
    except Exception:  # whatever a converter and a parser of foreign text may raise: the client gets a 400
        raise _bad("grammar is neither a Lark nor a GBNF grammar") from None


class GrammarCompiler:
    """Compiles grammars to see whether and at what cost they compile. May be used by several threads."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._bytes: Any = None

    def grammar(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of structured outputs, known to compile.

        Raises:
            RequestError: it is malformed, cannot be compiled, takes too much memory, or allows no text.
        """
        text = grammar_text(wanted, self._limits)
        with self._lock:  # one at a time, so that the growth of memory is its own
            return Grammar(text, self._compile(text))

    def _compile(self, text: str) -> int:
        """Compile for a vocabulary of single bytes; the bytes that this takes, about as many as with any other."""
        from llguidance import LLMatcher, LLTokenizer

        if self._bytes is None:
            single = [bytes([byte]) for byte in range(256)]
            self._bytes = LLTokenizer(GrammarVocabulary([*single, b"<end>"], [256], [256]))  # type: ignore[arg-type]
        before = allocated_bytes()
        matcher = LLMatcher(self._bytes, text, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _bad(_reason(matcher.get_error()))
        num_bytes = max(allocated_bytes() - before, len(text))
        check_at_most(_PARAM, "bytes once it is compiled", num_bytes, self._limits.max_grammar_bytes)
        return num_bytes


class GrammarVocabulary:
    """A vocabulary in the form that `LLTokenizer` reads.

    Args:
        tokens: the bytes of each id.
        special: ids without text.
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


def _schema(given: str | Mapping[str, Any], limits: Limits) -> str:
    text = given if isinstance(given, str) else json.dumps(given)
    check_at_most(_PARAM, "characters of a JSON schema", len(text), limits.max_schema_chars)
    check_at_most(_PARAM, "levels of a JSON schema", _depth(text), limits.max_schema_depth)
    try:
        schema = json.loads(text)
    except ValueError:
        raise _bad("the JSON schema is not valid JSON") from None
    if not isinstance(schema, dict):
        raise _bad("the JSON schema must be an object")
    if any(_states(divisor) > limits.max_multiple_of for divisor in _divisors(schema)):
        raise _bad(f"a multipleOf in the JSON schema is too large: it may have at most {limits.max_multiple_of} "
                   "remainders")
    return text


def _divisors(schema: Any) -> Iterator[int | float]:
    """Every number that is a `multipleOf`."""
    for name, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(value, (dict, list)):
            yield from _divisors(value)
        elif name == "multipleOf" and isinstance(value, (int, float)):
            yield value


def _states(divisor: int | float) -> int:
    """Number of remainders, for decimal numbers with as many digits after the point as the divisor."""
    exact = Decimal(repr(divisor)).normalize()
    if not exact.is_finite():
        return 0  # the compiler refuses it
    return int(exact if exact == exact.to_integral_value() else exact.scaleb(-int(exact.as_tuple().exponent)))


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


def _reason(error: str) -> str:
    if error.startswith("Unimplemented keys"):  # the rest of its messages may repeat what the client has sent
        return "the JSON schema uses an unsupported feature: " + error.splitlines()[0][:150]
    return "the schema, regular expression or grammar cannot be compiled: it is invalid, too large or not supported"


def _bad(text: str) -> RequestError:
    return RequestError(text, param=_PARAM)
