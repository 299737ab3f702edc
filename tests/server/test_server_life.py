"""How the server starts, what operators may restrict, and how it ends: with signals, and when the engine does."""

import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.live_server import ROOT, LiveServer, write_tiny_model

# The same shapes for all, so that only the first one compiles.
SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "600",
         "--served-model-name", "tiny", "alias")
LONG = {"prompt": "abc", "max_tokens": 2500, "ignore_eos": True}
READ_TO_THE_END = 1500  # tokens, for tests that wait for all of them


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Any]:
    servers: list[LiveServer] = []

    def start_one(*arguments: str) -> LiveServer:
        server = LiveServer(tmp_path / f"log{len(servers)}", str(model), *SMALL, "--enforce-eager", *arguments)
        servers.append(server)
        return server

    yield start_one
    for server in servers:
        server.__exit__(None, None, None)


@contextlib.contextmanager
def long_stream(server: LiveServer, max_tokens: int = 2500) -> Iterator[Iterator[str]]:
    """The lines of a stream that takes seconds, once it has begun."""
    body = {**LONG, "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if not line.startswith(":"))  # without keep-alives
        assert next(lines).startswith("data: {")
        yield lines


def is_complete(lines: Iterator[str]) -> bool:
    """Read to the end: True after all tokens, False after an explicit error; anything else fails."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    if "error" in last:
        assert last["error"]["message"]
        return False
    assert last["choices"][0]["finish_reason"] == "length"
    return True


def complete(server: LiveServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields}, timeout=60)


def gone(server: LiveServer) -> bool:
    """Whether all of its processes have ended."""
    return server.process.poll() is not None and not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in server.children)


# Ends


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(start: Any) -> None:
    server = start().wait_ready()
    host, port = server.url.removeprefix("http://").split(":")
    with long_stream(server, READ_TO_THE_END) as lines, socket.create_connection((host, int(port)), timeout=30) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                     b'content-length: 100\r\n\r\n{"prompt"')
        for number in (signal.SIGINT, signal.SIGTERM):  # terminals and supervisors signal all processes of a service
            server.engine.send_signal(number)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, 2)
        refused = complete(server)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        answer = b"".join(iter(lambda: half.recv(65536), b""))  # the server does not wait for the rest of it
        assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer
        assert is_complete(lines)
    assert server.process.wait(20) == 0
    assert gone(server) and "Traceback" not in server.log


def test_what_does_not_finish_in_time_gets_an_explicit_error(start: Any) -> None:
    server = start("--shutdown-timeout", "0.2").wait_ready()
    with ThreadPoolExecutor(1) as thread, long_stream(server) as lines:
        whole = thread.submit(complete, server, **LONG)
        server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 2, 5)
        server.process.send_signal(signal.SIGINT)
        assert not is_complete(lines)
        assert whole.result().status_code == 503
    assert server.process.wait(20) == 0
    assert gone(server)


def test_prompts_that_are_still_being_read_do_not_hold_up_the_end(start: Any, tmp_path: Path) -> None:
    slow = tmp_path / "slow.jinja"
    slow.write_text("{{ messages[0].content }}{% if messages[0].content == 'a' %}"
                    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}")
    server = start("--shutdown-timeout", "0.2", "--chat-template", str(slow), "--chat-template-timeout", "100")
    server.wait_ready()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(httpx.post, f"{server.url}/v1/chat/completions", timeout=60,
                                json={"messages": [{"role": "user", "content": "a"}]})
        templates = [child for child in server.children if "jaxpaged-templates" in child.cmdline()]
        server.wait_for(lambda: max(child.cpu_times().user for child in templates) > 1, 30)
        assert server.stop(10) == 0
        answer = reading.result()
    assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]
    server.wait_for(lambda: gone(server), 2)
    assert "Traceback" not in server.log


def test_a_second_signal_ends_at_once(start: Any) -> None:
    server = start().wait_ready()
    with long_stream(server):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "shutting down" in server.log, 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2) == 128 + signal.SIGTERM
    server.wait_for(lambda: gone(server), 2)


def test_a_signal_while_loading_ends_at_once(start: Any) -> None:
    server = start()
    server.wait_for(lambda: psutil.Process(server.process.pid).children(), 30)
    server.note_children()
    assert server.stop(5) == 0
    server.wait_for(lambda: gone(server), 2)
    assert "Traceback" not in server.log


# The engine


def test_a_dead_engine_shows_at_once_and_ends_the_server(start: Any) -> None:
    server, hung = start(), start("--engine-timeout", "2", "--exit-on-engine-timeout")
    server.wait_ready()
    hung.wait_ready().engine.suspend()
    with ThreadPoolExecutor(1) as thread, long_stream(server) as lines:
        whole = thread.submit(complete, server, **LONG)
        server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 2, 5)
        server.engine.kill()
        assert server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, 2) < 2
        began = time.monotonic()
        refused = complete(server)
        assert refused.status_code == 503 and time.monotonic() - began < 1
        assert "SIGKILL" in refused.json()["error"]["message"]
        assert not is_complete(lines)
        assert whole.result().status_code == 503
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    assert server.process.wait(30) == 1
    # So does one that hangs, if a flag says so.
    assert hung.process.wait(30) == 1
    assert gone(hung) and "no progress" in hung.log


def test_a_hung_engine_fails_its_requests_and_a_killed_server_leaves_none_behind(start: Any) -> None:
    server = start("--engine-timeout", "2").wait_ready()
    time.sleep(2.5)  # idle is not hung
    assert httpx.get(f"{server.url}/health").status_code == 200
    with ThreadPoolExecutor(1) as thread, long_stream(server) as lines:
        whole = thread.submit(complete, server, **LONG)
        server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 2, 5)
        server.engine.suspend()
        try:
            server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, 4)
            assert complete(server).status_code == 503
            assert not is_complete(lines)
            answer = whole.result(10)
            assert answer.status_code == 503 and "no progress" in answer.json()["error"]["message"]
        finally:
            server.engine.resume()
    server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, 2)
    server.wait_idle(5)  # the engine has been told, too
    assert complete(server).status_code == 200

    # A server that is killed takes its engine along.
    with pytest.raises(httpx.HTTPError), long_stream(server) as lines:
        server.process.kill()
        list(lines)
    server.wait_for(lambda: gone(server), 5)


# Limits and keys


@pytest.fixture(scope="module")
def strict(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server with a key and tight limits."""
    with LiveServer(tmp_path_factory.mktemp("strict") / "log", str(model), *SMALL, "--api-key", "sesame", "other key",
                    "--max-waiting-requests", "2", "--max-request-bytes", "20000", "--root-path", "/api",
                    "--allowed-origins", "https://good.example", "--enable-log-requests") as server:
        yield server.wait_ready()


KEY = {"authorization": "Bearer sesame"}


@pytest.mark.parametrize("path", [
    "/v1/models", "/v1/models/", "//v1/models", "/V1/models", "/v1/models/tiny", "/v1/../v1/models", "/metrics",
    "/docs", "/openapi.json", "/version", "//", "/engine/state",
    "/nothing", "/health/", "//health", "/HEALTH", "/health/../v1/models",
    "/%76%31/models", "/health%2f..%2fv1%2fmodels", "/ping/x", "/api/v1/models", "/api", "/api/api/health", "/./",
    "/v1/completions", "/v1/models?x=/health", "/v1/models#/health", "http://x/v1/models", "http:///health/v1/models",
    "*", "/v1/models;/health", "/health%00/v1/models", "/health\\v1/models",
])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "OPTIONS", "DELETE", "TRACE"])
def test_no_path_gets_round_the_key(strict: LiveServer, path: str, method: str) -> None:
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:  # a client library would tidy the path
        raw.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
        answer = raw.makefile("rb").read()
    assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400"))


