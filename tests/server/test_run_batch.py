"""`run-batch`: every request is answered once, as the server answers it, whatever ends the process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.core.errors import ConfigError
from jaxpaged.server.batch.files import Answers, read_ids, read_requests
from tests.support.live_server import ROOT, write_tiny_model

FLAGS = ("--enforce-eager", "--max-num-seqs", "4", "--max-num-batched-tokens", "16")


def line(custom_id: Any, **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions",
            "body": {"prompt": f"one {custom_id}", "max_tokens": 8, "temperature": 0}} | changes


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in lines))
    return path


def command(model: Path, source: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "jaxpaged.run_batch", str(model), "-i", str(source), "-o", str(target), *FLAGS]


def run(*args: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=ROOT, capture_output=True, text=True, timeout=200)


def answers(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({item["custom_id"] for item in found}) == len(found), "answered twice"
    return {item["custom_id"]: item for item in found}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("batch") / "tiny")


def test_killed_in_the_middle_it_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    """Also when the last line was cut, by a machine that lost power; and it says so if nothing is left to do."""
    requests = [line(f"r{number}", body={"prompt": f"number {number}", "max_tokens": 60, "temperature": 0,
                                         "ignore_eos": True}) for number in range(60)]
    requests.insert(7, line("chat", url="/v1/chat/completions", body={
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}))
    requests.insert(9, line("wrong", body={"prompt": "x", "temperature": -1}))
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    process = subprocess.Popen(command(model, source, target), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not target.exists() or target.read_bytes().count(b"\n") < 12:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = answers(target)
    assert 12 <= len(before) < len(requests), "it was too quick to be killed in the middle"
    content = target.read_bytes()
    target.write_bytes(content + content[:50])
    done = run(model, source, target)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of 62 requests have their answers already" in done.stderr
    assert "62 requests have their answers, 1 of them errors" in done.stderr
    assert target.read_bytes().startswith(content)
    found = answers(target)
    assert found.keys() == {item["custom_id"] for item in requests}
    for name, item in found.items():
        body = item["response"]["body"]
        if name == "wrong":
            assert item["response"]["status_code"] == 400 and item["error"]["param"] == "temperature"
            continue
        assert item["response"]["status_code"] == 200 and item["error"] is None
        assert body["object"] == ("chat.completion" if name == "chat" else "text_completion")
        assert name == "chat" or body["usage"]["completion_tokens"] == 60
    again = run(model, source, target)
    assert again.returncode == 0 and "all 62 requests have their answers" in again.stderr
    assert len(answers(target)) == 62


@pytest.mark.slow
def test_an_interrupt_ends_it_with_whole_lines(model: Path, tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", [line(str(number), body=body) for number in range(40)])
    target = tmp_path / "out.jsonl"
    process = subprocess.Popen(command(model, source, target), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not target.exists() or not target.read_bytes():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ConfigError, match="another process writes to it"):
        Answers(target)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.endswith("interrupted; the same command continues\n")
    assert 0 < len(answers(target)) < 40


@pytest.mark.parametrize(("lines", "message"), [
    ([line("a"), "", "{"], "line 3: not valid JSON"), (["[1]"], "line 1: not a JSON object"),
    ([line("a"), line("b"), line("a")], "line 3: custom_id 'a' is also that of line 1"),
    ([line(7)], "custom_id must be a text"), ([line("")], "custom_id must be a text"),
    ([line("a", method="GET")], "method must be POST"), ([line("a", url="/v1/nothing")], "url must be one of"),
    ([line("a", body=[])], "body must be an object"), ([line("a", body={"stream": True})], "stream must be false"),
    ([], "has no requests"), (["[" * 100_000], "line 1: not valid JSON")])
def test_a_line_that_is_no_request_is_named_before_the_model_loads(tmp_path: Path, lines: list[Any],
                                                                   message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_ids(write(tmp_path / "in.jsonl", lines))


def test_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a"), line("\ud800 lone")])
    assert [request.custom_id for request in read_requests(source)] == read_ids(source) == ["a", "\ud800 lone"]
    other = write(tmp_path / "other.jsonl", [line("b") | {"error": None}])
    for target, message in ((other, "answers to other requests, such as 'b'"), (source, "must be different files"),
                            (tmp_path / "no" / "out", "No such file or directory"), (tmp_path, "cannot be written"),
                            (write(tmp_path / "text", ["words"]), "line 1 is no answer")):
        done = run(Path("nothing"), source, target)
        assert done.returncode in (1, 2) and message in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert len(answers(other)) == 1


def test_any_text_can_be_written(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("\ud800 lone"), line("\u2028")])
    answered = Answers(tmp_path / "out.jsonl")
    for number, request in enumerate(read_requests(source)):
        answered.write(request, number, 200, {"text": "é\ud801\n\u2028"})
    answered.close()
    opened = Answers(tmp_path / "out.jsonl")
    assert opened.answered == set(read_ids(source))
    opened.close()
    assert os.path.getsize(tmp_path / "out.jsonl") > 0
