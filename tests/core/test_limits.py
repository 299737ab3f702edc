"""Every limit on what a client may send or ask for is enforced, and its error says what it is."""

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
from jaxpaged.core.limits import LIMITS, Limits
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.frontend.input_processor import InputProcessor
from tests.support.live_server import LiveServer, write_tiny_model

HELLO = [{"role": "user", "content": "Hello"}]
VOCABULARY = 257  # of the tiny model
TEXT = "/v1/completions"
LONG_NAME = "x" * 8000  # makes chunks so long that the system's buffers hold few of them
CHAT = "/v1/chat/completions"


def structured(**wanted: Any) -> dict[str, Any]:
    return {"structured_outputs": wanted}


def nested_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def params(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1, **fields}


# A limit, what the error calls it, and a request just above it.
FIXED: list[tuple[str, str, dict[str, Any]]] = [
    ("max_stop_strings", TEXT, params(stop=["a"] * 65)),
    ("max_stop_string_chars", CHAT, {"messages": HELLO, "stop": "a" * 4097}),
    ("max_stop_token_ids", TEXT, params(stop_token_ids=list(range(1025)))),
    ("max_logit_bias", CHAT, {"messages": HELLO, "logit_bias": {str(token): 1 for token in range(1025)}}),
    ("max_bad_words", TEXT, params(bad_words=["a"] * 129)),
    ("max_bad_word_chars", CHAT, {"messages": HELLO, "bad_words": ["a" * 1025]}),
    ("max_bad_word_tokens", TEXT, params(bad_words=["a" * 17])),
    ("max_cache_salt_chars", TEXT, params(cache_salt="a" * 1025)),
    ("max_messages", CHAT, {"messages": HELLO * (2**14 + 1)}),
    ("max_messages", "/tokenize", {"messages": HELLO * (2**14 + 1)}),
    ("max_schema_chars", TEXT, params(**structured(json={"type": "string", "description": "x" * 2**17}))),
    ("max_schema_depth", CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": nested_schema(65)}}}),
    ("max_schema_levels", TEXT, params(**structured(json={"$ref": "#/$defs/0", "$defs": {
        **{str(level): {"items": {"$ref": f"#/$defs/{level + 1}"}} for level in range(600)}, "600": {}}}))),
    ("max_multiple_of", TEXT, params(**structured(json={"type": "integer", "multipleOf": 100_003}))),
    ("max_regex_chars", TEXT, params(**structured(regex="a" * (2**14 + 1)))),
    ("max_grammar_chars", TEXT, params(**structured(grammar="start: " + '"a" ' * 2**14))),
    ("max_choices", TEXT, params(**structured(choice=[str(number) for number in range(1025)]))),
    ("max_choices_chars", TEXT, params(**structured(choice=["a" * 2**15, "b" * 2**15, "c"]))),
    ("max_body_values", TEXT, params(prompt=[1] * (2**20 + 2))),
    ("max_body_containers", TEXT, params(unknown=[[]] * 2**16)),
    ("max_body_quotes", TEXT, params(prompt='"' * 2**18)),
    ("max_request_id_chars", TEXT, params(request_id="1" * 129)),
    ("max_tools", CHAT, {"messages": HELLO, "tools": [tool(str(number)) for number in range(129)]}),
    ("max_tools", "/tokenize", {"messages": HELLO, "tools": [tool(str(number)) for number in range(129)]}),
    ("max_tool_name_chars", CHAT, {"messages": HELLO, "tools": [tool("a" * 257)]}),
    ("max_detokenize_tokens", "/detokenize", {"tokens": [1] * (2**20 + 1)}),
]
# A flag, its value, and a request just above it.
GIVEN: list[tuple[str, int, str, dict[str, Any]]] = [
    ("max_n", 3, TEXT, params(n=4)),
    ("max_n", 3, TEXT, params(best_of=4)),
    ("max_request_bytes", 2**22, TEXT, params(prompt="a" * 2**22)),
    ("max_waiting_requests", 2, TEXT, params(prompt=["a"] * 7)),
    ("max_waiting_requests", 2, "/v1/embeddings", {"input": ["a"] * 7}),
    ("max_num_seqs", 4, TEXT, params(prompt=["a"] * 3, n=3)),
    ("max_logprobs", VOCABULARY, TEXT, params(logprobs=VOCABULARY + 1)),
    ("max_logprobs", VOCABULARY, TEXT, params(prompt_logprobs=VOCABULARY + 1)),
]
FLAGS = {name: value for name, value, _, _ in GIVEN} | {
    "max_connections": 8, "body_timeout": 1, "keep_alive_timeout": 1}
ELSEWHERE = {"max_head_bytes", "max_unread_tokens",  # below
             "max_allowed_token_ids",  # below: a body with that number of ids holds too many values
             "max_grammar_bytes", "max_grammar_cache_bytes",  # tests/text/test_structured_outputs.py
             "max_template_bytes",  # tests/text/test_chat_template.py
             "max_answer_tokens", "max_answer_logprobs"}  # tests/server/routes/test_large_answers.py


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("limits")
    model = write_tiny_model(folder / "model")
    flags = [part for name, value in FLAGS.items() for part in (flag_of(name), str(value))]
    with LiveServer(folder / "log", str(model), "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "600",
                    "--enable-embeddings", "--served-model-name", "m", LONG_NAME, *flags) as live:
        yield live.wait_ready()


@pytest.mark.parametrize(("name", "path", "fields"), FIXED,
                         ids=[f"{index} {name} {path}" for index, (name, path, _) in enumerate(FIXED)])
def test_each_fixed_limit_is_enforced_and_given_in_the_error(server: LiveServer, name: str, path: str,
                                                             fields: dict[str, Any]) -> None:
    answer = httpx.post(server.url + path, json=fields, timeout=60)
    assert answer.status_code == 400, answer.text
    assert str(getattr(LIMITS, name)) in answer.json()["error"]["message"]


@pytest.mark.parametrize(("name", "value", "path", "fields"), GIVEN,
                         ids=[f"{index} {name} {path}" for index, (name, _, path, _) in enumerate(GIVEN)])
def test_each_given_limit_is_enforced_and_its_flag_named(server: LiveServer, name: str, value: int, path: str,
                                                           fields: dict[str, Any]) -> None:
    answer = httpx.post(server.url + path, json=fields, timeout=60)
    assert answer.status_code == (413 if name == "max_request_bytes" else 400), answer.text
    message = answer.json()["error"]["message"]
    assert flag_of(name) in message
    assert str(value) in message or name in ("max_num_seqs", "max_waiting_requests")


def test_what_stays_within_all_limits_is_served(server: LiveServer) -> None:
    body = params(n=3, max_tokens=2, stop=["a" * 4096, "b"], stop_token_ids=[1, 2], logit_bias={"1": 1},
                  bad_words=["a" * 15], cache_salt="a" * 1024, request_id="1" * 128, logprobs=20,
                  structured_outputs={"choice": ["abcd", "efghi"]})
    answer = httpx.post(server.url + TEXT, json=body, timeout=60)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 3, answer.text
    chat = {"messages": HELLO * 2, "tools": [tool("a" * 256)], "tool_choice": "none", "max_tokens": 1}
    assert httpx.post(server.url + CHAT, json=chat, timeout=60).status_code == 200


def connect(server: LiveServer, receive_buffer: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.settimeout(30)
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.connect((host, int(port)))
    return raw


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
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * LIMITS.max_head_bytes + end)
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"exceed 65536 bytes" in answer
    assert "x-request-id" not in httpx.get(f"{server.url}/health", headers={"x-request-id": "1" * 129}).headers


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
    body = json.dumps({"model": LONG_NAME, "prompt": "a", "n": 3, "max_tokens": 4000, "ignore_eos": True,
                       "logprobs": VOCABULARY, "stream": True}).encode()
    with connect(server, receive_buffer=4096) as raw:
        raw.sendall(head(len(body)) + body)
        server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 3, 30)
        server.wait_idle(60)  # long before 4000 tokens
        generated = server.metrics()["vllm:generation_tokens_total"]
        answer = read_all(raw)
    assert b"more than 262144 tokens" in answer and answer.rstrip(b"\r\n0").endswith(b"data: [DONE]")
    assert generated < 3 * 1000


