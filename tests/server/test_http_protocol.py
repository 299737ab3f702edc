"""What the HTTP layer grants before a request is known, with uvicorn and an application of a few lines."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import uvicorn

from jaxpaged.server.http_protocol import MAX_PIPELINED, HttpBounds, http_protocol

HEAD_BYTES = 2**16
SECONDS = 0.5
CONNECTIONS = 8
ANSWER = b"x" * 2**25  # more than the sockets' buffers hold


class App:
    """Answers /quick and /large at once, the latter with more than sockets buffer, and /slow never; notes bodies."""

    def __init__(self) -> None:
        self.left: list[float] = []
        self.headers: list[Any] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = scope["headers"]
        body = b""
        while scope["method"] == "POST":
            part = await receive()
            if part["type"] == "http.disconnect":
                self.left.append(time.monotonic())
                return
            body += part["body"]
            if not part["more_body"]:
                self.bodies.append(body)
                break
        if scope["path"] == "/slow":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.append(time.monotonic())
            return
        body = ANSWER if scope["path"] == "/large" else b"ok"
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def connect(app: App) -> Iterator[Callable[[bytes], socket.socket]]:
    """Opens a connection to a running server, and sends some bytes."""
    protocol = http_protocol(HttpBounds(max_head_bytes=HEAD_BYTES, head_timeout=SECONDS, write_timeout=SECONDS,
                                        max_connections=CONNECTIONS))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, http=protocol, ws="none", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
        thread.start()

        def connect_one(first: bytes = b"") -> socket.socket:
            found = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
            found.sendall(first)
            return found

        yield connect_one
        stack.close()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def request(path: str, *more: str, method: str = "GET") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "host: x", *more, "", "")).encode()


def read(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            found += data
    return found


def error_of(answer: bytes) -> str:
    message: str = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    return message


@pytest.mark.parametrize("trailers", [b"x-one: " + b"a" * 65529, b"a: b\r\n" * 10923], ids=["one", "many"])
@pytest.mark.parametrize("body", [b"", b"3\r\nabc\r\n"], ids=["empty", "body"])
def test_trailers_are_bounded(connect: Any, app: App, body: bytes, trailers: bytes) -> None:
    before = psutil.Process().memory_info().rss
    connection = connect(request("/quick", "transfer-encoding: chunked") + body + b"0\r\n")
    sent = 0
    with pytest.raises(OSError):
        for _ in range(1000):
            connection.sendall(trailers)
            sent += len(trailers)
    assert sent < 2**25 and psutil.Process().memory_info().rss < before + 2**24
    assert read(connect(request("/quick", "connection: close"))).startswith(b"HTTP/1.1 200")


def test_small_trailers_are_read_and_dropped(connect: Any, app: App) -> None:
    connection = connect(request("/quick", "transfer-encoding: chunked", method="POST"))
    connection.sendall(b"3\r\nabc\r\n0\r\nx-late: 1\r\n\r\n" + request("/quick", "connection: close"))
    assert read(connection).count(b"HTTP/1.1 200 OK") == 2
    assert b"x-late" not in dict(app.headers)


UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAAAAIAAAAB", "Upgrade: h2c")  # Java's client


@pytest.mark.parametrize("pause", [0.0, 0.1])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offered_upgrade_costs_no_body(connect: Any, app: App, pause: float, chunked: bool) -> None:
    size, body = ("transfer-encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n") if chunked else ("content-length: 3", b"abc")
    connection = connect(request("/quick", size, *UPGRADE, method="POST"))
    time.sleep(pause)
    connection.sendall(body + request("/quick", *UPGRADE) + request("/quick", size, *UPGRADE, method="POST") + body)
    connection.sendall(request("/quick", "connection: close, upgrade", "upgrade: websocket"))
    assert read(connection).count(b"HTTP/1.1 200 OK") == 4
    assert app.bodies == [b"abc"] * 2 and {b"upgrade", b"http2-settings"}.isdisjoint(dict(app.headers))
    assert read(connect(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(b"HTTP/1.1 400")
    assert read(connect(request("/quick", *UPGRADE) * 4000)).count(b"HTTP/1.1 200 OK") <= 4000


@pytest.mark.parametrize("rest", [b"zz\r\nabc", b"3\r\nabcd\r\n", b"-1\r\n", b"f" * 17 + b"\r\n"])
def test_a_body_that_is_no_http_is_refused_at_once(connect: Any, app: App, rest: bytes) -> None:
    began = time.monotonic()
    answer = read(connect(request("/quick", "transfer-encoding: chunked", method="POST") + rest))
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1 and "not valid" in error_of(answer)
    assert len(app.left) == 1 and time.monotonic() - began < 3


def test_heads_are_bounded(connect: Any) -> None:
    for head in (b"GET /" + b"a" * 2 * HEAD_BYTES, request("/quick")[:-2] + b"a: b\r\n" * 20000):
        answer = read(connect(head))
        assert answer.startswith(b"HTTP/1.1 400") and "exceed 65536 bytes" in error_of(answer)
    answer = read(connect(b"\x16\x03\x01\x02\x00\x01"))  # TLS
    assert answer.startswith(b"HTTP/1.1 400") and "not valid HTTP" in error_of(answer)


@pytest.mark.parametrize(("first", "second", "answer"), [
    (b"", b"", b""),
    (b"GET /qui", b"", b"HTTP/1.1 408 "),
    (b"\r\n", b"\r\n", b"HTTP/1.1 408 "),
    (request("/quick")[:-2], b"a: b\r\n", b"HTTP/1.1 408 "),  # more bytes buy no more time
    (request("/quick"), b"GET", b"HTTP/1.1 200 OK"),  # nor does an earlier request
])
def test_silent_connections_are_closed(connect: Any, first: bytes, second: bytes, answer: bytes) -> None:
    connection = connect(first)
    time.sleep(0.3 * SECONDS)
    connection.sendall(second)
    began = time.monotonic()
    assert read(connection)[:len(answer)] == answer
    assert time.monotonic() - began < 3 * SECONDS


def test_silent_connections_do_not_shut_others_out(connect: Any) -> None:
    for _ in range(4 * CONNECTIONS):
        connect()
    assert read(connect(request("/quick", "connection: close"))).startswith(b"HTTP/1.1 200")
    with contextlib.ExitStack() as stack:  # requests that run are no silent connections
        for _ in range(CONNECTIONS):
            stack.enter_context(connect(request("/slow")))
        time.sleep(0.1)
        answer = read(connect(request("/quick")))
        assert answer.startswith(b"HTTP/1.1 503") and "--max-connections" in error_of(answer)


@pytest.mark.parametrize("behind", [
    request("/quick"),
    request("/quick") * (2 * MAX_PIPELINED),
    request("/quick", "content-length: 1000000", method="POST") + b"a" * 300_000,
    request("/quick") + b"no HTTP at all\r\n\r\n",
], ids=["one", "many", "large", "garbage"])
def test_what_is_sent_behind_a_request_does_not_hide_that_the_client_has_left(connect: Any, app: App,
                                                                             behind: bytes) -> None:
    connection = connect(request("/slow"))
    time.sleep(0.1)
    connection.sendall(behind)
    time.sleep(2 * SECONDS)
    assert not app.left
    began = time.monotonic()
    connection.close()
    while not app.left:
        assert time.monotonic() - began < 2
        time.sleep(0.01)


def test_pipelined_requests_are_answered_in_order(connect: Any) -> None:
    several = request("/quick") * 3 + request("/none", "connection: close")
    assert read(connect(several)).count(b"HTTP/1.1 200 OK") == 4
    answers = read(connect(request("/quick") * 100))
    assert 1 <= answers.count(b"HTTP/1.1 200 OK") <= 100


def test_a_client_that_does_not_read_is_cut_off(connect: Any) -> None:
    connection = connect(request("/large"))
    time.sleep(4 * SECONDS)
    assert 0 < len(read(connection)) < len(ANSWER)
    reader = connect(request("/large", "connection: close"))
    size = 0
    while data := reader.recv(2**18):  # slow, but it reads
        size += len(data)
        time.sleep(0.008)
    assert size > len(ANSWER)
