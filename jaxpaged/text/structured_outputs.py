"""Structured outputs as grammars for llguidance, compiled once before anything is scheduled.

A grammar here is llguidance's JSON text. The compiler's own limits, in fuel, and those on a client's text bound nearly
every compilation. What they miss (several `multipleOf` whose remainders multiply), a server compiles in a process that
it can end.
"""

import json
import math
import re
import threading
from typing import Any

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import LIMITS, Limits, check_at_most
from jaxpaged.core.messages import Grammar
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.loading.host_memory import allocated_bytes
from jaxpaged.text.grammar_dialects import explain_grammar_error, to_lark
from jaxpaged.text.json_schema import PreparedSchema, prepare_schema
from jaxpaged.text.regex_constructs import translate_regex
from jaxpaged.text.schema_blame import find_blame
from jaxpaged.text.schema_nodes import schema_error

_PARAM = "structured_outputs"
_MAX_DROPPED = 32
_MAX_INT_DIGITS = 400  # beyond any double

# A model in doubt writes spaces for ever: a run of them is bounded.
_WHITE_SPACE = r"[ \n\r\t]{0,20}"
# What a pattern for white space may consist of: classes, groups and repetitions of spaces, tabs and line ends.
_WHITE_SPACE_PATTERN = re.compile(
    r"(?:[ \t\n\r]|\\[ntrs ]|\\x(?:20|09|0[aAdD])|\[(?:[ \t\n\r]|\\[ntrs ]|\\x(?:20|09|0[aAdD]))+\]|\((?:\?:)?|[)|*+?]"
    r"|\{[0-9]+(?:,[0-9]*)?\})*")


def _prepared_schema(wanted: StructuredOutputsParams, limits: Limits) -> PreparedSchema | None:
    """The JSON schema of structured outputs, made ready for the compiler; None for those of another kind."""
    if wanted.json_object:
        schema: dict[str, Any] = {"type": "object"}
    elif wanted.json is None:
        return None
    else:
        schema = _read_schema(wanted.json, limits)
    return prepare_schema(schema, limits, parts=wanted.schema_parts,
                          disable_additional_properties=wanted.disable_additional_properties)


def _json_grammar(wanted: StructuredOutputsParams, prepared: PreparedSchema,
                  root: dict[str, Any] | None = None) -> str:
    from llguidance import LLMatcher

    # With \\u escapes a name could be written in two ways, and so occur twice.
    options: Any = {"json_allowed_escapes": 'nrbtf\\"' + "u" * prepared.needs_escapes,
                    "whitespace_pattern": _white_space(wanted)}
    if wanted.disable_any_whitespace:
        options |= {"whitespace_pattern": None, "whitespace_flexible": False}
    return LLMatcher.grammar_from_json_schema(prepared.root if root is None else root, overrides=options)


def _white_space(wanted: StructuredOutputsParams) -> str:
    pattern = wanted.whitespace_pattern
    if pattern is None:
        return _WHITE_SPACE
    check_at_most(_PARAM, "characters of whitespace_pattern", len(pattern), 256)
    if not _WHITE_SPACE_PATTERN.fullmatch(pattern):
        raise _bad("whitespace_pattern must match nothing but spaces, tabs and line ends, as in [ \\n\\t]*")
    return re.sub(r"\\s", r"[ \\t\\n\\r]", re.sub(r"\[[^\]]*\]", lambda found: found[0].replace(r"\s", r" \t\n\r"),
                                               pattern))


