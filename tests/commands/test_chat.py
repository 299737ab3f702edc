"""`jaxpaged chat` against a live server: history, streaming, errors that leave the conversation as it was."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import ROOT, LiveServer, write_tiny_model


class Recorder(BaseHTTPRequestHandler):
    """Passes requests on to a server and keeps their bodies; what is said of a stone it refuses."""

    target = ""
    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._pass(httpx.get(self.target + self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        if "stone" in body["messages"][-1]["content"]:
            self._pass(httpx.Response(400, json={"error": {"message": "no stones"}}))
        else:
            self._pass(httpx.post(self.target + self.path, json=body, timeout=60))

    def _pass(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server, and the requests that it has got."""
    folder = tmp_path_factory.mktemp("chat")
    with LiveServer(folder / "log", str(write_tiny_model(folder / "tiny")), "--enforce-eager", "--max-num-seqs", "2",
                    "--max-num-batched-tokens", "16", "--served-model-name", "small") as server:
        bodies: list[dict[str, Any]] = []
        handler = type("Handler", (Recorder,), {"target": server.wait_ready().url, "bodies": bodies})
        proxy = HTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}/v1", bodies
        proxy.shutdown()
        proxy.server_close()


def chat(url: str, *flags: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "jaxpaged.chat", "--url", url, *flags], input=lines, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)


def test_a_conversation(recorded: tuple[str, list[dict[str, Any]]]) -> None:
    url, bodies = recorded
    bodies.clear()
    done = chat(url, "--system-prompt", "be brief", "--max-tokens", "6", "--temperature", "0",
                lines="one\ntwo\na stone\nthree\n/undo\nfour\n/reset\n\nfive\n/quit\nsix\n")
    assert done.returncode == 0 and "error: no stones" in done.stderr, done.stderr
    said = [[message["content"] for message in body["messages"] if message["role"] == "user"] for body in bodies]
    assert said == [["one"], ["one", "two"], ["one", "two", "a stone"], ["one", "two", "three"],
                    ["one", "two", "four"], ["five"]]
    for body in bodies:
        assert body["messages"][0] == {"role": "system", "content": "be brief"}
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("small", 6, 0)
    answers = [message["content"] for message in bodies[4]["messages"] if message["role"] == "assistant"]
    assert len(answers) == 2 and all(f"> {answer}\n" in done.stdout for answer in answers)


def test_one_message(recorded: tuple[str, list[dict[str, Any]]]) -> None:
    url, bodies = recorded
    bodies.clear()
    wanted = httpx.post(f"{url}/chat/completions", timeout=60, json={
        "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 9, "model": "small"}).json()
    done = chat(url, "-q", "Hi", "--temperature", "0", "--max-tokens", "9")
    assert done.stdout == wanted["choices"][0]["message"]["content"] + "\n" and done.returncode == 0
    refused = chat(url, "-q", "a stone")
    assert refused.returncode == 1 and refused.stderr == "error: no stones\n" and not refused.stdout


@pytest.mark.parametrize(("url", "flags", "message"), [
    ("http://127.0.0.1:9/v1", (), "no server answers at http://127.0.0.1:9/v1 (Connection refused); `jaxpaged serve`"),
    ("localhost", (), "--url must be an address such as"), ("http://host:port/v1", (), "--url must be an address"),
    (None, ("--model-name", "other"), "there is no such model"), (None, ("--max-tokens", "-1"), "max_tokens")])
def test_errors_are_one_line(recorded: tuple[str, list[dict[str, Any]]], url: str | None, flags: tuple[str, ...],
                             message: str) -> None:
    done = chat(url or recorded[0], *flags, "-q", "Hi")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr and done.stderr.startswith("error: ")


def test_a_server_of_another_kind(tmp_path: Path) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if "models" in self.path else 404)
            self.end_headers()
            self.wfile.write(b"[1]")

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    other = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{other.server_port}/v1"
    assert "names no model; give --model-name" in chat(url, "-q", "Hi").stderr
    assert chat(url, "--model-name", "m", "-q", "Hi").stderr == "error: [1]\n"
    other.shutdown()
    other.server_close()
