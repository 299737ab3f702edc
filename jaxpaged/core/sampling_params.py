"""How to sample one request, and the range of each value; `jaxpaged.core.limits` bounds their number and size."""

import enum
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from jaxpaged.core.errors import RequestError

MAX_N = 2**14
MAX_LENGTH_PENALTY = 10
MAX_MAX_TOKENS = 2**63 - 1  # beyond any context; keeps numbers of thousands of digits out of error texts
MAX_SEED = 2**64 - 1
_MAX_FLOAT = sys.float_info.max
# Array sizes of the sampling programs, for each row of the batch.
MAX_BEAM_CANDIDATES = 32  # continuations of each beam
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class RequestOutputKind(enum.Enum):
    """What each output of a running request holds: all output so far, only new output, or nothing until the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A schema inside a JSON schema that is a document of its own: its references start there.

    Args:
        pointer: JSON pointer from the root of the whole schema, such as "/properties/city".
        name: how errors call it.
        strict: it must be met exactly; otherwise keywords that cannot be enforced are dropped, with a line in the log.
    """

    pointer: str
    name: str
    strict: bool = True


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """A constraint on the text; exactly one of the first five fields is set.

    Args:
        json: a JSON schema, as a dict or as text, or a pydantic class that has one.
        regex: a regular expression that the whole text matches.
        choice: the whole text is one of these.
        grammar: a context-free grammar, in Lark's or in GBNF's notation.
        json_object: any JSON object.
        disable_any_whitespace: JSON without white space between its tokens.
        disable_additional_properties: objects whose schema names properties have no others, unless it allows them.
        whitespace_pattern: a regular expression for the white space between the tokens of JSON.
        schema_parts: parts of `json` that are documents of their own.

    Raises:
        RequestError: a wrong type, or none or several of the five; the contents are checked with the request.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    schema_parts: tuple[SchemaPart, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", _schema(self.json))
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _bad_structure("exactly one of json, regex, choice, grammar and json_object must be given")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _bad_structure(f"{name} must be true or false")
        if not isinstance(self.whitespace_pattern, (str, type(None))):
            raise _bad_structure("whitespace_pattern must be a regular expression")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _bad_structure("disable_any_whitespace and whitespace_pattern cannot be combined; leave one out")
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name) not in (None, False) and given[0] not in ("json", "json_object"):
                raise _bad_structure(f"{name} needs json or json_object")
        if self.json is not None and not isinstance(self.json, (str, dict)):
            raise _bad_structure("json must be a JSON schema, as an object or a string")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, type(None))) or getattr(self, name) == "":
                raise _bad_structure(f"{name} must be a string, and not empty")
        if not isinstance(self.json_object, (bool, type(None))):
            raise _bad_structure("json_object must be true or false")
        if self.choice is not None:
            if not isinstance(self.choice, (list, tuple)) or not self.choice or not all(
                    isinstance(item, str) and item for item in self.choice):
                raise _bad_structure("choice must be a list of strings, none of them empty")
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def is_json(self) -> bool:
        """Whether the text is JSON, around which white space means nothing."""
        return self.json is not None or bool(self.json_object)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; names, defaults and ranges are vLLM's.

    Args:
        n: number of choices, at least 1.
        best_of: choices to draw, >= n; the n with the highest cumulative log probability are returned.
        presence_penalty, frequency_penalty: -2 to 2.
        repetition_penalty: > 0; 1 is off.
        temperature: >= 0; 0 is greedy.
        top_p: (0, 1]; smallest set of tokens that holds this much probability.
        top_k: number of most probable tokens to sample from; 0 or -1 for all.
        min_p: [0, 1]; minimum probability of a token, relative to the most probable one.
        seed: same seed, same result, whatever else runs beside it.
        stop: string or strings that end the text; they are not part of it unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the text.
        ignore_eos: continue after the model's end token.
        max_tokens: maximum number of tokens to generate; None for as many as fit, 0 only with prompt_logprobs.
        min_tokens: minimum number of tokens before an end token, stop id or stop string ends the text.
        logprobs, prompt_logprobs: number of alternatives to report per position.
        logit_bias: token id -> -100 to 100, added to its logit; 100 forces the token, -100 bans it.
        allowed_token_ids: the only ids that may be generated.
        bad_words: texts that must not be generated, as the tokenizer encodes them with and without a space before.
        detokenize: False leaves `text` empty and excludes stop strings.
        use_beam_search: the n best of `best_of` beams (n if not given) instead of samples; temperature and the like
            are ignored.
        length_penalty: a beam's score is divided by its length to this power; only with use_beam_search.
        early_stopping: True ends a search at its first `best_of` results, False once no running beam can improve on
            them at its present length, "never" once none can at any length; only with use_beam_search.
        expected_output_tokens: expected length of the output; orders requests under `--scheduling-policy predicted`.
        structured_outputs: constrains the text, which ends when nothing more may follow; also a dict of the fields of
            `StructuredOutputsParams`, a JSON schema as a dict, or a pydantic class.
        output_kind: what each output of a running request holds.

    Raises:
        RequestError: a value out of range; `param` names the field.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    expected_output_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _plain(getattr(self, item.name)))
        _check_int("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, MAX_N)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, math.inf, low_open=True)
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_number("top_p", self.top_p, 0, 1, low_open=True)
        _check_int("top_k", self.top_k, -1, None)
        _check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0 if self.prompt_logprobs is not None else 1, MAX_MAX_TOKENS)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, None)
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed_token_ids(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        _check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError('early_stopping must be true, false or "never"', param="early_stopping")
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(self, name) != neutral and self.use_beam_search is False:
                raise RequestError(f"{name} needs use_beam_search; leave it out", param=name)
        if self.expected_output_tokens is not None:
            _check_int("expected_output_tokens", self.expected_output_tokens, 1, None)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
                     "include_stop_str_in_output", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", param=name)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "structured_outputs", _structured_outputs(self.structured_outputs))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError("output_kind must be a RequestOutputKind", param="output_kind")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; may be empty."""
        return tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether sampling is deterministic; temperatures below 1e-5 count as 0."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def full_sampling(self) -> bool:
        """Whether sampling needs more than the logits and a random number."""
        return self.logprobs is not None or self.has_processors

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the engine; a beam search is one that returns n."""
        return self.n if self.best_of is None or self.use_beam_search else self.best_of

    def for_engine(self) -> "SamplingParams":
        """The parameters for the engine, which reports log probabilities if choices are compared."""
        return replace(self, logprobs=self.logprobs or 0) if self.num_sequences > self.n else self

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far affect sampling."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def has_processors(self) -> bool:
        """Whether anything modifies the logits before sampling."""
        return (self.has_penalties or self.min_tokens > 0 or bool(self.logit_bias) or bool(self.bad_words)
                or self.allowed_token_ids is not None)


def _plain(value: Any) -> Any:
    """Python's number in place of numpy's; anything else as it is."""
    if not isinstance(value, Real) or isinstance(value, (int, float)):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _bad_structure(text: str) -> RequestError:
    return RequestError(text, param="structured_outputs")


def _schema(value: Any) -> Any:
    """The JSON schema of a pydantic class, or a mapping as a dict; anything else as it is."""
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    return dict(value) if isinstance(value, Mapping) else value


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping) and any(kind in value for kind in STRUCTURED_KINDS):
        known = [item.name for item in fields(StructuredOutputsParams)]
        unknown = next((key for key in value if key not in known), None)
        if unknown is not None:
            raise _bad_structure(f"structured_outputs has no field {unknown!r}; its fields are {', '.join(known)}")
        return StructuredOutputsParams(**value)
    if isinstance(value, Mapping) or hasattr(value, "model_json_schema"):
        return StructuredOutputsParams(json=_schema(value))
    raise _bad_structure("structured_outputs must be a StructuredOutputsParams, a dict of its fields, a JSON schema or "
                         "a pydantic class")


def _check_int(name: str, value: object, low: int, high: int | None, param: str | None = None) -> None:
    span = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be {span}", param=param or name)


def _check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False,
                  param: str | None = None) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if good:
        assert isinstance(value, (int, float))
        good = (value > low if low_open else value >= low) and value <= min(high, _MAX_FLOAT)
    if not good:
        minimum = f"greater than {low}" if low_open else f"at least {low}"
        raise RequestError(f"{name} must be a number {minimum}" + (f" and at most {high}" if high < math.inf else ""),
                           param=param or name)


def _stop_strings(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise RequestError("stop must be a string or a list of strings", param="stop")
    if not all(items):
        raise RequestError("stop strings must not be empty", param="stop")
    return tuple(items)


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if hasattr(value, "tolist"):  # an array of numpy or JAX
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} must be a list of token ids", param=name)
    if set(map(type, value)) - {int, bool} and all(isinstance(item, Integral) for item in value):
        value = [item if isinstance(item, bool) else int(item) for item in value]  # numpy's
    # Not one by one: a million ids would block the server's event loop. Not isinstance: True is an int.
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31):
        raise RequestError(f"{name} must be integers from 0 to {2**31 - 1}", param=name)
    return tuple(dict.fromkeys(value))


def _allowed_token_ids(value: object) -> tuple[int, ...] | None:
    ids = _token_ids("allowed_token_ids", value)
    if ids is not None and not ids:
        raise RequestError("allowed_token_ids must not be empty; leave it out to allow all", param="allowed_token_ids")
    return ids


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
    found: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 11:  # all keys of JSON are strings
            key = int(key)
        key, bias = _plain(key), _plain(bias)
        _check_int("a key of logit_bias", key, 0, 2**31 - 1, param="logit_bias")
        _check_number("a value of logit_bias", bias, -100, 100, param="logit_bias")
        found[key] = float(bias)
    return found or None


def _bad_words(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
        raise RequestError("bad_words must be a list of non-empty strings", param="bad_words")
    return tuple(value) or None


def num_beam_candidates(width: int, num_end_ids: int) -> int:
    """Number of continuations to consider, so that `width` remain if the best ones all end."""
    return max(2, 1 + num_end_ids) * width