@pytest.mark.parametrize("value", [
    "", "Bearer", "Bearer sesam", "Bearer sesame2", "Bearer sesame other key", "Bearer other", "sesame",
    "Basic sesame", "Bearer SESAME", "bearer: sesame", "Bearer \xe9",
])
def test_wrong_keys(strict: LiveServer, value: str) -> None:
    response = httpx.get(f"{strict.url}/v1/models", headers=[(b"authorization", value.encode("latin-1"))])
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    two = [("authorization", value), ("authorization", "Bearer sesame")]
    if value.isascii():
        assert httpx.get(f"{strict.url}/v1/models", headers=two).status_code == 401


def test_right_keys_and_open_routes(strict: LiveServer) -> None:
    for key in ("sesame", "other key"):
        for path in ("/v1/models", "/api/v1/models", "/metrics"):
            assert httpx.get(strict.url + path, headers={"authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/health", "/ping", "/api/health", "/", "/api/"):
        assert httpx.get(strict.url + path).status_code == 200
    for name in ("tiny", "alias"):
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{strict.url}/v1/completions", json=body, headers=KEY).json()["model"] == name
    assert "sesame" not in strict.log and "other key" not in strict.log


@pytest.mark.parametrize("path", [
    "/v1/models/", "//v1/models", "/v1//models//", "/api/v1/models/", "/api//v1/models", "//api/v1/models",
    "/v1/models/tiny/", "/health/", "/metrics//", "/api/", "//", "/v1/models/?x=1",
])
def test_double_and_trailing_slashes_are_dropped(strict: LiveServer, path: str) -> None:
    assert httpx.get(strict.url + path, headers=KEY).status_code == 200
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{strict.url}//v1/completions/", json=body, headers=KEY).status_code == 200


def test_browsers_of_allowed_origins(strict: LiveServer) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
        answer = httpx.options(f"{strict.url}/v1/completions", headers={"origin": origin, **ask})
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


def test_the_queue_is_bounded_and_recovers(strict: LiveServer) -> None:
    def ask(n: int) -> httpx.Response:
        return httpx.post(f"{strict.url}/v1/completions", headers=KEY, timeout=60,
                          json={"prompt": "a", "n": n, "max_tokens": 400, "ignore_eos": True})

    too_many = ask(7)
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(ask, [2] * 20))
    assert {answer.status_code for answer in answers} == {200, 503}
    assert sum(answer.status_code == 200 for answer in answers) >= 3
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) > 0 and "waiting" in answer.json()["error"]["message"]
    assert ask(6).status_code == 200


