"""Parameters of requests over HTTP, on the default model: what a client asks for is what it gets."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import httpx
import pytest

from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.loading.hub import resolve_model
from jaxpaged.server.protocol.body import Body
from jaxpaged.server.protocol.requests import ChatCompletionRequest, CompletionRequest
from jaxpaged.server.routes.token_routes import DetokenizeRequest, TokenizeRequest
from jaxpaged.text.tokenizer import Tokenizer
from tests.server.test_server import post, read_events, refused
from tests.support.live_server import ROOT, LiveServer
from tests.support.parameter_table import BASE, COMMON, TABLE, Edges

STORY = "Once upon a time"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture(scope="module")
def server(smollm2_server: LiveServer) -> LiveServer:
    return smollm2_server


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return read_events(response.iter_lines())


def streamed_logprobs(events: list[dict[str, Any]], index: int = 0) -> dict[str, list[Any]]:
    """The lists of one choice's chunks, one after the other."""
    joined: dict[str, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index and choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    joined.setdefault(name, []).extend(values)
    return joined


# Log probabilities


def test_logprobs_of_a_completion(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"prompt": [STORY, "The sea"], "max_tokens": 12, "temperature": 0, "logprobs": 3, "n": 1}
    answer = post(http, **body, return_token_ids=True)
    events = stream(http, "/v1/completions", **body)
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {12} and len(found) == 4
        assert "".join(found["tokens"]) == choice["text"]
        assert found["tokens"] == [tokenizer.decode([token]) for token in choice["token_ids"]]
        for token, logprob, top, offset in zip(*(found[name] for name in (
                "tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True):
            assert len(top) == 3 and top[token] == logprob == max(top.values()) <= 0
            assert choice["text"][offset:].startswith(token)
        again = streamed_logprobs(events, choice["index"])
        assert again["tokens"] == found["tokens"] and again["text_offset"] == found["text_offset"]
        assert again["token_logprobs"] == pytest.approx(found["token_logprobs"], abs=1e-4)


def test_logprobs_of_a_chat(http: httpx.Client) -> None:
    """The end token is among them; all bytes joined are the text."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Repeat exactly: 🎉 naïve 你好"}],
                            "temperature": 0, "max_tokens": 40, "logprobs": True, "top_logprobs": 20}
    answer = post(http, "/v1/chat/completions", **body)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert bytes(byte for item in content for byte in item["bytes"]).decode(errors="replace") \
        == choice["message"]["content"]
    for item in content:
        values = [other["logprob"] for other in item["top_logprobs"]]
        assert len(values) == 20 and values == sorted(values, reverse=True) and values[0] == item["logprob"]
        assert len({(other["token"], tuple(other["bytes"])) for other in item["top_logprobs"]}) >= 19
    events = stream(http, "/v1/chat/completions", **body)
    again = streamed_logprobs(events)["content"]
    assert [(item["token"], item["bytes"]) for item in again] == [(item["token"], item["bytes"]) for item in content]
    assert [item["logprob"] for item in again] == pytest.approx([item["logprob"] for item in content], abs=1e-4)
    assert post(http, "/v1/chat/completions", **{**body, "top_logprobs": None})["choices"][0]["logprobs"]["content"][0][
        "top_logprobs"] == []


def test_banned_tokens_have_finite_logprobs(http: httpx.Client) -> None:
    found = post(http, prompt=STORY, max_tokens=3, logprobs=5, allowed_token_ids=[28, 30], temperature=0)
    values = [value for top in found["choices"][0]["logprobs"]["top_logprobs"] for value in top.values()]
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize("streamed", [False, True])
def test_echo(http: httpx.Client, tokenizer: Tokenizer, streamed: bool) -> None:
    ids = tokenizer.encode("Hello, world! 你好")
    for max_tokens in (0, 1, 4):
        for prompt in ("Hello, world! 你好", ids):
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "echo": True,
                                    "logprobs": 1, "ignore_eos": True}
            if streamed:
                events = stream(http, "/v1/completions", **body, stream_options={"include_usage": True})
                usage = events.pop()["usage"]
                text = "".join(event["choices"][0]["text"] for event in events)
                found = streamed_logprobs(events)
            else:
                answer = post(http, **body)
                usage, text, found = (answer["usage"], answer["choices"][0]["text"], answer["choices"][0]["logprobs"])
            assert text.startswith("Hello, world! 你好") and (max_tokens > 0 or text == "Hello, world! 你好")
            assert usage["prompt_tokens"] == len(ids) and usage["completion_tokens"] == max_tokens
            assert {len(values) for values in found.values()} == {len(ids) + max_tokens}
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert all(value <= 0 for value in found["token_logprobs"][1:])
            assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0
    plain = post(http, prompt=["a b", "c"], max_tokens=2, echo=True, n=2)
    assert [choice["text"][:1] for choice in plain["choices"]] == ["a", "a", "c", "c"]
    assert all(choice["logprobs"] is None for choice in plain["choices"])
    assert post(http, prompt="a b", max_tokens=0, echo=True)["choices"][0]["text"] == "a b"


def test_prompt_logprobs(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """As vLLM writes them, and the same as those of an echo."""
    echo = post(http, prompt=STORY, max_tokens=1, echo=True, logprobs=2)["choices"][0]["logprobs"]
    found = post(http, prompt=STORY, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    ids = tokenizer.encode(STORY)
    assert found[0] is None and len(found) == len(ids)
    for token, entry, logprob in zip(ids[1:], found[1:], echo["token_logprobs"][1:-1], strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert entry[str(token)]["decoded_token"] == tokenizer.decode([token]) and entry[str(token)]["rank"] >= 1
    chat = post(http, "/v1/chat/completions", messages=QUESTION, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.slow
def test_a_loglikelihood_is_that_of_transformers(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """As evaluation suites ask for it: context and continuation echoed, nothing generated."""
    torch = pytest.importorskip("torch", reason="the reference needs torch")
    from tests.support.reference_model import ReferenceModel

    context, continuation = "The capital of France is", " Paris, and the capital of Germany is Berlin."
    ids = tokenizer.encode(context + continuation)
    skip = len(tokenizer.encode(context))
    found = post(http, prompt=ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    with torch.inference_mode():
        logits = ReferenceModel(resolve_model(DEFAULT_MODEL)).model(torch.tensor([ids])).logits[0].float()
    wanted = torch.log_softmax(logits, dim=-1)[range(len(ids) - 1), ids[1:]].tolist()
    assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
    greedy = (logits[skip - 1 : -1].argmax(dim=-1) == torch.tensor(ids[skip:])).tolist()
    assert [max(top, key=top.get) == token for top, token in zip(
        found["top_logprobs"][skip:], found["tokens"][skip:], strict=True)] == greedy


@pytest.mark.parametrize(("path", "body", "param"), [
    ("completions", {"logprobs": 21}, "logprobs"), ("completions", {"logprobs": -1}, "logprobs"),
    ("completions", {"logprobs": 10**9}, "logprobs"), ("completions", {"prompt_logprobs": 49152}, "prompt_logprobs"),
    ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"), ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"cache_salt": ""}, "cache_salt"), ("chat/completions", {"cache_salt": "x" * 2000}, "cache_salt"),
    ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("completions", {"logit_bias": {"49152": 1}}, "logit_bias"), ("completions", {"allowed_token_ids": [49152]},
                                                                 "allowed_token_ids"),
    ("completions", {"bad_words": ["word " * 40]}, "bad_words"), ("completions", {"min_tokens": 17}, "min_tokens"),
    ("chat/completions", {"top_logprobs": 1}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
])
def test_what_is_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    prompt: dict[str, Any] = {"prompt": "a"} if path == "completions" else {"messages": QUESTION}
    refused(http.post(f"/v1/{path}", json={**prompt, **body}), param=param)


# What changes the logits


def test_biases_and_bans_beside_others(server: LiveServer, http: httpx.Client, tokenizer: Tokenizer) -> None:
    compilations = server.metrics()["jaxpaged:compilations_total"]
    plain = post(http, prompt=STORY, max_tokens=8, temperature=0)["choices"][0]["text"]
    [ban] = tokenizer.encode(",")
    for temperature in (0, 1.5):
        forced = post(http, prompt=STORY, max_tokens=5, temperature=temperature, logit_bias={str(ban): 100})
        assert forced["choices"][0]["text"] == ",,,,,"
        found = post(http, prompt=[STORY] * 3, max_tokens=24, temperature=temperature, logit_bias={str(ban): -100},
                     return_token_ids=True)
        assert all(ban not in choice["token_ids"] for choice in found["choices"])
    words = post(http, prompt=STORY, max_tokens=24, temperature=0, bad_words=["there", "little girl"])
    assert " there" not in words["choices"][0]["text"] and " little girl" not in words["choices"][0]["text"]
    penalized = post(http, prompt=STORY, max_tokens=60, temperature=0, frequency_penalty=2, presence_penalty=2,
                     repetition_penalty=1.5, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    assert len(set(penalized)) > 50
    long = post(http, "/v1/chat/completions", messages=QUESTION, temperature=0, min_tokens=40, max_tokens=60)
    assert long["usage"]["completion_tokens"] >= 40
    assert post(http, prompt=STORY, max_tokens=8, temperature=0)["choices"][0]["text"] == plain
    assert server.metrics()["jaxpaged:compilations_total"] == compilations


# Structured output


CITY: dict[str, Any] = {"type": "object", "additionalProperties": False, "required": ["city", "population"],
                        "properties": {"city": {"type": "string", "maxLength": 20},
                                       "population": {"type": "integer", "minimum": 0, "maximum": 99999999}}}
ABOUT_PARIS = [{"role": "user", "content": "Tell me the city and its population as JSON: Paris has 2 million people."}]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}},
    {"structured_outputs": {"json": CITY}}, {"guided_json": CITY},
], ids=["response_format", "structured_outputs", "guided_json"])
def test_a_schema_is_followed(http: httpx.Client, fields: dict[str, Any], streamed: bool) -> None:
    body = {"messages": ABOUT_PARIS, "temperature": 0, "max_tokens": 80, **fields}
    if streamed:
        events = stream(http, "/v1/chat/completions", **body)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = post(http, "/v1/chat/completions", **body)["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    found = json.loads(text)
    assert reason == "stop" and set(found) == {"city", "population"} and 0 <= found["population"] <= 99999999


def test_other_structures_beside_free_requests(server: LiveServer, http: httpx.Client) -> None:
    compilations = server.metrics()["jaxpaged:compilations_total"]
    free = post(http, prompt=STORY, max_tokens=20, temperature=0)["choices"][0]["text"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"choice": ["Paris", "London"]}}, "Paris|London"),
        ({"structured_outputs": {"regex": "[A-Z][a-z]{3,9}, [0-9]{4}"}}, "[A-Z][a-z]{3,9}, [0-9]{4}"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes|no"),
        ({"guided_choice": ["a", "b"]}, "a|b"),
    ]

    def ask(number: int) -> None:
        if number == len(cases):
            assert post(http, prompt=STORY, max_tokens=20, temperature=0)["choices"][0]["text"][:20] == free[:20]
            return
        fields, pattern = cases[number]
        answer = post(http, "/v1/chat/completions", messages=QUESTION, n=3, seed=1, max_tokens=40, **fields)
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["message"]["content"])

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(ask, range(len(cases) + 1)))
    mode = post(http, "/v1/chat/completions", messages=ABOUT_PARIS, temperature=0, max_tokens=200,
                response_format={"type": "json_object"})["choices"][0]
    if mode["finish_reason"] == "stop":
        assert isinstance(json.loads(mode["message"]["content"]), dict)
    cut = post(http, "/v1/chat/completions", messages=ABOUT_PARIS, max_tokens=2,
               response_format={"type": "json_object"})
    assert cut["choices"][0]["finish_reason"] == "length"
    assert server.metrics()["jaxpaged:compilations_total"] == compilations
    assert "Traceback" not in server.log


@pytest.mark.parametrize(("fields", "param"), [
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "wizard"}}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: what"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"items": {"type": "integer", "multipleOf": 99_999_989}}}}, "structured_outputs"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}}, "response_format"),
])
def test_structures_that_cannot_be_are_refused_before_anything_runs(http: httpx.Client, fields: dict[str, Any],
                                                                    param: str) -> None:
    for streamed in (False, True):
        refused(http.post("/v1/completions", json={"prompt": "a", **fields, "stream": streamed}), param=param)


# Extremes



KINDS: dict[str, type[Body]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest,
                                "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
LONG = "one two three four five six seven eight nine ten " * 4
TOOL_CALL: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}}}], "max_tokens": 40}
FIRST_WORDS = [*QUESTION, {"role": "assistant", "content": "The capital"}]
# Field -> the rest of a request, and two values for the field with different answers.
EFFECTS: dict[str, dict[str, tuple[dict[str, Any], Any, Any]]] = {
    "/v1/completions": {
        "prompt": ({}, "a", STORY), "echo": ({}, False, True), "return_token_ids": ({}, False, True),
        "logprobs": ({}, None, 1), "stream": ({}, False, True),
        "stream_options": ({"stream": True}, {}, {"include_usage": True}),
        "request_id": ({}, "a", "b"), "cache_salt": ({"prompt": LONG}, None, "a"),
        "truncate_prompt_tokens": ({"prompt": LONG}, None, 2),
        **{name: ({}, None, value) for name, value in {
            "response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}, "guided_json": {},
            "guided_regex": "[0-9]", "guided_choice": ["a"], "guided_grammar": 'start: "a"', "guided_json_object": True,
        }.items()}},
    "/v1/chat/completions": {
        "messages": ({}, QUESTION, ABOUT_PARIS), "logprobs": ({}, False, True),
        "top_logprobs": ({"logprobs": True}, 0, 1), "max_completion_tokens": ({}, 1, 2),
        "tool_choice": (TOOL_CALL, "none", "required"),
        "add_generation_prompt": ({}, True, False),
        "continue_final_message": ({"messages": FIRST_WORDS, "add_generation_prompt": False}, False, True)},
    "/tokenize": {
        "prompt": ({}, "a", STORY), "messages": ({}, QUESTION, ABOUT_PARIS),
        "return_token_strs": ({"prompt": "a"}, False, True),
        "add_generation_prompt": ({"messages": QUESTION}, True, False),
        "continue_final_message": ({"messages": FIRST_WORDS, "add_generation_prompt": False}, False, True)},
    "/detokenize": {"tokens": ({}, [5], [6])},
}
# Fields that this server or its model gives no effect, and the tests that show it.
ELSEWHERE = {"priority": "frontend/test_input_processor.py", "add_special_tokens": "server/routes/test_tokenizers.py",
             "include_reasoning": "server/routes/test_chat.py", "parallel_tool_calls": "server/routes/test_chat.py",
             "tools": "server/routes/test_chat.py", "chat_template_kwargs": "server/routes/test_chat.py"}


@pytest.mark.parametrize("path", EFFECTS)
def test_every_field_besides_sampling_has_an_effect(http: httpx.Client, path: str) -> None:
    kind, cases = KINDS[path], EFFECTS[path]
    sampling = {item.name for item in fields(SamplingParams)} - cases.keys()
    shared = COMMON.keys() if kind is ChatCompletionRequest else set()
    known = kind.model_fields.keys() - shared - sampling - {"model"}
    assert known == cases.keys() | (ELSEWHERE.keys() & known), "a field has no case"
    assert all(name in (ROOT / "tests" / file).read_text() for name, file in ELSEWHERE.items())
    few = {"max_tokens": 3, "temperature": 0} if "max_tokens" in kind.model_fields else {}

    def has_effect(name: str) -> bool:
        more, one, other = cases[name]
        body = {**({} if path.endswith("tokenize") else BASE[kind]), **few, **more}
        answers = []
        for value in (one, *[one] * (name == "cache_salt"), other):  # twice, so that the prefix is cached
            answer = http.post(path, json={**body, name: value})
            assert answer.status_code == 200, f"{name}: {answer.text}"
            answers.append(re.sub(r'"created":[0-9]+|cmpl-[0-9a-f]{32}', "", answer.text))
        return answers[-2] != answers[-1]

    with ThreadPoolExecutor(8) as threads:
        assert [name for name, found in zip(cases, threads.map(has_effect, cases), strict=True) if not found] == []


# Of these, the server of this file serves only some values that the table has, or long.
_FIRST_ONLY = {"n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "priority", "tools", "tool_choice"}


def _sample(name: str, edges: Edges) -> list[tuple[bool, Any]]:
    """Of a field's values, the first and last good ones, and bad ones that no server takes."""
    good = [] if name == "priority" else [*edges.good[:1], *([] if name in _FIRST_ONLY else edges.good[-1:])]
    bad = [value for value in edges.bad if not isinstance(value, (int, float)) or not 0 <= value < 2**64]
    return [*((True, value) for value in good), *((False, value) for value in [*bad[:1], *bad[-2:]])]


def test_the_edges_of_every_field_over_http(server: LiveServer, http: httpx.Client) -> None:
    """A sample of the table that tests/server/protocol/test_parameter_edges.py goes through in process."""
    asked = [(path, kind, name, good, value) for path, kind in KINDS.items()
             for name, edges in TABLE[kind].items() if kind is CompletionRequest or name not in COMMON
             for good, value in _sample(name, edges)]

    def ask(path: str, kind: type[Body], name: str, good: bool, value: Any) -> str | None:
        few = {"max_tokens": 1} if "max_tokens" in kind.model_fields else {}
        body = {**BASE[kind], **few, **TABLE[kind][name].needs, name: value}
        answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        if answer.status_code == (200 if good else 400) and (good or answer.json()["error"]["param"] == name):
            return None
        return f"{path} {name} {repr(value)[:60]}: {answer.status_code} {answer.text[:200]}"

    with ThreadPoolExecutor(8) as threads:
        wrong = [line for line in threads.map(lambda item: ask(*item), asked) if line]
    assert not wrong, "\n".join(wrong)
    assert "Traceback" not in server.log


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-38, 5e-324])
def test_temperatures_down_to_nothing_are_greedy(http: httpx.Client, temperature: float) -> None:
    greedy = post(http, prompt=STORY, max_tokens=8, temperature=0)["choices"][0]["text"]
    assert post(http, prompt=STORY, max_tokens=8, temperature=temperature)["choices"][0]["text"] == greedy


@pytest.mark.parametrize("body", [
    {"top_k": 10**9}, {"top_k": 2**40}, {"top_p": 1e-300}, {"min_p": 1}, {"temperature": 1e300},
    {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}, {"seed": -(2**63)}, {"seed": 2**64 - 1},
    {"presence_penalty": -2, "frequency_penalty": -2}, {"logit_bias": {str(token): 100 for token in range(1024)}},
    {"allowed_token_ids": list(range(49152))}, {"stop_token_ids": list(range(1000))}, {"min_p": 0.5, "top_k": 1},
], ids=lambda body: str(body)[:40])
def test_extreme_values_are_served(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = post(http, prompt=STORY, max_tokens=4, logprobs=1, **body)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert all(math.isfinite(value) for value in answer["choices"][0]["logprobs"]["token_logprobs"])