def test_more_connections_than_allowed(server: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(server)).sendall(head(100))  # silent ones would make room
        raw = stack.enter_context(connect(server))
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
        assert "--max-connections" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, 10)


def test_every_limit_is_tried() -> None:
    assert {item.name for item in dataclasses.fields(Limits)} == {name for name, _, _ in FIXED} | ELSEWHERE


def test_limits_in_one_process() -> None:
    inputs = InputProcessor(None, max_model_len=20, vocab_size=100,
                            max_n=EngineConfig.from_kwargs(max_n=2).max_n, limits=Limits(max_stop_token_ids=2))
    with pytest.raises(RequestError, match=r"n must be at most 2 \(--max-n\)"):
        inputs.process("r", [5], SamplingParams(n=3))
    by_default = InputProcessor(None, max_model_len=20, vocab_size=100, max_n=EngineConfig().max_n)
    with pytest.raises(RequestError, match=r"best_of must be at most 128 \(--max-n\)"):
        by_default.process("r", [5], SamplingParams(best_of=129))
    with pytest.raises(RequestError, match=r"logprobs must be at most 100 \(--max-logprobs\)"):  # the vocabulary
        InputProcessor(None, max_model_len=20, vocab_size=100, max_logprobs=1000).process(
            "r", [5], SamplingParams(logprobs=101))
    with pytest.raises(RequestError, match="stop_token_ids may hold at most 2 ids"):
        inputs.process("r", [5], SamplingParams(stop_token_ids=[1, 2, 3]))
    assert len(inputs.process("r", [5], SamplingParams(n=2, stop_token_ids=[1, 2])).sequences) == 2
    with pytest.raises(RequestError, match="allowed_token_ids may hold at most 1048576 ids"):
        LIMITS.check_params(SamplingParams(allowed_token_ids=list(range(2**20 + 1))))
