"""The server as its users meet it: the default model, OpenAI's client library, and whatever else comes over HTTP."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.text.tokenizer import Tokenizer
from tests.support.live_server import LiveServer

CONTEXT = 8192
STORY = "Once upon a time"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
EMOJI = [{"role": "user", "content": "Repeat exactly: 🎉🎊 naïve café 你好 🚀"}]


@pytest.fixture(scope="module")
def server(smollm2_server: LiveServer) -> LiveServer:
    return smollm2_server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found


@pytest.fixture(autouse=True)
def still_serving(server: LiveServer) -> Iterator[None]:
    """Whatever a test does, the server keeps serving and frees everything."""
    yield
    server.wait_idle(5)
    assert httpx.get(f"{server.url}/health").status_code == 200


def usage_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Its usage without what the prefix cache gave, which depends on the requests before."""
    return {name: count for name, count in answer["usage"].items() if name != "prompt_tokens_details"}


def read_events(lines: Iterator[str]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with exactly one [DONE]."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_events(response.iter_lines())


def joined(events: list[dict[str, Any]]) -> dict[int, tuple[str, str, Any]]:
    """Choice index -> text, finish reason, stop reason; each choice ends once, and nothing follows its end."""
    found: dict[int, tuple[str, str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            text, finish, _ = found.get(choice["index"], ("", None, None))
            assert finish is None
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = text + new, choice["finish_reason"], choice.get("stop_reason")
    assert all(finish is not None for _, finish, _ in found.values())
    return found


def post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(response: httpx.Response, status: int = 400, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    message: str = body["error"]["message"]
    assert 0 < len(message) < 300
    return message


# What users do


def test_the_client_of_the_articles(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == DEFAULT_MODEL
    assert model.model_dump()["max_model_len"] == CONTEXT
    assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL
    answer = client.completions.create(model=DEFAULT_MODEL, prompt="The capital of France is", max_tokens=8,
                                       temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


def test_chat_with_the_client(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(**arguments)
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in (answer.choices[0].message.content or "")
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant"] + [None] * (len(chunks) - 2)
    assert usage_of(chunks[-1].to_dict()) == usage_of(answer.to_dict())
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": STORY, "max_tokens": 24}),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 40, "stop": [",", " a girl"]}),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 40, "stop": ",", "include_stop_str_in_output": True}),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 12, "stop": "this never comes"}),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 40, "stop": [",", " a"], "min_tokens": 15}),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 40, "stop_token_ids": [28, 30]}),
    ("/v1/completions", {"prompt": [STORY, "The sea is"], "max_tokens": 6, "n": 2}),
    ("/v1/completions", {"prompt": [[504, 3575], [28]], "max_tokens": 6}),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 7, "n": 3}),
    ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 40}),
    ("/v1/chat/completions", {"messages": EMOJI, "max_tokens": 40}),
    ("/v1/chat/completions", {"messages": EMOJI, "max_completion_tokens": 7, "n": 2}),
])
def test_a_stream_has_the_same_text_as_the_whole_answer(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    body = {"temperature": 0, **body}
    whole = post(http, path, **body)
    events = stream(http, path, **body, stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and usage_of(events[-1]) == usage_of(whole)
    assert all("usage" not in event for event in events[:-1])
    assert joined(events[:-1]) == {
        choice["index"]: (choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"],
                          choice["stop_reason"]) for choice in whole["choices"]}
    indices = [choice["index"] for choice in whole["choices"]]
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert indices == list(range(prompts * body.get("n", 1)))
    assert not any("�" in str(event) for event in events)
    assert whole["usage"]["completion_tokens"] >= body.get("min_tokens", 1)
    if body["temperature"] == 0:  # choices of one prompt are equal
        assert len({str(result) for result in joined(events[:-1]).values()}) == prompts
    for plain in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        assert all("usage" not in event for event in stream(
            http, path, **{**body, "max_tokens": 1, "min_tokens": 0, **plain}))


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_a_limit_inside_a_character(http: httpx.Client, limit: int) -> None:
    """These are of four bytes, and of two or three tokens each."""
    body: dict[str, Any] = {"prompt": STORY, "max_tokens": limit, "structured_outputs": {"choice": ["🦜🦢🦩"]}}
    [whole] = post(http, **body)["choices"]
    assert whole["finish_reason"] == "length" and "🦜🦢🦩".startswith(whole["text"].rstrip("\ufffd"))
    events = stream(http, "/v1/completions", **body)
    assert joined(events)[0] == (whole["text"], "length", None)
    assert not any("\ufffd" in event["choices"][0]["text"] for event in events[:-2])  # but for the end, they come whole


def test_a_long_stop_string_holds_nothing_up(http: httpx.Client) -> None:
    events = stream(http, "/v1/completions", prompt=STORY, max_tokens=12, temperature=0, stop=", there" * 500)
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == post(http, prompt=STORY, max_tokens=12, temperature=0)["choices"][0]["text"]
    assert len(texts) > 6 and all(texts[:-1])  # token by token, and no empty chunk but the last


def test_chat_chunks_open_with_the_role_and_close_with_an_empty_delta(http: httpx.Client) -> None:
    events = stream(http, "/v1/chat/completions", messages=QUESTION, max_tokens=5, n=2, temperature=0)
    for index in range(2):
        deltas = [choice["delta"] for event in events for choice in event["choices"] if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])


def test_usage_counts_tokens(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompts = ["Hello, world! 你好", "A"]
    answer = post(http, prompt=prompts, n=2, max_tokens=5, ignore_eos=True, return_token_ids=True)
    expected = sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert answer["usage"] == {"prompt_tokens": expected, "completion_tokens": 20, "total_tokens": expected + 20,
                               "prompt_tokens_details": {"cached_tokens": 0}}
    for choice in answer["choices"]:
        assert choice["text"] == tokenizer.decode(choice["token_ids"])
        assert choice["prompt_token_ids"] == tokenizer.encode(prompts[choice["index"] // 2])


def test_usage_as_it_grows(http: httpx.Client) -> None:
    events = stream(http, "/v1/completions", prompt=STORY, n=2, max_tokens=6, ignore_eos=True, return_token_ids=True,
                    stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 12 and events[-1]["choices"] == []
    tokens = 0
    for event, count in zip(events, counts, strict=True):
        tokens += sum(len(choice.get("token_ids", ())) for choice in event["choices"])
        assert tokens <= count


def test_a_text_and_its_ids_are_the_same_prompt(http: httpx.Client, tokenizer: Tokenizer) -> None:
    by_text = post(http, prompt=STORY, max_tokens=8, temperature=0)
    by_ids = post(http, prompt=tokenizer.encode(STORY), max_tokens=8, temperature=0)
    assert by_text["choices"] == by_ids["choices"] and by_text["usage"] == by_ids["usage"]


def test_a_chat_is_its_rendered_prompt(http: httpx.Client, tokenizer: Tokenizer) -> None:
    _, ids = tokenizer.apply_chat_template(QUESTION)
    chat = post(http, "/v1/chat/completions", messages=QUESTION, max_tokens=12, temperature=0)
    plain = post(http, prompt=ids, max_tokens=12, temperature=0)
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    again = post(http, "/v1/chat/completions", messages=parts, max_tokens=12, temperature=0)
    assert again["choices"] == chat["choices"]


def test_defaults_of_max_tokens(http: httpx.Client) -> None:
    assert post(http, prompt=STORY, ignore_eos=True)["usage"]["completion_tokens"] == 16
    answer = post(http, "/v1/chat/completions", messages=QUESTION, temperature=0)  # until the model ends
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert all(event["choices"][0]["finish_reason"] != "" for event in stream(http, "/v1/completions", prompt=STORY))


def test_null_is_absent(http: httpx.Client) -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("temperature", "n", "stop", "stream", "seed", "logprobs", "suffix", "best_of", "user"))
    assert post(http, prompt=STORY, max_tokens=2, **nothing)["usage"]["completion_tokens"] == 2


def test_a_seed_gives_the_same_text_again(http: httpx.Client) -> None:
    texts = [[choice["text"] for choice in post(http, prompt=STORY, max_tokens=12, n=3, seed=seed)["choices"]]
             for seed in (1, 1, 2, None, None)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3 and texts[3] != texts[4]


def test_many_streams_at_once_are_each_complete(http: httpx.Client, server: LiveServer, tokenizer: Tokenizer) -> None:
    def run(number: int) -> None:
        events = stream(http, "/v1/completions", prompt=[number + 1000] * (number + 1), max_tokens=10 + number,
                        seed=number, ignore_eos=True, stream_options={"include_usage": True}, return_token_ids=True)
        ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
        assert events[-1]["usage"]["completion_tokens"] == len(ids) == 10 + number
        assert events[-1]["usage"]["prompt_tokens"] == number + 1
        assert joined(events)[0][:2] == (tokenizer.decode(ids), "length")

    with ThreadPoolExecutor(24) as threads:
        list(threads.map(run, range(24)))


# What goes wrong


@pytest.mark.parametrize("body", [
    b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000, '{"prompt": "a"}'.encode("utf-16"),
    '{"prompt": "a"}'.encode("utf-16-le"), b'{"prompt": "a"}{}', b'{"prompt": "a\0"}', b'{"prompt": "\\udfff"}',
], ids=lambda body: body[:20])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_no_json_object(http: httpx.Client, path: str, body: bytes) -> None:
    assert "JSON" in refused(http.post(path, content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(("body", "param"), [
    ({}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"), ({"prompt": ["a", ""]}, "prompt"), ({"prompt": [[]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"), ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [10**6]}, "prompt"), ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"), ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": ["a"] * 2000}, "n"), ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stream": True, "top_k": 1.5}, "top_k"), ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stream_options": {}}, "stream_options"), ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"), ({"prompt": "a", "top_p": "1"}, "top_p"),
])
def test_completion_requests_that_cannot_work(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    refused(http.post("/v1/completions", json=body), param=param)
    refused(http.post("/v1/completions", json={**body, "stream": True} if "stream_options" not in body else body),
            param=param)


@pytest.mark.parametrize("messages", [
    None, [], "hello", [1], [{}], [{"role": 3, "content": "x"}], [{"role": "wizard", "content": "x"}],
    [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
])
def test_chats_that_cannot_work(http: httpx.Client, messages: Any) -> None:
    refused(http.post("/v1/chat/completions", json={"messages": messages}), param="messages")


def test_nothing_that_a_message_names_is_fetched(http: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        refused(http.post("/v1/chat/completions", json={"messages": image}), param="messages")
        post(http, "/v1/chat/completions", messages=[{"role": "user", "content": f"![look]({url})"}], max_tokens=2)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_empty_content_is_fine(http: httpx.Client) -> None:
    post(http, "/v1/chat/completions", messages=[{"role": "user", "content": ""}], max_tokens=1)


def test_context_limits_are_exact(http: httpx.Client) -> None:
    code = "context_length_exceeded"
    for body, param in (({"prompt": [28] * CONTEXT}, "prompt"), ({"prompt": [28] * (CONTEXT + 1)}, "prompt"),
                        ({"prompt": "hello " * 50_000}, "prompt"), ({"prompt": [28], "max_tokens": CONTEXT},
                                                                    "max_tokens")):
        message = refused(http.post("/v1/completions", json={"max_tokens": 1, **body}), param=param, code=code)
        assert str(CONTEXT) in message
    chat = [{"role": "user", "content": "hello " * 50_000}]
    refused(http.post("/v1/chat/completions", json={"messages": chat}), param="messages", code=code)
    response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 7_000_000}]})
    refused(response, param="messages", code=code)
    # as long as it gets: begins, so the numbers are accepted
    with http.stream("POST", "/v1/completions", json={"prompt": [28], "max_tokens": CONTEXT - 1,
                                                      "stream": True}) as response:
        assert response.status_code == 200


def test_models_routes_and_methods(http: httpx.Client) -> None:
    body = {"model": "gpt-7", "prompt": "a"}
    assert "gpt-7" not in refused(http.post("/v1/completions", json=body), 404, "model", "model_not_found")
    refused(http.get("/v1/models/gpt-7"), 404, "model", "model_not_found")
    refused(http.get("/nothing/here"), 404)
    refused(http.get("/v1/completions"), 405)
    refused(http.delete("/v1/models"), 405)
    refused(http.post("/v1/completions", content=b"a=b", headers={"content-type": "text/plain"}), 415)
    refused(http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"}), 415)
    assert "--enable-reset-prefix-cache" in refused(http.post("/reset_prefix_cache"))
    assert "--enable-embeddings" in refused(http.post("/v1/embeddings", json={"input": "a"}))
    assert http.get("/ping").status_code == http.head("/health").status_code == 200
    assert http.get("/version").json() == {"version": "0.1.0"}
    assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]
    assert http.get("/docs").status_code == 200


def test_tokens_and_text(http: httpx.Client, tokenizer: Tokenizer) -> None:
    for text in (STORY, "naïve café 你好 🚀 <|im_end|>", "", "word " * 9000):  # more than the context, too
        answer = post(http, "/tokenize", prompt=text, return_token_strs=True)
        ids = tokenizer.encode(text)
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), CONTEXT)
        assert post(http, "/detokenize", tokens=ids) == {"prompt": text}
        if text.isascii():
            assert "".join(answer["token_strs"]) == text
    for opens, continues in ((True, False), (False, False), (False, True)):
        _, ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=opens, continue_final_message=continues)
        assert post(http, "/tokenize", messages=QUESTION, add_generation_prompt=opens,
                    continue_final_message=continues)["tokens"] == ids
    for path, body, param in (
            ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": QUESTION}, "prompt"),
            ("/tokenize", {"prompt": 3}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"messages": QUESTION, "tools": [3]}, "tools"),
            ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": [49152]}, "tokens"),
            ("/detokenize", {"tokens": [True]}, "tokens")):
        refused(http.post(path, json=body), param=param)
    refused(http.post("/tokenize", json={"prompt": "a", "model": "gpt-7"}), 404, "model", "model_not_found")
    refused(http.post("/tokenize", json={"prompt": "x" * 1_000_000}), 400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": STORY + " there was a cat. " * 2000}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 9000}]}),
])
def test_a_truncated_prompt_is_its_last_tokens(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    ids = post(http, "/tokenize", **body)["tokens"]
    assert len(ids) > CONTEXT
    answer = post(http, path, **body, truncate_prompt_tokens=50, max_tokens=6, temperature=0, return_token_ids=True)
    holder = answer if "chat" in path else answer["choices"][0]
    assert holder["prompt_token_ids"] == ids[-50:] and answer["usage"]["prompt_tokens"] == 50
    plain = post(http, prompt=ids[-50:], max_tokens=6, temperature=0, return_token_ids=True)
    assert plain["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    for bad in (0, -2, CONTEXT, "5", 1.5, True):
        refused(http.post(path, json={**body, "truncate_prompt_tokens": bad}), param="truncate_prompt_tokens")


def test_large_bodies_are_refused_early(server: LiveServer, http: httpx.Client) -> None:
    limit = 8 * 2**20

    def endless() -> Iterator[bytes]:
        for _ in range(3 * limit // 65536):
            yield b" " * 65536

    refused(http.post("/v1/completions", content=endless(), headers={"content-type": "application/json"}), 413)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:  # announced, never sent
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    b"content-length: 99999999999\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
    with socket.create_connection((host, int(port)), timeout=10) as raw, pytest.raises(OSError):
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        while True:  # a head without end
            raw.sendall(b"x: " + b"y" * 1000 + b"\r\n")
            time.sleep(0.0005)


def test_megabytes_leave_others_quick(server: LiveServer, http: httpx.Client) -> None:
    large = [json.dumps({"prompt": "word " * 1_500_000}), json.dumps({"prompt": [7] * 2_500_000}),
             json.dumps({"messages": [{"role": "user", "content": "word " * 1_500_000}]}),
             json.dumps(dict.fromkeys(map(str, range(500_000))))]
    slowest = 0.0
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(httpx.post, f"{server.url}/v1/{'chat/' * ('messages' in body)}completions",
                                  content=body, headers={"content-type": "application/json"}, timeout=60)
                   for body in large * 2]
        while not all(answer.done() for answer in answers):
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    assert all(answer.result().status_code == 400 for answer in answers)
    assert slowest < 2, "the event loop was held up"  # a few tenths, with the clients on the same cores


def test_request_ids(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "my-id"})
    assert response.headers["x-request-id"] == "my-id" and response.json()["id"] == "cmpl-my-id"
    assert "x-request-id" not in http.get("/health").headers
    assert http.get("/nothing", headers={"X-Request-Id": "other"}).headers["x-request-id"] == "other"
    body = {"messages": QUESTION, "max_tokens": 1, "request_id": "mine"}
    ids = []
    with ThreadPoolExecutor(4) as threads:  # the same id at the same time is no trouble
        for answer in threads.map(lambda _: http.post("/v1/chat/completions", json=body), range(4)):
            ids.append(answer.json()["id"])
    assert ids == ["chatcmpl-mine"] * 4


# Clients that leave


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.02, 0.5])
def test_a_client_that_leaves_stops_its_requests(server: LiveServer, streamed: bool, after: float) -> None:
    before = server.metrics()
    body = json.dumps({"prompt": [[28] * 100, [30]], "n": 2, "max_tokens": 4000, "ignore_eos": True,
                       "stream": streamed}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n" % len(body) + body)
        time.sleep(after)
        if after > 0.1:
            server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 4, 10)
    time.sleep(0.1)  # the server may not have read the request yet
    server.wait_idle(5)  # the steps under way are finished first; on a busy machine they take a while
    after_all = server.metrics()
    aborted = "vllm:request_success_total abort"
    assert after_all[aborted] - before[aborted] in ((0, 2) if after < 0.1 else (2,))


