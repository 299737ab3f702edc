"""Every limit on what a client may send or ask for: documented, a flag, and enforced as it was given."""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import RequestError
from jaxpaged.core.flags import flag_of
from jaxpaged.core.limits import RequestLimits
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.frontend.input_processor import InputProcessor
from jaxpaged.server.protocol.http_limits import HttpLimits
from tests.support.live_server import ROOT, LiveServer, write_tiny_model

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = "/v1/completions"
LONG_NAME = "x" * 8000  # makes chunks so long that the system's buffers hold few of them
CHAT = "/v1/chat/completions"


def structured(**wanted: Any) -> dict[str, Any]:
    return {"structured_outputs": wanted}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# flag, its lowered value, and a request just above it; what the request lacks is filled in.
TABLE: list[tuple[str, int, str, dict[str, Any]]] = [
    ("max_n", 3, TEXT, {"n": 4}),
    ("max_n", 3, TEXT, {"best_of": 4}),
    ("max_stop_strings", 2, TEXT, {"stop": ["a", "b", "c"]}),
    ("max_stop_string_chars", 5, CHAT, {"stop": "abcdef"}),
    ("max_stop_token_ids", 2, TEXT, {"stop_token_ids": [1, 2, 3]}),
    ("max_logit_bias", 1, CHAT, {"logit_bias": {"1": 1, "2": 2}}),
    ("max_allowed_token_ids", 2, TEXT, {"allowed_token_ids": [1, 2, 3]}),
    ("max_bad_words", 1, TEXT, {"bad_words": ["a", "b"]}),
    ("max_bad_word_chars", 6, CHAT, {"bad_words": ["abcdefg"]}),
    ("max_bad_word_tokens", 5, TEXT, {"bad_words": ["abcdef"]}),
    ("max_cache_salt_chars", 4, TEXT, {"cache_salt": "abcde"}),
    ("max_messages", 2, CHAT, {"messages": HELLO * 3}),
    ("max_schema_chars", 99, TEXT, structured(json={"type": "string", "description": "x" * 99})),
    ("max_schema_depth", 3, CHAT, {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"properties": {"a": {"items": {}}}}}}}),
    ("max_multiple_of", 30_000, TEXT, structured(json={"type": "integer", "multipleOf": 30_011})),
    ("max_regex_chars", 9, TEXT, structured(regex="abcdefghij")),
    ("max_grammar_chars", 20, TEXT, structured(grammar='start: "yes" | "no" | "perhaps"')),
    ("max_choices", 2, TEXT, structured(choice=["a", "b", "c"])),
    ("max_choices_chars", 9, TEXT, structured(choice=["abcde", "fghij"])),
    ("max_grammar_bytes", 2**23, TEXT, structured(json={"type": "integer", "multipleOf": 29_989})),
    ("max_request_bytes", 2**14, TEXT, {"prompt": "a" * 2**14}),
    ("max_body_values", 64, TEXT, {"prompt": [1] * 66}),
    ("max_body_containers", 64, TEXT, {"unknown": [[]] * 65}),
    ("max_body_quotes", 128, TEXT, {"prompt": '"' * 128}),
    ("max_request_id_chars", 8, TEXT, {"request_id": "123456789"}),
    ("max_tools", 1, CHAT, {"tools": [tool("a"), tool("b")]}),
    ("max_tool_name_chars", 6, CHAT, {"tools": [tool("abcdefg")]}),
    ("max_tools", 1, "/tokenize", {"messages": HELLO, "tools": [tool("a"), tool("b")]}),
    ("max_messages", 2, "/tokenize", {"messages": HELLO * 3}),
    ("max_detokenize_tokens", 3, "/detokenize", {"tokens": [1, 2, 3, 4]}),
    ("max_waiting_requests", 2, TEXT, {"prompt": ["a"] * 7}),
    ("max_waiting_requests", 2, "/v1/embeddings", {"input": ["a"] * 7}),
    ("max_num_seqs", 4, TEXT, {"prompt": ["a"] * 3, "n": 3}),
    ("max_logprobs", 2, TEXT, {"logprobs": 3}),
    ("max_logprobs", 2, CHAT, {"logprobs": True, "top_logprobs": 3}),
]
FIELDS = {TEXT: {"prompt": "a", "max_tokens": 1}, CHAT: {"messages": HELLO, "max_tokens": 1}}
LOWERED = {name: value for name, value, _, _ in TABLE} | {
    "max_head_bytes": 2048, "max_unread_tokens": 1000, "max_connections": 8, "body_timeout": 1, "keep_alive_timeout": 1}
