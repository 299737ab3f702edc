"""What every field of every route takes, at its edges: one table, for the tests in process and over HTTP."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.core.limits import LIMITS
from jaxpaged.core.sampling_params import MAX_LENGTH_PENALTY, MAX_SEED, RequestOutputKind
from jaxpaged.frontend.input_processor import MAX_PRIORITY
from jaxpaged.server.protocol.body import Body
from jaxpaged.server.protocol.requests import ChatCompletionRequest, CompletionRequest
from jaxpaged.server.routes.embedding_route import EmbeddingRequest
from jaxpaged.server.routes.token_routes import DetokenizeRequest, TokenizeRequest

# Of the engine that the table is for; the prompts are those of BASE.
CONTEXT, VOCAB, MAX_N, MAX_LOGPROBS = 512, 49152, 8, 20
PROMPT_TOKENS, CHAT_TOKENS = 4, 31
HELLO = [{"role": "user", "content": "Hello"}]
BASE: dict[type[Body], dict[str, Any]] = {
    CompletionRequest: {"prompt": [5] * PROMPT_TOKENS}, ChatCompletionRequest: {"messages": HELLO},
    EmbeddingRequest: {"input": [5] * PROMPT_TOKENS}, TokenizeRequest: {}, DetokenizeRequest: {}}

INF, NAN = float("inf"), float("nan")
MAX_FLOAT = 1.7976931348623157e308
BIG = (2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, 10**400)
ANY: tuple[Any, ...] = (
    {}, {"a": 1}, [], [1], [None], [[]], "", " ", "1", "true", 0, -1, 1, 1.5, True, False, NAN, INF, -INF)


@dataclass(frozen=True)
class Edges:
    """A field's values.

    Attributes:
        good: served.
        bad: refused with an error that names the field.
        needs: other fields of a request with this one.
    """

    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    needs: dict[str, Any] = field(default_factory=dict)


def anything(good: Iterable[Any], bad: Iterable[Any] = (), *, kinds: tuple[type, ...] = (), **needs: Any) -> Edges:
    """A field whose good values are listed; bad are those listed, and others of any kind but `kinds`."""
    good = tuple(good)
    known = set(map(repr, good))
    others = [value for value in ANY if type(value) not in kinds and repr(value) not in known]
    return Edges(good, (*others, *(value for value in bad if repr(value) not in known)), needs)


def whole(low: int, high: int | None, *, good: Iterable[Any] = (), **needs: Any) -> Edges:
    """A whole number from `low` to `high`; None for any above."""
    edges = {low - 1, low, low + 1, 0, -1, 1, -(2**63), -(2**64), -(2**70), *BIG}
    edges |= set() if high is None else {high - 1, high, high + 1}
    fits = {value for value in edges if low <= value and (high is None or value <= high)}
    return anything([*sorted(fits), *good], [*sorted(edges - fits), float(low)], **needs)


def number(low: float, high: float = MAX_FLOAT, *, low_open: bool = False, **needs: Any) -> Edges:
    """A number from `low` to `high`, or above `low`."""
    edges = {low, low - 1e-9, low + 1e-9, low - 1, 0, -0.0, -1, 1, 0.5, 1.5, 5e-324, 1e-38, MAX_FLOAT, 10**400}
    edges |= {high, high + 1e-9, high - 1e-9, high + 1} if high < MAX_FLOAT else set()
    fits = {value for value in edges if low <= value <= high and not (low_open and value == low)}
    others = [value for value in ANY if type(value) not in (int, float)]
    return Edges(tuple(sorted(fits)), (*sorted(edges - fits), *others, NAN, INF, -INF), needs)


def flag(**needs: Any) -> Edges:
    """True or false."""
    return anything([True, False], **needs)


def text(good: Iterable[str], bad: Iterable[Any] = (), **needs: Any) -> Edges:
    """A string."""
    return anything(good, bad, kinds=(str,), **needs)


NOT_IDS: tuple[Any, ...] = ([-1], [2**31], [2**64], [10**400], [1.5], [1.0], [True], ["1"], [None], [[1]], [NAN],
                            [1, INF], {"0": 1})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f"}}
KWARGS: dict[str, Any] = {"good": [{}, {"enable_thinking": False}], "bad": [{"tools": []}, {"messages": []}],
                          "kinds": (dict,)}
COMMON: dict[str, Edges] = {
    "n": whole(1, MAX_N), "best_of": whole(1, MAX_N), "seed": whole(-(2**63), MAX_SEED),
    "max_tokens": whole(1, CONTEXT - PROMPT_TOKENS), "min_tokens": whole(0, 16, max_tokens=16),
    "temperature": number(0), "top_p": number(0, 1, low_open=True), "min_p": number(0, 1), "top_k": whole(-1, None),
    "presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, low_open=True),
    "length_penalty": number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, use_beam_search=True),
    "early_stopping": anything([True, False, "never"], ["Never"], use_beam_search=True),
    "use_beam_search": flag(), "expected_output_tokens": whole(1, None), "prompt_logprobs": whole(0, MAX_LOGPROBS),
    "stop": anything(["a", " ", ["a", " "], []],
                     [[""], ["a", ""], ["a"] * (LIMITS.max_stop_strings + 1), "a" * (LIMITS.max_stop_string_chars + 1)],
                     kinds=(str,)),
    "stop_token_ids": anything([[], [0], [1], [1, 1], [2**31 - 1]],
                               [*NOT_IDS, list(range(LIMITS.max_stop_token_ids + 1))]),
    "allowed_token_ids": anything([[0], [1], [VOCAB - 1]], [*NOT_IDS, [VOCAB]]),
    "bad_words": anything([["a"], [" "], []], [[""], ["a"] * (LIMITS.max_bad_words + 1), ["a b " * 20],
                                               ["a" * (LIMITS.max_bad_word_chars + 1)]]),
    "logit_bias": anything(
        [{}, {"0": -100}, {str(VOCAB - 1): 100}, {"5": 0}, {"5": 5e-324}],
        [{"5": 101}, {"5": -100.5}, {"5": "1"}, {"5": True}, {"5": NAN}, {"5": None}, {"5": 10**400}, {"-1": 1},
         {"1.5": 1}, {"": 1}, {" ": 1}, {str(VOCAB): 1}, {str(2**70): 1}, {"5": [1]},
         {str(token): 1 for token in range(LIMITS.max_logit_bias + 1)}]),
    "ignore_eos": flag(), "skip_special_tokens": flag(), "spaces_between_special_tokens": flag(),
    "include_stop_str_in_output": flag(), "return_token_ids": flag(), "add_special_tokens": flag(), "stream": flag(),
    "stream_options": anything([{}, {"include_usage": True}, {"continuous_usage_stats": False}, {"a": 1}],
                               [{"include_usage": 1}, {"continuous_usage_stats": "yes"}, {"include_usage": NAN}],
                               stream=True),
    "truncate_prompt_tokens": whole(1, CONTEXT - 1, good=[-1]),
    "cache_salt": text(["x", " "], ["", "x" * (LIMITS.max_cache_salt_chars + 1)]),
    "request_id": text(["x", " "], ["", "\n", "x" * (LIMITS.max_request_id_chars + 1)]),
    "priority": whole(-MAX_PRIORITY, MAX_PRIORITY),
    "response_format": anything(
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}],
        [{"type": ""}, {"type": " "}, {"type": 3}, {"type": "structural_tag"}, {"type": "json_schema"},
         {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"schema": 3}}]),
    "structured_outputs": anything(
        [{"regex": "a|b"}, {"choice": ["a"]}, {"json": SCHEMA}, {"json_object": True}, {"grammar": 'start: "a"'}],
        [{"regex": ""}, {"regex": 3}, {"choice": []}, {"choice": "a"}, {"choice": [""]}, {"json": 3}, {"json": ""},
         {"json_object": 1}, {"json_object": False}, {"grammar": " "}, {"structural_tag": "x"},
         {"regex": "a", "choice": ["a"]}]),
    "guided_json": anything([{}, SCHEMA, json.dumps(SCHEMA)], ["{", {"type": "wizard"}, {"type": 3}],
                            kinds=(dict,)),
    "guided_regex": text(["a|b", " "], ["", "(", "a{1000000}", "x" * (LIMITS.max_regex_chars + 1)]),
    "guided_choice": anything([["a"], ["a", " "], [" "]], [[""], ["a"] * (LIMITS.max_choices + 1)]),
    "guided_grammar": text(['start: "a"'], ["", " ", "start: b", "x" * (LIMITS.max_grammar_chars + 1)]),
    "guided_json_object": flag(),
}
MESSAGES: dict[str, Any] = {
    "good": [HELLO, [{"role": "user", "content": ""}], [{"role": "user", "content": " "}]],
    "bad": [[{}], [{"role": "user", "content": "a" * 100_000}], [{"role": "user"}], ["a"],
            [{"role": "", "content": "a"}], [{"role": 1, "content": "a"}],
            [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "text", "text": NAN}]}]]}
TOOLS: dict[str, Any] = {
    "good": [[], [TOOL]],
    "bad": [[{}], [{"type": "function"}], [{"type": "custom", "custom": {"name": "f"}}], [TOOL, TOOL], ["f"], [[TOOL]],
            [{"type": "function", "function": {"name": ""}}],
            [{"type": "function", "function": {"name": "f" * (LIMITS.max_tool_name_chars + 1)}}],
            [{"type": "function", "function": {"name": f"f{number}"}} for number in range(LIMITS.max_tools + 1)]]}
PROMPTS = anything(["a", " ", [0], [1], [VOCAB - 1], ["a", " "], [[0], [1]]],
                   [*NOT_IDS[:7], [VOCAB], [[]], [[VOCAB]], [""], ["a", 1], ["a", ["b"]], "a" * 10**6], kinds=(str,))
NEW_TOKENS = whole(1, CONTEXT - CHAT_TOKENS)
TABLE: dict[type[Body], dict[str, Edges]] = {
    CompletionRequest: COMMON | {"prompt": PROMPTS, "echo": flag(), "logprobs": whole(0, MAX_LOGPROBS)},
    ChatCompletionRequest: COMMON | {
        "messages": anything(**MESSAGES), "logprobs": flag(),
        "top_logprobs": whole(0, MAX_LOGPROBS, logprobs=True),
        "max_completion_tokens": NEW_TOKENS, "max_tokens": NEW_TOKENS, "tools": anything(**TOOLS),
        "parallel_tool_calls": flag(), "include_reasoning": flag(), "add_generation_prompt": flag(),
        "tool_choice": anything(
            ["none", "auto", "required", {"type": "function", "function": {"name": "f"}},
             {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}],
            ["None", {"type": "function"}, {"type": "custom", "custom": {"name": "f"}}, {"type": "allowed_tools"},
             {"type": "function", "function": {"name": "g"}}, {"type": "function", "function": {"name": ""}}],
            tools=[TOOL]),
        "continue_final_message": flag(add_generation_prompt=False), "chat_template_kwargs": anything(**KWARGS)},
    EmbeddingRequest: {
        "input": PROMPTS, "encoding_format": text(["float", "base64"], ["", " ", "int8"]), "normalize": flag(),
        "dimensions": anything([], [2**70]), "pooling": text(["last", "mean"], ["", " ", "max"]),
        "truncate_prompt_tokens": whole(1, CONTEXT - 1, good=[-1]), "add_special_tokens": flag()},
    TokenizeRequest: {
        "prompt": text(["a", " ", ""]), "messages": anything(**MESSAGES), "add_special_tokens": flag(prompt="a"),
        "return_token_strs": flag(prompt="a"), "tools": anything(**TOOLS, messages=HELLO),
        "add_generation_prompt": flag(messages=HELLO),
        "continue_final_message": flag(messages=HELLO, add_generation_prompt=False),
        "chat_template_kwargs": anything(**KWARGS, messages=HELLO)},
    DetokenizeRequest: {
        "tokens": anything([[], [0], [1], [VOCAB - 1]],
                           [*NOT_IDS, [VOCAB], [0] * (LIMITS.max_detokenize_tokens + 1)])},
}
# Fields of SamplingParams that no route has.
IN_PYTHON_ONLY = {"detokenize": flag(), "output_kind": anything(RequestOutputKind)}
