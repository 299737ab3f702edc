"""Processes for work on client input: jobs that take too much time or memory are cut off.

A thread cannot be stopped, least of all in native code; a process can be killed.
"""

import contextlib
import logging
import pickle
import resource
import signal
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxpaged.core.errors import JaxpagedError, RequestError, UnavailableError
from jaxpaged.server.sandbox.child_process import exit_text, start_child

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
RETRY_SECONDS = 0.5  # until a start that has failed is tried again; twice as long after each further failure
MAX_RETRY_SECONDS = 30.0
END_SECONDS = 1.0  # to wait for a killed process


class CutOffError(JaxpagedError):
    """The job exceeded its time or memory."""


class _EndedError(Exception):
    """The process of a job has ended, for a reason of its own; the text says which."""


class BoundedProcesses:
    """Runs jobs, each in one of several processes. May be called from several threads.

    A thread of its own starts the processes, replaces those that have ended, and tries again after a start that has
    failed: a job waits only while a process runs or starts, and none is lost for good.

    Args:
        begin: runs once in each process and returns the function that runs the jobs. Pickled, like jobs and results.
        name: what the processes are for, shown in their command lines and in errors.
        timeout: seconds per job.
        timeout_flag: the flag that sets it, for errors.
        memory: bytes that a process may grow by while it runs jobs.
        count: number of processes; each starts with the first job that finds no idle one, unless `eager`.
    """

    def __init__(self, begin: Callable[[], Callable[[Any], Any]], *, name: str, timeout: float, timeout_flag: str,
                 memory: int, count: int, eager: bool = False) -> None:
        self._parts = begin, memory
        self._name, self._timeout, self._timeout_flag, self._count = name, timeout, timeout_flag, count
        self._changed = threading.Condition()  # guards all that follows
        self._wanted = count if eager else 0
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._num_jobs = 0
        self._failure: str | None = None  # of the last start
        self._closed = False
        threading.Thread(target=self._keep_running, name=f"{name}-keeper", daemon=True).start()

    def fault(self) -> str | None:
        """Why no job can be run at the moment; None while a process runs, or before the first is needed."""
        with self._changed:
            if self._closed:
                return "the server is shutting down"
            return None if any(child.ready and child.is_alive for child in self._children) else self._failure

    def run_job(self, job: object) -> Any:
        """The result of a job. If its process ends for a reason of its own, the job is tried once more.

        Raises:
            RequestError: the job's own.
            CutOffError: it exceeded its time or memory.
            RecursionError: it is nested too deeply to be sent, or to be run.
            UnavailableError: no process can be started, two have ended, or the pool was closed.
        """
        message = pickle.dumps(job)  # here: if this fails, nothing was sent
        try:
            return self._try(message)
        except _EndedError as error:
            logger.warning("a process for %s %s; trying its job once more", self._name, error)
        try:
            return self._try(message)
        except _EndedError as error:
            logger.error("a second process for %s %s", self._name, error)
            raise UnavailableError(f"two processes for {self._name} have ended one after the other; try again later"
                                   ) from None

    def close(self) -> None:
        """Kill the processes, including busy ones. Jobs that wait or run end with UnavailableError."""
        with self._changed:
            self._closed = True
            children = tuple(self._children)
            self._changed.notify_all()
        for child in children:
            child.end()

    def _try(self, message: bytes) -> Any:
        with self._changed:
            self._num_jobs += 1
            self._wanted = max(self._wanted, min(self._num_jobs, self._count))
            self._changed.notify_all()
        child: _Child | None = None
        try:
            child = self._take()
            answer = self._run(child, message)
        finally:
            self._give_back(child)
        if isinstance(answer, (RequestError, RecursionError)):
            raise answer
        if isinstance(answer, MemoryError):
            raise self._exceeded_memory()
        return answer

    def _run(self, child: "_Child", message: bytes) -> Any:
        try:
            return child.run_job(message, self._timeout)
        except TimeoutError:
            logger.warning("%s: cut off after %g s", self._name, self._timeout)
            raise CutOffError(f"did not end within {self._timeout:g} s ({self._timeout_flag})") from None
        except (EOFError, OSError):
            if self._closed:
                raise UnavailableError("the server is shutting down") from None
            code = child.exit_code()
            if code == -signal.SIGABRT:  # native code ends like this when it gets no more memory
                raise self._exceeded_memory() from None
            raise _EndedError(exit_text(code)) from None

    def _exceeded_memory(self) -> CutOffError:
        logger.warning("%s: a job exceeded its memory", self._name)
        return CutOffError("needs too much memory")

    def _take(self) -> "_Child":
        """An idle process, once there is one."""
        with self._changed:
            while True:
                while self._idle:
                    child = self._idle.pop()
                    if child.is_alive:
                        return child
                    self._children.discard(child)
                    self._changed.notify_all()
                fault = self.fault()
                if fault is not None:
                    raise UnavailableError(fault)
                self._changed.wait()

    def _give_back(self, child: "_Child | None") -> None:
        if child is not None and not child.good:
            child.end()
        with self._changed:
            self._num_jobs -= 1
            if child is not None and child.good:
                self._idle.append(child)
            else:
                self._children -= {child}
            self._changed.notify_all()

    def _keep_running(self) -> None:
        """Start processes whenever fewer run than are wanted, until the pool is closed.

        A start that fails is tried again at once, so that a process killed while it starts costs no job; only when that
        fails too are the jobs that wait refused.
        """
        delay = RETRY_SECONDS
        failed_before = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._children) < self._wanted)
                if self._closed:
                    return
                missing = self._wanted - len(self._children)
            try:
                self._start(missing)
            except Exception as error:  # this thread must live; the operating system's errors share no base
                if self._closed:
                    return
                logger.warning("a process for %s cannot be started: %s; trying again in %g s", self._name, error,
                               delay if failed_before else 0)
                if not failed_before:
                    failed_before = True
                    continue
                with self._changed:
                    self._failure = f"no process for {self._name} can be started at the moment; try again later"
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed, delay)
                delay = min(2 * delay, MAX_RETRY_SECONDS)
            else:
                delay = RETRY_SECONDS
                failed_before = False

    def _start(self, count: int) -> None:
        """Start processes side by side and wait until each can take jobs."""
        started: list[_Child] = []
        try:
            for _ in range(count):
                child = _Child(self._name, self._parts)
                started.append(child)
                with self._changed:
                    self._children.add(child)
                    if self._closed:  # since then: `close` has not seen it
                        return
            for child in started:
                child.wait_ready()
                with self._changed:
                    self._failure = None
                    self._idle.append(child)
                    self._changed.notify_all()
        finally:
            for child in started:
                if not child.ready or self._closed:
                    child.end()
                    with self._changed:
                        self._children.discard(child)


class _Child:
    """One process; `ready` to take jobs, and `good` unless it failed to answer one."""

    def __init__(self, name: str, parts: object) -> None:
        self.ready, self.good = False, True
        self._process, self._pipe = start_child(__name__, name, parts)

    def wait_ready(self) -> None:
        """Wait until it can take jobs.

        Raises:
            TimeoutError, OSError, EOFError: it cannot.
        """
        try:
            self._receive(START_SECONDS)
        except EOFError:
            raise OSError(f"it {exit_text(self.exit_code())}") from None
        self.ready = True

    def run_job(self, message: bytes, timeout: float) -> Any:
        """The answer to a pickled job, within `timeout` seconds."""
        self.good = False
        self._pipe.send_bytes(message)
        answer = self._receive(timeout)
        self.good = not isinstance(answer, MemoryError)
        return answer

    def _receive(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"no answer within {timeout:g} s")
        return self._pipe.recv()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def exit_code(self) -> int:
        """The exit code of a process that has closed its end of the pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_SECONDS)
        return self.end()

    def end(self) -> int:
        """Kill it; reading its answer then raises EOFError. Returns the exit code."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_SECONDS)
        return -signal.SIGKILL


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
            except (RequestError, RecursionError, MemoryError) as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return
