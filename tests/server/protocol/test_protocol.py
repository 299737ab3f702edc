"""Request bodies and answer shapes, without a server: OpenAI's own client library reads what is written."""

import json
import logging
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jaxpaged.core.errors import (
    ContextLengthError,
    NotSupportedError,
    OverloadedError,
    RequestError,
)
from jaxpaged.core.limits import LIMITS
from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.server.protocol.answer_shape import AnswerShape, usage
from jaxpaged.server.protocol.body import BodyReader
from jaxpaged.server.protocol.error_answers import error_body, error_status
from jaxpaged.server.protocol.requests import ChatCompletionRequest, CompletionRequest


def read(kind: Any = CompletionRequest, **fields: Any) -> Any:
    return BodyReader().read_body(kind, json.dumps(fields).encode())


def params(kind: Any = CompletionRequest, default: int | None = 16, **fields: Any) -> SamplingParams:
    result = read(kind, **fields).sampling_params(default, {})
    assert isinstance(result, SamplingParams)
    LIMITS.check_params(result)
    return result


# Bodies


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b"{'a':1}",
    b'{"prompt":' + b"[" * 100_000, b'{"seed":' + b"9" * 10_000 + b"}", b'{"user":NaN}',
    b'{"metadata":{"a":[-Infinity]}}',
])
def test_what_is_no_json_object_is_refused_without_repeating_it(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        BodyReader().read_body(CompletionRequest, body)
    assert error_status(caught.value) == 400
    assert "JSON" in caught.value.message and len(caught.value.message) < 200
    assert ("surrogate" in caught.value.message) == (b"ud800" in body)


def test_a_byte_order_mark_is_dropped() -> None:
    assert BodyReader().read_body(CompletionRequest, b'\xef\xbb\xbf{"prompt": "a"}').prompt == "a"


@pytest.mark.parametrize("body", [
    b'{"prompt":[' + b"1," * 4_000_000 + b"1]}", b'{"prompt":[' + b"{}," * 2_500_000 + b"1]}",
    b'{"prompt":' + b"[" * 8_000_000, b'{"prompt":[' + b'"",' * 2_500_000 + b"1]}", b'"' + b'\\"' * 4_000_000,
    b"{" + b",".join(b'"%d":1' % number for number in range(600_000)) + b"}",
], ids=["ids", "objects", "lists", "texts", "escapes", "keys"])
def test_a_body_that_takes_long_to_read_is_refused_at_once(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(RequestError, match="more than") as caught:
        BodyReader().read_body(CompletionRequest, body)
    assert error_status(caught.value) == 400 and time.process_time() - began < 0.5  # it is a tenth of that


@pytest.mark.parametrize("prompt", ['a "quoted" \\ {x: [1, 2]}, ' * 20_000, list(range(200_000)), ["a, b: {"] * 30_000],
                         ids=["text", "ids", "texts"])
def test_large_bodies_of_plain_text_and_ids_are_read(prompt: Any) -> None:
    assert read(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(("field", "value"), [
    ("n", "2"), ("n", True), ("n", 1.5), ("n", 0), ("n", 10**9), ("temperature", "hot"), ("temperature", -1),
    ("temperature", True), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0), ("top_p", 1.1),
    ("top_k", 1.5), ("top_k", "4"), ("top_k", True), ("top_k", -2), ("min_p", -0.1), ("seed", "x"), ("seed", 2**70),
    ("stop", [1]), ("stop", {}), ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 100_000), ("stop", "y" * 10**6),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", [True]), ("max_tokens", 0),
    ("max_tokens", -3), ("max_tokens", "9"), ("max_tokens", 10.5), ("max_tokens", 10**4000),
    ("stream", 1), ("stream", "yes"), ("ignore_eos", 1),
    ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0), ("model", 7),
    ("best_of", 0), ("best_of", 10**9),
    ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1.5": 1}), ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "2"}), ("logit_bias", [1]), ("logit_bias", {"1": float("nan")}), ("logit_bias", {"1": True}),
    ("logit_bias", {str(number): 1 for number in range(2000)}), ("allowed_token_ids", []),
    ("allowed_token_ids", [True]), ("allowed_token_ids", [-1]), ("allowed_token_ids", "1"), ("bad_words", [""]),
    ("bad_words", "x"), ("bad_words", [1]), ("bad_words", ["x"] * 100_000), ("bad_words", ["x" * 10**6]),
    ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", 1.5),
    ("cache_salt", 5), ("cache_salt", ["a"]),
    ("stream_options", 3), ("request_id", ""), ("request_id", "a\nb"), ("request_id", "x" * 1000),
])
def test_a_bad_value_names_its_field_and_is_not_repeated(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        params(prompt="x", **{field: value})
    assert error_status(caught.value) == 400
    assert caught.value.param == field
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(("field", "value"), [
    ("suffix", "x"),
    ("structured_outputs", {"json_object": True, "structural_tag": "a"}),
    ("functions", [{}]),
    ("chat_template", "{{x}}"), ("structural_tag", "{}"), ("thinking_token_budget", 5), ("lora_request", {"name": "a"}),
    ("return_tokens_as_token_ids", True),
])
@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_what_is_known_but_not_supported_is_named(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(NotSupportedError) as caught:
        params(kind, **{field: value})
    assert caught.value.param == field and field in caught.value.message
    assert error_status(caught.value) == 400


@pytest.mark.parametrize("fields", [
    {"suffix": "", "return_tokens_as_token_ids": False}, {"logit_bias": {}}, {"bad_words": []},
    {"use_beam_search": False}, {"response_format": {"type": "text"}}, {"tools": [], "tool_choice": "none"},
    {"best_of": 1}, {"n": 3, "best_of": 3}, {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
    {"min_tokens": 0}, {"length_penalty": 1.0}, {"user": "me", "metadata": {"a": "b"}},
])
def test_values_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert params(**fields) == params(n=fields.get("n", 1))


def test_every_field_may_be_null() -> None:
    for kind in (CompletionRequest, ChatCompletionRequest):
        nothing = dict.fromkeys([*kind.model_fields, "logprobs", "tools", "response_format", "unheard_of"])
        assert params(kind, **nothing) == params(kind)


def test_defaults_and_their_precedence() -> None:
    assert params() == SamplingParams(max_tokens=16, output_kind=RequestOutputKind.DELTA)
    assert params(ChatCompletionRequest, None).max_tokens is None
    assert params(ChatCompletionRequest, None, max_tokens=5, max_completion_tokens=7).max_tokens == 7
    body = read(temperature=0.5)
    found = body.sampling_params(16, {"temperature": 0.1, "top_p": 0.2, "max_tokens": 99})
    assert (found.temperature, found.top_p, found.max_tokens) == (0.5, 0.2, 16)
    with pytest.raises(RequestError) as caught:
        read(ChatCompletionRequest, max_completion_tokens=0)
    assert caught.value.param == "max_completion_tokens"


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(RequestError, match="stream"):
        read(stream_options={"include_usage": True})
    assert read(stream=True, stream_options={"include_usage": True}).include_usage
    for options in ({}, None, {"include_usage": False}, {"include_usage": None}, {"unheard_of": 1}):
        assert not read(stream=True, stream_options=options).include_usage
    with pytest.raises(RequestError) as caught:
        read(stream=True, stream_options={"include_usage": "yes"})
    assert caught.value.param == "stream_options"


def test_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reader.read_body(CompletionRequest, b'{"prompt":"x","frobnicate":1,"user":"me","tools":null,"stream":true,'
                                           b'"stream_options":{"include_usage":true,"include_weather":true}}')
            reader.read_body(ChatCompletionRequest, json.dumps({"messages": [
                {"role": "assistant", "content": [{"type": "text", "text": "x", "cache_control": {}}], "refusal": None,
                 "annotations": [], "audio": None, "weight": None, "tool_calls": [
                     {"id": "a", "type": "function", "index": 0, "extra": 1,
                      "function": {"name": "f", "arguments": "{}", "strict": True}}]}] * 2}).encode())
        for number in range(1000):
            reader.read_body(CompletionRequest, b'{"field%d": 1}' % number)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("frobnicate" in line for line in lines) == 1
    for name in ("stream_options.include_weather", "messages[].annotations", "messages[].content[].cache_control",
                 "messages[].tool_calls[].extra", "messages[].tool_calls[].function.strict"):
        assert sum(f"'{name}'" in line for line in lines) == 1, name
    assert not any("refusal" in line or "audio" in line or "weight" in line for line in lines)
    assert len(lines) <= 100


# Errors


@pytest.mark.parametrize(("error", "status", "code", "kind"), [
    (RequestError("m", param="p"), 400, None, "invalid_request_error"),
    (ContextLengthError("m", param="p"), 400, "context_length_exceeded", "invalid_request_error"),
    (RequestError("m", param="model", code="model_not_found"), 404, "model_not_found", "invalid_request_error"),
    (OverloadedError("m"), 503, None, "overloaded_error"),
])
def test_error_objects(error: RequestError, status: int, code: str | None, kind: str) -> None:
    assert error_status(error) == status
    assert json.loads(error_body(error)) == {
        "error": {"message": "m", "type": kind, "param": error.param, "code": code}}


# Answers


def shape(chat: bool, choices: int = 2, token_ids: bool = False) -> AnswerShape:
    return AnswerShape(chat=chat, answer_id='i"d', created=7, model="mö/del", num_choices=choices, token_ids=token_ids)


def events(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n\n")
    parts = text.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@given(st.text())
def test_any_text_survives_a_chunk(text: str) -> None:
    new = CompletionOutput(0, text, ())
    chat, plain = shape(True).text_chunk(1, new), shape(False).text_chunk(1, new)
    if not text:
        assert chat == plain == ""
        return
    chunk = ChatCompletionChunk.model_validate(events(chat)[0], strict=True)
    assert (chunk.choices[0].index, chunk.choices[0].delta.content) == (1, text)
    assert chunk.choices[0].delta.role is None and chunk.choices[0].finish_reason is None
    assert (chunk.id, chunk.created, chunk.model, chunk.object) == ('i"d', 7, "mö/del", "chat.completion.chunk")
    assert events(plain)[0]["choices"] == [{"index": 1, "text": text, "logprobs": None, "finish_reason": None}]
    assert events(plain)[0]["object"] == "text_completion"


def test_first_last_and_usage_chunks() -> None:
    first = ChatCompletionChunk.model_validate(events(shape(True).first_chunk(0, (1, 2)))[0], strict=True)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert shape(False).first_chunk(0, (1, 2)) == ""
    last = events(shape(True).last_chunk(1, "stop", "END"))[0]["choices"][0]
    assert last == {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    last = events(shape(False).last_chunk(0, "length", None))[0]["choices"][0]
    assert last == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    chunk = ChatCompletionChunk.model_validate(events(shape(True).usage_chunk(usage(3, 4, 2)))[0], strict=True)
    assert chunk.choices == [] and chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens) == (3, 4, 7)
    assert chunk.usage.prompt_tokens_details is not None and chunk.usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_on_request(chat: bool) -> None:
    """As in vLLM, the prompt's belong to a chat as a whole, and to each choice of a completion."""
    wanted = shape(chat, token_ids=True)
    [first] = events(wanted.with_usage(wanted.first_chunk(1, (1, 2)), usage(2, 0, 0)))
    holder = first if chat else first["choices"][0]
    assert holder["prompt_token_ids"] == [1, 2] and first["usage"]["prompt_tokens"] == 2
    assert "prompt_token_ids" not in (first["choices"][0] if chat else first)
    assert events(wanted.text_chunk(1, CompletionOutput(0, "", (5, 6))))[0]["choices"][0]["token_ids"] == [5, 6]
    output = RequestOutput("a", None, (1, 2), (CompletionOutput(0, "x", (3,), finish_reason="stop"),), True)
    answer = json.loads(b"".join(wanted.whole([output], usage(2, 1, 0))))
    choice = answer["choices"][0]
    assert (answer if chat else choice)["prompt_token_ids"] == [1, 2] and choice["token_ids"] == [3]
    assert "prompt_token_ids" not in (choice if chat else answer)


def test_whole_answers_are_in_prompt_major_order() -> None:
    outputs = [RequestOutput(name, None, (1,), tuple(
        CompletionOutput(choice, f"{name}{choice}", (9,), finish_reason="stop", stop_reason=9) for choice in range(2)),
        True) for name in "ab"]
    answer = Completion.model_validate(json.loads(b"".join(shape(False).whole(outputs, usage(2, 4, 0)))), strict=True)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    whole = b"".join(shape(True).whole(outputs[:1], usage(1, 2, 0)))
    chat = ChatCompletion.model_validate(json.loads(whole), strict=True)
    assert [choice.message.content for choice in chat.choices] == ["a0", "a1"]
    assert chat.choices[0].message.role == "assistant" and chat.choices[0].finish_reason == "stop"


def test_beam_search_in_a_request() -> None:
    body = read(prompt="a", use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping="never")
    params = body.sampling_params(16, {})
    assert params.use_beam_search and (params.n, params.best_of) == (2, 4)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


def test_fields_of_the_other_endpoint_are_not_ignored() -> None:
    for kind, fields in ((CompletionRequest, {"top_logprobs": 2, "max_completion_tokens": 5,
                                              "continue_final_message": True, "chat_template_kwargs": {"a": 1}}),
                         (ChatCompletionRequest, {"echo": True})):
        for name, value in fields.items():
            with pytest.raises(NotSupportedError) as caught:
                read(kind, **{name: value})
            assert caught.value.param == name
            assert read(kind, **{name: None})