def test_the_body_limit_is_the_one_given(strict: LiveServer) -> None:
    for size, status in ((19_000, 400), (21_000, 413)):  # the shorter one is too long for the context only
        body = json.dumps({"prompt": "x" * size})
        assert httpx.post(f"{strict.url}/v1/completions", content=body, headers={
            **KEY, "content-type": "application/json"}).status_code == status


def test_a_reader_that_never_reads_neither_blocks_others_nor_stays(strict: LiveServer) -> None:
    host, port = strict.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "n": 2, "stream": True, "return_token_ids": True}).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sesame\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        time.sleep(1)
        assert httpx.post(f"{strict.url}/v1/completions", headers=KEY, timeout=60,
                          json={"prompt": "a", "max_tokens": 5}).status_code == 200
    began = time.monotonic()
    answer = httpx.post(f"{strict.url}/v1/completions", headers=KEY, timeout=60,
                        json={"prompt": "a", "max_tokens": 1, "n": 4})
    assert answer.status_code == 200 and time.monotonic() - began < 2


def test_a_context_filled_to_the_last_token(strict: LiveServer) -> None:
    def ask(prompt: int, **more: Any) -> httpx.Response:
        return httpx.post(f"{strict.url}/v1/completions", headers=KEY, timeout=60,
                          json={"prompt": [7] * prompt, "ignore_eos": True, **more})

    answer = ask(4095, max_tokens=1).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 4096
    assert ask(4090, max_tokens=6).json()["usage"]["completion_tokens"] == 6
    assert ask(4090).json()["usage"]["completion_tokens"] == 6  # the default fits the room
    assert ask(4090, max_tokens=7).json()["error"]["code"] == "context_length_exceeded"
    assert ask(4096, max_tokens=1).json()["error"]["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "x" * 4055}], "ignore_eos": True}
    answer = httpx.post(f"{strict.url}/v1/chat/completions", headers=KEY, timeout=60, json=chat).json()
    assert answer["usage"]["total_tokens"] == 4096  # the remaining room


def test_bytes_that_are_no_text_are_the_same_streamed_and_whole(strict: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 300, "temperature": 1, "seed": 5, "ignore_eos": True}
    whole = httpx.post(f"{strict.url}/v1/completions", headers=KEY, json=body, timeout=60).json()
    with httpx.stream("POST", f"{strict.url}/v1/completions", headers=KEY, json={**body, "stream": True},
                      timeout=60) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines()
                  if line and "[DONE]" not in line]
    text = whole["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert "�" in text and len(events) > 100  # released as they come


def test_template_errors_are_the_clients(strict: LiveServer) -> None:
    answer = httpx.post(f"{strict.url}/v1/chat/completions", headers=KEY,
                        json={"messages": [{"role": "tool", "content": "x"}]})
    assert answer.status_code == 400 and "no tools here" in answer.json()["error"]["message"]


def test_the_log_of_requests_has_sizes(strict: LiveServer) -> None:
    """Sizes and numbers, never a text that a client has chosen."""
    secret = "unheard-of"
    common = {"max_tokens": 1, "temperature": 0.125, "stop": [secret], "bad_words": [f"{secret} word"],
              "logit_bias": {"77": 1.5}, "user": secret}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": f"{secret} words", "cache_salt": secret}),
        ("completions", {"prompt": "a", "structured_outputs": {"choice": [secret, "b"]}}),
        ("chat/completions", {"messages": [{"role": "user", "content": secret}], "response_format": {
            "type": "json_schema", "json_schema": {"name": secret, "schema": {"const": secret}}}})]
    for path, body in bodies:
        answer = httpx.post(f"{strict.url}/v1/{path}", headers=KEY, json={**common, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
    lines = [line for line in strict.log.splitlines() if "temperature=0.125" in line]
    assert len(lines) == 3 and "16 prompt tokens" in lines[0] and "stop=(1 items)" in lines[0]
    assert "structured_outputs=choice, " in lines[1] and "structured_outputs=json, " in lines[2]
    assert secret not in strict.log and "1.5" not in lines[0] and "Traceback" not in strict.log


# Starts that fail


def fails(*arguments: str) -> str:
    """The one line that a start which cannot work prints."""
    done = subprocess.run([sys.executable, "-m", "jaxpaged.server", "--port", "0", *arguments], cwd=ROOT,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and done.stderr.splitlines()[-1] == lines[0]
    return lines[0]


def test_models_that_cannot_be_served(tmp_path: Path, model: Path) -> None:
    assert "nowhere" in fails(str(tmp_path / "nowhere"))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF\3\0\0\0")
    assert "damaged.gguf" in fails(str(damaged))
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps({"architectures": ["StrangeModel"], "model_type": "strange"}))
    assert "StrangeModel" in fails(str(other))
    assert "max-model-len" in fails(str(model), "--max-model-len", "5000")


def test_addresses_that_cannot_be_used(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = fails(str(model), "--host", "127.0.0.1", "--port", port)
    assert port in line and "--port" in line
    assert "--host" in fails(str(model), "--host", "no.such.host.invalid")
    assert "--host" in fails(str(model), "--host", "192.0.2.1")


# Transport


FILES = 128


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Key and certificate for this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("making a certificate needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    key, found = folder / "key.pem", folder / "cert.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", found, "-days",
                    "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True)
    return key, found


@pytest.fixture(scope="module")
def secure(model: Path, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[LiveServer]:
    """A server that speaks TLS alone and may open few files."""
    with LiveServer(tmp_path_factory.mktemp("secure") / "log", str(model), *SMALL, "--ssl-keyfile", str(certificate[0]),
                    "--ssl-certfile", str(certificate[1]), "--head-timeout", "4", files=FILES) as server:
        yield server.wait_ready()


def test_tls(secure: LiveServer, certificate: tuple[Path, Path], strict: LiveServer) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate[1]))
    drawn = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True, "seed": 7, "n": 2}
    assert secure.url.startswith("https://")
    with httpx.Client(base_url=secure.url, verify=trusting, timeout=60) as http:
        whole = http.post("/v1/completions", json=drawn).json()["choices"]
        with http.stream("POST", "/v1/completions", json={**drawn, "n": 1, "stream": True}) as response:
            assert is_complete(response.iter_lines())
    # The same seed gives the same texts in another process.
    other = httpx.post(f"{strict.url}/v1/completions", headers=KEY, json=drawn, timeout=60).json()["choices"]
    assert [choice["text"] for choice in whole] == [choice["text"] for choice in other]
    assert whole[0]["text"] != whole[1]["text"]
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{secure.url.replace('https', 'http')}/health")
    host, port = secure.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as silent:
        assert silent.recv(1) == b""


def test_more_connections_than_descriptors(secure: LiveServer, certificate: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate[1]))
    host, port = secure.url.removeprefix("https://").split(":")
    process = psutil.Process(secure.process.pid)

    def healthy() -> bool:
        try:
            return httpx.get(f"{secure.url}/health", verify=trusting, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    assert healthy()
    before = process.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(3 * FILES):
            raw = stack.enter_context(socket.socket())
            raw.settimeout(0.05)
            with contextlib.suppress(OSError):
                raw.connect((host, int(port)))
        secure.wait_for(lambda: process.num_fds() > before + 32, 5)
        assert process.num_fds() <= FILES and secure.process.poll() is None
    secure.wait_for(healthy, 20)
    secure.wait_for(lambda: process.num_fds() <= before + 2, 20)


def test_silent_connections_slow_schemas_and_killed_processes_end_no_service(model: Path, tmp_path: Path) -> None:
    """With few descriptors, what is lost is started again, and others are served meanwhile."""
    slow = {"type": "object", "properties": {"a": {"allOf": [{"type": "integer", "multipleOf": 9973},
                                                             {"type": "integer", "multipleOf": 9967}]}}}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with LiveServer(tmp_path / "log", str(model), *SMALL, "--enforce-eager", "--structured-outputs-timeout", "1",
                    files=FILES) as server, contextlib.ExitStack() as stack:
        host, port = server.wait_ready().url.removeprefix("http://").split(":")
        for _ in range(3 * FILES):
            silent = stack.enter_context(socket.socket())
            silent.settimeout(0.05)
            with contextlib.suppress(OSError):
                silent.connect((host, int(port)))
        for _ in range(3):  # more than there are processes for schemas
            assert complete(server, structured_outputs={"json": slow}).status_code == 400
        for child in psutil.Process(server.process.pid).children():
            if "jaxpaged-templates" in child.cmdline():
                child.kill()
        for _ in range(3):
            assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200
        assert complete(server).status_code == 200 and httpx.get(f"{server.url}/health").status_code == 200
        assert psutil.Process(server.process.pid).num_fds() < FILES
        assert server.stop(20) == 0


def test_a_certificate_that_is_none(model: Path) -> None:
    file = str(model / "config.json")
    assert "--ssl-certfile" in fails(str(model), "--ssl-certfile", file, "--ssl-keyfile", file)
