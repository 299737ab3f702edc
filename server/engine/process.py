"""The engine's own process: starting it, running it, and noticing the end of either side.

A socket pair carries pickled lists of the messages of `jaxpaged.core.messages`. The child exits when the parent's end
closes, however the parent ended. It ignores SIGINT and SIGTERM, which terminals and supervisors send to both processes:
the parent decides when running requests have had enough time.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import JaxpagedError
from jaxpaged.core.messages import EngineFailure
from jaxpaged.core.quiet_start import without_cuda_notices
from jaxpaged.server.logs import set_up_logging
from jaxpaged.server.sandbox.child_process import exit_text, start_child

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
_MAX_REASON_CHARS = 200
_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The engine is idle and alive."""


class EngineProcess:
    """The parent's handle of the child. `pipe` yields the child's messages; EOFError means that it has ended."""

    def __init__(self, config: EngineConfig) -> None:
        self._process, self.pipe = start_child(__name__, "engine", config)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def exit_reason(self, wait_seconds: float = 1.0) -> str:
        """Describe the end of the child, after the pipe has reported it."""
        try:
            code = self._process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return "the engine process closed its connection"
        return f"the engine process {exit_text(code)}"

    def join(self, timeout: float) -> None:
        """Wait for the child to end; kill it after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the child."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver may not end even then
            self._process.wait(_KILL_SECONDS)


def run_child(pipe: Connection) -> int:
    """Load the engine and run its loop until the parent sends Shutdown; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()  # a native abort leaves a traceback in the log
    set_up_logging()
    config = pipe.recv()
    inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    # Started before the slow imports, so that a loading child ends with its parent.
    threading.Thread(target=_read, args=(pipe, inbox), name="reader", daemon=True).start()
    try:
        with without_cuda_notices():
            from jaxpaged.engine.engine import Engine
            from jaxpaged.engine.loop import run_engine_loop

        engine = Engine(config, logger.info)
        # The objects of the start are permanent. Walking through them again takes the collector a tenth of a second,
        # in which no step is scheduled.
        gc.collect()
        gc.freeze()
        _send(pipe, engine.info)
        run_engine_loop(engine, _receiver(pipe, inbox), lambda outputs: _send(pipe, outputs))
        engine.shutdown()
    except JaxpagedError as error:
        _send(pipe, EngineFailure(str(error)))
        return 1
    except Exception as error:
        # One line, which the parent sends to every client; the log has the traceback.
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        _send(pipe, EngineFailure(f"the engine failed with {type(error).__name__}: {reason}"))
        logger.exception("the engine failed")
        return 1
    return 0


def _receiver(pipe: Connection, inbox: "queue.SimpleQueue[list[Any]]") -> Callable[[bool], list[Any]]:
    def receive(block: bool) -> list[Any]:
        """All messages so far. With `block`, wait for at least one and send the parent heartbeats meanwhile."""
        messages: list[Any] = []
        while block and not messages:
            try:
                messages += inbox.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                _send(pipe, Heartbeat())
        while True:
            try:
                messages += inbox.get_nowait()
            except queue.Empty:
                return messages

    return receive


def _read(pipe: Connection, inbox: "queue.SimpleQueue[list[Any]]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)  # the parent has ended, and the engine may be inside native code


def _send(pipe: Connection, message: object) -> None:
    try:
        pipe.send(message)
    except OSError:
        os._exit(1)