def test_clients_that_leave_do_not_disturb_others(server: LiveServer, http: httpx.Client) -> None:
    alone = post(http, prompt=STORY, max_tokens=30, temperature=0)

    def leave(number: int) -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={
                "prompt": [number + 500] * 20, "max_tokens": 1000, "stream": True}, timeout=60) as response:
            for _, _ in zip(response.iter_lines(), range(number), strict=False):
                pass

    leavers = [threading.Thread(target=leave, args=(number,)) for number in range(8)]
    for thread in leavers:
        thread.start()
    events = stream(http, "/v1/completions", prompt=STORY, max_tokens=30, temperature=0,
                    stream_options={"include_usage": True})
    for thread in leavers:
        thread.join()
    assert events[-1]["usage"] == alone["usage"]
    # the text may differ from a near-tie on; how it begins does not
    assert joined(events)[0][0][:10] == alone["choices"][0]["text"][:10]


# What operators read


def test_metrics_agree_with_usage(server: LiveServer, http: httpx.Client) -> None:
    response = http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["vllm:generation_tokens"].type == "counter"
    assert families["vllm:cache_config_info"].samples[0].labels["block_size"] == "16"
    assert all(sample.labels["model_name"] == DEFAULT_MODEL for name in families if name.startswith("vllm:")
               for sample in families[name].samples)
    before = server.metrics()
    usages = [post(http, prompt=["a", "b c d"], n=2, max_tokens=7, ignore_eos=True)["usage"],
              post(http, prompt=STORY, stop=",", max_tokens=40, temperature=0)["usage"]]
    events = stream(http, "/v1/completions", prompt=STORY, max_tokens=3, stream_options={"include_usage": True})
    usages.append(events[-1]["usage"])
    after = server.metrics()

    def gained(name: str) -> float:
        return after[name] - before[name]

    assert gained("vllm:prompt_tokens_total") == sum(item["prompt_tokens"] for item in usages)
    assert gained("vllm:generation_tokens_total") == sum(item["completion_tokens"] for item in usages)
    assert gained("vllm:request_success_total length") == 3 and gained("vllm:request_success_total stop") == 1
    assert gained("vllm:e2e_request_latency_seconds_count") == 4
    assert gained("vllm:time_to_first_token_seconds_count") == 4
    assert gained("vllm:request_params_n_sum") == 6
    assert gained("jaxpaged:compilations_total") == 0
    assert after["vllm:time_per_output_token_seconds_count"] == after["vllm:inter_token_latency_seconds_count"]
    assert all(value >= before[name] for name, value in after.items() if name.endswith(("_total", "_count", "_sum")))


def test_the_log_reports_the_model_and_never_the_text_of_requests(server: LiveServer, http: httpx.Client) -> None:
    post(http, prompt="my secret words", max_tokens=1, frobnicate="another secret")
    refused(http.post("/v1/completions", json={"prompt": "my secret words", "temperature": "top secret"}),
            param="temperature")
    log = server.log
    assert f"loading {DEFAULT_MODEL}" in log and "KV blocks" in log and "programs" in log
    assert log.count("frobnicate") == 1
    assert "secret" not in log
    assert "Traceback" not in log