ELSEWHERE = {"max_grammar_cache_bytes",  # tests/text/test_structured_outputs.py
             "max_template_bytes"}  # tests/text/test_chat_template.py


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("limits")
    model = write_tiny_model(folder / "model")
    flags = [part for name, value in LOWERED.items() for part in (flag_of(name), str(value))]
    with LiveServer(folder / "log", str(model), "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "600",
                    "--enable-embeddings", "--served-model-name", "m", LONG_NAME, *flags) as live:
        yield live.wait_ready()


@pytest.mark.parametrize(("name", "value", "path", "fields"), TABLE,
                         ids=[f"{place} {name} {path}" for place, (name, _, path, _) in enumerate(TABLE)])
def test_a_lowered_limit_is_enforced_and_named(server: LiveServer, name: str, value: int, path: str,
                                               fields: dict[str, Any]) -> None:
    answer = httpx.post(server.url + path, json={**FIELDS.get(path, {}), **fields}, timeout=60)
    assert answer.status_code == (413 if name == "max_request_bytes" else 400), answer.text
    message = answer.json()["error"]["message"]
    assert flag_of(name) in message
    assert str(value) in message or name in ("max_num_seqs", "max_waiting_requests", "max_grammar_bytes")


def test_what_stays_within_all_limits_is_served(server: LiveServer) -> None:
    body = {"prompt": "a", "n": 3, "max_tokens": 2, "stop": ["abcde", "b"], "stop_token_ids": [1, 2],
            "logit_bias": {"1": 1}, "bad_words": ["abcd"], "cache_salt": "abcd", "request_id": "12345678",
            "logprobs": 2, "structured_outputs": {"choice": ["abcd", "efghi"]}}
    answer = httpx.post(server.url + TEXT, json=body, timeout=60)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 3, answer.text
    chat = {"messages": HELLO * 2, "tools": [tool("abcdef")], "tool_choice": "none", "max_tokens": 1}
    assert httpx.post(server.url + CHAT, json=chat, timeout=60).status_code == 200


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head(length: int) -> bytes:
    return (f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
            ).encode()


def read_all(raw: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "complete"])
def test_long_heads(server: LiveServer, end: bytes) -> None:
    with connect(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")  # a connection may be used before
        assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 2048 + end)
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"--max-head-bytes" in answer
    assert "x-request-id" not in httpx.get(f"{server.url}/health", headers={"x-request-id": "123456789"}).headers


def test_slow_bodies_and_idle_connections(server: LiveServer) -> None:
    with connect(server) as raw:
        raw.sendall(head(100) + b'{"prompt"')
        began = time.monotonic()
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"--body-timeout" in answer
        assert time.monotonic() - began < 10
    with connect(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_all(raw).startswith(b"HTTP/1.1 200 ")  # and the connection has ended


def test_a_reader_that_leaves_too_much_unread(server: LiveServer) -> None:
    body = json.dumps({"model": LONG_NAME, "prompt": "a", "n": 3, "max_tokens": 4000, "ignore_eos": True, "logprobs": 2,
                       "stream": True}).encode()
    with connect(server) as raw:
        raw.sendall(head(len(body)) + body)
        server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 3, 30)
        server.wait_idle(60)  # long before 4000 tokens
        generated = server.metrics()["vllm:generation_tokens_total"]
        answer = read_all(raw)
    assert b"--max-unread-tokens" in answer and answer.rstrip(b"\r\n0").endswith(b"data: [DONE]")
    assert generated < 3 * 2000


def test_more_connections_than_allowed(server: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(server))
        raw = stack.enter_context(connect(server))
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
        assert "--max-connections" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, 10)


def test_every_limit_is_tried_and_in_the_readme() -> None:
    names = [item.name for config in (RequestLimits, HttpLimits) for item in dataclasses.fields(config)]
    assert set(names) <= LOWERED.keys() | ELSEWHERE
    text = (ROOT / "README.md").read_text()
    for name in [*names, *LOWERED]:
        assert f"`{flag_of(name)}`" in text, name


def test_limits_in_one_process() -> None:
    limits = EngineConfig.from_kwargs(max_n=2, max_regex_chars=3).limits
    inputs = InputProcessor(None, max_model_len=20, vocab_size=100, kv_capacity=1000, limits=limits)
    with pytest.raises(RequestError, match=r"n may hold at most 2 choices \(--max-n\)"):
        inputs.process("r", [5], SamplingParams(n=3))
    assert len(inputs.process("r", [5], SamplingParams(n=2)).sequences) == 2
