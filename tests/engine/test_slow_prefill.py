"""A stream whose first token takes longer than all timeouts of the server and the client."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.live_server import LiveServer, write_tiny_model

CONTEXT = 24576
WAIT = 1.2  # seconds; the engine says once a second that it is alive
PROMPT = [number % 250 for number in range(CONTEXT - 8)]
BODY: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("slow")
    model = write_tiny_model(folder / "model", context=CONTEXT)
    with LiveServer(folder / "log", str(model), "--served-model-name", "m", "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "1800",
                    "--no-enable-prefix-caching", "--engine-timeout", str(WAIT), "--body-timeout", str(WAIT),
                    "--keep-alive-timeout", "1", "--shutdown-timeout", str(WAIT), "--chat-template-timeout", str(WAIT),
                    "--structured-outputs-timeout", str(WAIT), "--stream-keep-alive", "0.2") as live:
        yield live.wait_ready()


def text_of(lines: list[str]) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
    assert sum(len(choice.get("token_ids", ())) for event in events for choice in event["choices"]) == 4
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_prompt_that_takes_longer_than_any_wait(server: LiveServer) -> None:
    began = time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**BODY, "prompt": PROMPT, "stream": True},
                      timeout=WAIT) as response:  # of each read
        assert response.status_code == 200
        lines: list[str] = []
        for line in response.iter_lines():
            if line.startswith("data") and not any(other.startswith("data") for other in lines):
                first = time.monotonic() - began
            lines.append(line)
    assert first > 1.5 * WAIT, f"the prompt took {first:.1f} s only"
    assert lines[0] == ": keep-alive" and lines.count(": keep-alive") >= 5 and lines[-2:] == ["data: [DONE]", ""]
    assert lines.count("data: [DONE]") == 1
    whole = httpx.post(f"{server.url}/v1/completions", json={**BODY, "prompt": PROMPT}, timeout=60).json()
    assert whole["choices"][0]["text"] == text_of(lines) and whole["usage"]["completion_tokens"] == 4
    server.wait_idle(5)


def test_a_client_that_gives_up_leaves_nothing(server: LiveServer) -> None:
    server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, 10)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**BODY, "prompt": PROMPT}, timeout=0.5)
    server.wait_idle(2)


def test_the_end_of_the_time_is_an_error(server: LiveServer) -> None:
    """Before the first token: an event with an error and the end, never an answer without text."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**BODY, "prompt": PROMPT, "stream": True},
                      timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        server.process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line.startswith("data")]
    assert len(events) == 2 and "shutting down" in json.loads(events[0].removeprefix("data: "))["error"]["message"]
    assert events[1] == "data: [DONE]" and server.process.wait(30) == 0
