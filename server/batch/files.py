"""The two files of a batch: requests, one JSON object a line, and answers, in the order in which they come.

A line of answers is written at once, so that whatever ends the process leaves whole lines, and one that is cut at most.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.core.errors import ConfigError

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input: what to answer, and the name under which its answer is written."""

    custom_id: str
    url: str
    body: bytes


def read_ids(path: Path) -> list[str]:
    """The names of all requests of a file, in order.

    Raises:
        ConfigError: a line that is no request, with its number; a name that is there twice; no line at all.
    """
    seen: dict[str, int] = {}
    for number, request in _numbered(path):
        if (first := seen.setdefault(request.custom_id, number)) != number:
            name = repr(request.custom_id[:80])
            raise ConfigError(f"{path} line {number}: custom_id {name} is also that of line {first}")
    if not seen:
        raise ConfigError(f"{path} has no requests")
    return list(seen)


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file that `read_ids` has found good, one by one."""
    return (request for _, request in _numbered(path))


def _numbered(path: Path) -> Iterator[tuple[int, BatchRequest]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield number, _request(line)
                    except ConfigError as error:
                        raise ConfigError(f"{path} line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--input-file {path} cannot be read: {error.strerror}") from None


def _request(line: bytes) -> BatchRequest:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError("not valid JSON") from None
    if not isinstance(found, dict):
        raise ConfigError("not a JSON object")
    custom_id, url, body = (found.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError("custom_id must be a text, to find the answer by")
    if found.get("method", "POST") != "POST":
        raise ConfigError("method must be POST")
    if url not in ROUTES:
        raise ConfigError(f"url must be one of {', '.join(ROUTES)}")
    if not isinstance(body, dict):
        raise ConfigError("body must be an object: the request's fields")
    if body.get("stream"):
        raise ConfigError("stream must be false: answers are written whole")
    return BatchRequest(custom_id, url, json.dumps(body).encode())


class Answers:
    """The file of answers, which no other process may write to meanwhile.

    Attributes:
        answered: the names that it had answers to when it was opened.
        num_refused: number of answers that are errors.

    Raises:
        ConfigError: it cannot be written, is in use, or is something else.
    """

    def __init__(self, path: Path) -> None:
        self.num_refused = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"--output-file {path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.answered = self._read(path)
        except OSError as error:
            os.close(self._file)
            reason = "another process writes to it" if isinstance(error, BlockingIOError) else error.strerror
            raise ConfigError(f"--output-file {path} cannot be used: {reason}") from None
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, path: Path) -> frozenset[str]:
        """Names in the whole lines; a last line that is cut is removed."""
        names, whole = set(), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    found = json.loads(line)
                    names.add(str(found["custom_id"]))
                    self.num_refused += found["error"] is not None
                except (ValueError, TypeError, KeyError, RecursionError):
                    raise ConfigError(f"--output-file {path} line {number} is no answer; name a new file, or one that "
                                      "a batch of the same requests has begun") from None
                whole += len(line)
        os.ftruncate(self._file, whole)
        return frozenset(names)

    def write(self, request: BatchRequest, number: int, status: int, answer: dict[str, Any]) -> None:
        """Write one answer: the response of the route as the server would give it, errors included."""
        error = answer.get("error") if status >= 400 else None
        self.num_refused += error is not None
        line = json.dumps({
            "id": f"batch_req_{number}", "custom_id": request.custom_id,
            "response": {"status_code": status, "request_id": f"req_{number}", "body": answer},
            "error": error}, ensure_ascii=False)
        content = memoryview(f"{line}\n".encode("utf-8", "surrogatepass"))
        while content:
            content = content[os.write(self._file, content):]

    def close(self) -> None:
        """Let others write to it."""
        os.close(self._file)