def _text_grammar(wanted: StructuredOutputsParams, limits: Limits) -> str:
    from llguidance import LLMatcher

    if wanted.regex is not None:
        check_at_most(_PARAM, "characters of a regular expression", len(wanted.regex), limits.max_regex_chars)
        pattern, construct = translate_regex(wanted.regex)
        if construct is not None:
            raise _bad(f"the regular expression {wanted.regex[:60]!r} has {construct}, which is not supported")
        return LLMatcher.grammar_from_regex(pattern)
    if wanted.choice is not None:
        check_at_most(_PARAM, "texts to choose from", len(wanted.choice), limits.max_choices)
        check_at_most(_PARAM, "characters to choose from", sum(map(len, wanted.choice)), limits.max_choices_chars)
        if any("\ud800" <= char <= "\udfff" for text in wanted.choice for char in text):
            raise _bad("choice holds an unpaired surrogate, which UTF-8 cannot hold")
        quoted = (json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") for text in wanted.choice)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    assert wanted.grammar is not None
    check_at_most(_PARAM, "characters of a grammar", len(wanted.grammar), limits.max_grammar_chars)
    return LLMatcher.grammar_from_lark(to_lark(wanted.grammar))


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
        try:
            prepared = _prepared_schema(wanted, self._limits)
            with self._lock:  # one at a time, so that the growth of memory is its own
                if prepared is not None:
                    return self._compile_schema(wanted, prepared)
                text = _text_grammar(wanted, self._limits)
                num_bytes, error = self._compile(text)
        except (RequestError, RecursionError):
            raise
        except Exception:  # readers of schemas and grammars raise whatever they trip over
            raise _bad(_REASON) from None
        if error:
            raise _bad(_explain(wanted, error))
        return self._grammar(text, num_bytes)

    def _compile_schema(self, wanted: StructuredOutputsParams, prepared: PreparedSchema) -> Grammar:
        """Compile a schema, without those keywords that do not compile and may be dropped."""
        while True:
            text = _json_grammar(wanted, prepared)
            num_bytes, error = self._compile(text)
            if not error:
                return self._grammar(text, num_bytes, prepared.dropped)
            node, key = find_blame(prepared.root, lambda root: self._compile(_json_grammar(wanted, prepared, root))[1])
            why = next((why for text, why in _WHY.items() if text in error), "is invalid or not supported")
            if key is None:
                raise schema_error("a schema", node.place, why)
            if not node.lenient or "nsatisfiable" in error or key == "$ref" or len(prepared.dropped) > _MAX_DROPPED:
                raise schema_error(key, node.place, why)
            del node[key]
            prepared.dropped.append(key)

    def _grammar(self, text: str, num_bytes: int, dropped: list[str] | None = None) -> Grammar:
        check_at_most(_PARAM, "bytes once it is compiled", num_bytes, self._limits.max_grammar_bytes)
        return Grammar(text, num_bytes, tuple(dict.fromkeys(dropped or ())))

    def _compile(self, text: str) -> tuple[int, str]:
        """Compile for a vocabulary of single bytes.

        Returns:
            The bytes that this takes, about as many as with any other vocabulary, and the error or nothing.
        """
        from llguidance import LLMatcher, LLTokenizer

        if self._bytes is None:
            single = [bytes([byte]) for byte in range(256)]
            self._bytes = LLTokenizer(GrammarVocabulary([*single, b"<end>"], [256], [256]))  # type: ignore[arg-type]
        before = allocated_bytes()
        matcher = LLMatcher(self._bytes, text, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = matcher.get_error() or "unknown" if matcher.is_error() else ""
        return max(allocated_bytes() - before, len(text)), error


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


def _read_schema(given: str | dict[str, Any], limits: Limits) -> dict[str, Any]:
    text = given if isinstance(given, str) else json.dumps(given)
    check_at_most(_PARAM, "characters of a JSON schema", len(text), limits.max_schema_chars)
    check_at_most(_PARAM, "levels of a JSON schema", _depth(text), limits.max_schema_depth)
    try:
        schema = json.loads(text, parse_int=_read_int)
    except ValueError:
        raise _bad("the JSON schema is not valid JSON") from None
    if not isinstance(schema, dict):
        raise _bad("the JSON schema must be an object")
    if r"\ud" in text.lower() or not text.isascii():
        try:
            json.dumps(schema, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _bad("the JSON schema holds an unpaired surrogate, which UTF-8 cannot hold") from None
    return schema


def _read_int(digits: str) -> int | float:
    return int(digits) if len(digits) < _MAX_INT_DIGITS else math.inf


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


# What the compiler says of a schema, and how an error continues that names key and place.
_WHY = {"nsatisfiable": "leaves no value that fits", "circular references": "is circular, with keywords beside it",
        "not disjoint": "may fit a name twice", "min/maxProperties": "cannot be met exactly with optional properties",
        "too large": "is too large", "exceeded": "is too large",
        "lookarounds": "has an assertion inside of a pattern, which is not supported"}
_REASON = "the schema, regular expression or grammar cannot be compiled: it is invalid, too large or not supported"


def _explain(wanted: StructuredOutputsParams, error: str) -> str:
    if wanted.regex is not None:
        why = "an assertion inside of it, which is not supported" if "lookarounds" in error else None
        return f"the regular expression {wanted.regex[:60]!r} " + (
            f"has {why}" if why else "cannot be compiled: it is invalid, too large or not supported")
    if wanted.grammar is not None:
        return explain_grammar_error(error)
    return _REASON


def _bad(text: str) -> RequestError:
    return RequestError(text.encode(errors="replace").decode(), param=_PARAM)
