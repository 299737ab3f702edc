"""Processes for work on client input: jobs that take too much time or memory are cut off.

A thread cannot be stopped, least of all in native code; a process can be killed.
"""

import logging
import pickle
import queue
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxpaged.core.errors import JaxpagedError, RequestError
from jaxpaged.server.sandbox.child_process import start_child

logger = logging.getLogger(__name__)

START_SECONDS = 60.0


class CutOffError(JaxpagedError):
    """The job exceeded its time, or ended its process."""


class BoundedProcesses:
    """Runs jobs, each in one of several processes. May be called from several threads.

    Args:
        begin: runs once in each process and returns the function that runs the jobs. Pickled, like jobs and results.
        name: shown in the processes' command lines.
        timeout: seconds per job.
        memory: bytes that a process may grow by while it runs jobs.
        count: number of processes; each starts with the first job that finds no idle one, unless `eager`.
    """

    def __init__(self, begin: Callable[[], Callable[[Any], Any]], *, name: str, timeout: float, memory: int, count: int,
                 eager: bool = False) -> None:
        self._parts = begin, memory
        self._name, self._timeout = name, timeout
        self._children: set[_Child] = set()
        self._closed = False
        self._idle: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(self._start() if eager else None)

    def run_job(self, job: object) -> Any:
        """The result of a job.

        Raises:
            RequestError: the job's own.
            CutOffError: it exceeded its time or memory.
            RecursionError: it is nested too deeply to be sent.
        """
        child = self._idle.get()
        try:
            if child is None:
                child = self._start()
            answer = child.run_job(job, self._timeout)
        except TimeoutError:
            logger.warning("%s: cut off after %g s", self._name, self._timeout)
            raise CutOffError(f"did not end within {self._timeout:g} s") from None
        except (EOFError, OSError):
            logger.warning("%s: a job ended its process", self._name)
            raise CutOffError("failed") from None
        finally:
            if child is not None and not child.good:
                child.end()
                self._children.discard(child)
                child = None if self._closed else self._start()
            self._idle.put(child)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def close(self) -> None:
        """Kill the processes, including busy ones."""
        self._closed = True
        for child in tuple(self._children):
            child.end()

    def _start(self) -> "_Child":
        child = _Child(self._name, self._parts)
        self._children.add(child)
        return child


class _Child:
    """One process; `good` unless it failed to answer."""

    def __init__(self, name: str, parts: object) -> None:
        self.good = True
        self._ready = False
        self._process, self._pipe = start_child(__name__, name, parts)

    def run_job(self, job: object, timeout: float) -> Any:
        """The child's answer, within `timeout` seconds once it is ready."""
        message = pickle.dumps(job)  # separately: if this fails, nothing was sent
        self.good = False
        if not self._ready:
            self._receive(START_SECONDS)
            self._ready = True
        self._pipe.send_bytes(message)
        answer = self._receive(timeout)
        self.good = True
        return answer

    def _receive(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError
        return self._pipe.recv()

    def end(self) -> None:
        """Kill it; reading its answer then raises EOFError."""
        self._process.kill()
        self._process.wait()


def run_child(pipe: Connection) -> None:
    """Run jobs until the parent's end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        begin, memory = pipe.recv()
        run_job = begin()
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        pipe.send(None)  # ready
        while True:
            job = pipe.recv()
            try:
                answer = run_job(job)
            except RequestError as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return
