"""The HTTP side's client of the engine process: sends requests, routes outputs to their streams, watches its health.

Call all methods but `shutdown` and `kill` from the event loop's thread. Two threads serve the pipe, so that neither a
large message nor a stalled engine blocks the loop; each batch from the engine is one callback in the loop.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import EngineDeadError, JaxpagedError, OverloadedError, RequestError
from jaxpaged.core.messages import (
    AbortRequests,
    DescribePool,
    EngineFailure,
    EngineInfo,
    EngineOutputs,
    PoolState,
    ResetPrefixCache,
    Shutdown,
)
from jaxpaged.frontend.front import Front
from jaxpaged.frontend.input_processor import ProcessedRequest
from jaxpaged.server.engine.output_stream import OutputStream, RequestFailedError, StreamClosedError
from jaxpaged.server.engine.process import EngineProcess

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0  # between two looks at an engine that may be hung
POOL_STATE_SECONDS = 0.25  # a pool state is reused for this long


class StartError(JaxpagedError):
    """The engine could not start."""


class EngineClient:
    """Starts the engine process and talks to it.

    Args:
        config: for the engine; its model is a local path.
        timeout: seconds without a message after which a running engine counts as hung.
        on_death: called once if the engine ends unexpectedly.
        on_stall: called each time that it begins to count as hung, after its running requests have failed.
    """

    def __init__(self, config: EngineConfig, *, timeout: float, on_death: Callable[[], None],
                 on_stall: Callable[[], None]) -> None:
        self._max_waiting = config.max_waiting_requests
        self._timeout, self._on_death, self._on_stall = timeout, on_death, on_stall
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._process = EngineProcess(config)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last_seen = time.monotonic()
        self._ended: str | None = None
        self._closing = False
        self._pool: asyncio.Future[PoolState] | None = None
        self._pool_time = 0.0
        self._unfinished = 0
        self._streams: dict[str, OutputStream] = {}
        self._admitted: set[OutputStream] = set()
        for target in (self._receive, self._send):
            threading.Thread(target=target, name=f"engine{target.__name__}", daemon=True).start()

    async def ready(self) -> EngineInfo:
        """Wait until the engine can serve.

        Raises:
            StartError: it could not start; the text says what to change.
        """
        return await asyncio.shield(self._ready)

    def serve(self, info: EngineInfo, front: Front) -> None:
        """Start to accept requests."""
        self._capacity = info.max_num_seqs + self._max_waiting
        self._front = front
        self._watching = self._loop.create_task(self._watch())

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def fault(self) -> str | None:
        """What is wrong with the engine; None while it is healthy."""
        if self._ended is not None:
            return self._ended
        silent = time.monotonic() - self._last_seen
        return f"the engine has made no progress for {silent:.0f} s" if silent > self._timeout else None

    def admit(self, count: int, max_unread: int | None = None, per_token: int = 1) -> OutputStream:
        """Reserve capacity for `count` sequences before any work is done on them; `close` releases it.

        Args:
            max_unread, per_token: see `OutputStream`.

        Raises:
            EngineDeadError: the engine does not run.
            OverloadedError: too many are waiting.
            RequestError: `count` is above the capacity.
        """
        fault = self.fault()
        if fault is not None:
            raise EngineDeadError(fault)
        if count > self._capacity:
            raise RequestError(f"the request asks for {count} sequences at once and the server takes at most "
                               f"{self._capacity} (--max-num-seqs and --max-waiting-requests)", param="n")
        if self._unfinished + count > self._capacity:
            raise OverloadedError("too many requests are waiting (--max-waiting-requests); try again later")
        self._unfinished += count
        stream = OutputStream(count, max_unread, per_token)
        self._admitted.add(stream)
        return stream

    def submit(self, stream: OutputStream, requests: Sequence[ProcessedRequest]) -> None:
        """Send admitted requests to the engine; their outputs arrive at `stream`.

        Raises:
            StreamClosedError: the stream was closed in the meantime.
        """
        if stream.closed:
            raise StreamClosedError("the request was cancelled")
        messages: list[Any] = []
        for request in requests:
            self._front.add_request(request)
            self._streams[request.request_id] = stream
            stream.running[request.request_id] = request.params.num_sequences
            messages += request.sequences
        self._outbox.put(messages)

    def close(self, stream: OutputStream) -> None:
        """Abort the stream's unfinished requests, release its capacity and wake its reader. May be called again."""
        sequences: list[str] = []
        for request_id in list(stream.running):
            sequences += self._front.abort(request_id, time.monotonic())
            self._release(stream, request_id)
        if sequences:
            self._outbox.put([AbortRequests(tuple(sequences))])
        self._unfinished -= stream.admitted
        self._admitted.discard(stream)
        stream.admitted = 0
        stream.close()
        stream.fail(StreamClosedError("the request was cancelled"))

    def fail_all(self, error: Exception) -> None:
        """End every stream with an error."""
        for stream in self._admitted:
            stream.fail(error)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self._outbox.put([ResetPrefixCache()])

    async def pool_state(self) -> PoolState:
        """The use of every KV block; calls shortly after one another share one answer.

        Raises:
            EngineDeadError: the engine has ended or does not answer.
        """
        if self._pool is None or (self._pool.done() and time.monotonic() - self._pool_time > POOL_STATE_SECONDS):
            self._pool = self._loop.create_future()
            self._outbox.put([DescribePool()])
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(self._pool)
        except TimeoutError:
            raise EngineDeadError(self.fault() or "the engine does not answer") from None

    async def wait_until_idle(self, timeout: float) -> None:
        """Wait until no stream is admitted any more, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def shutdown(self, timeout: float) -> None:
        """End the engine process; kill it after `timeout` seconds."""
        self._closing = True
        self._outbox.put([Shutdown()])
        self._process.join(timeout)

    def kill(self) -> None:
        """End the engine process at once."""
        self._closing = True
        self._process.kill()

    async def _watch(self) -> None:
        """End the running requests of an engine that gives no sign of life."""
        stalled = False
        while self._ended is None:
            await asyncio.sleep(min(self._timeout / 4, WATCH_SECONDS))
            fault = self.fault()
            if fault is not None and not stalled and self._ended is None:
                logger.error("%s: its requests end with an error (--engine-timeout)", fault)
                self.fail_all(EngineDeadError(fault))
                self._on_stall()
            stalled = fault is not None

    def _release(self, stream: OutputStream, request_id: str) -> None:
        del self._streams[request_id]
        self._unfinished -= stream.running[request_id]
        stream.end(request_id)
        if not stream.running:
            self._admitted.discard(stream)

    def _send(self) -> None:
        while True:
            messages = list(self._outbox.get())
            while not self._outbox.empty():
                messages += self._outbox.get()
            try:
                self._process.pipe.send(messages)
            except OSError:
                return  # the receiving thread reports the end

    def _receive(self) -> None:
        try:
            while True:
                message = self._process.pipe.recv()
                self._last_seen = time.monotonic()
                if isinstance(message, EngineFailure):
                    self._loop.call_soon_threadsafe(self._on_end, message.message)
                elif isinstance(message, (EngineOutputs, EngineInfo)):
                    self._loop.call_soon_threadsafe(self._on_message, message)
        except (EOFError, OSError):
            if not self._closing:
                self._loop.call_soon_threadsafe(self._on_end, self._process.exit_reason())
        except RuntimeError:  # the loop is closed: the server has ended
            return

    def _on_message(self, message: EngineOutputs | EngineInfo) -> None:
        if isinstance(message, EngineInfo):
            self._ready.set_result(message)
            return
        now = time.monotonic()
        if message.pool is not None and self._pool is not None and not self._pool.done():
            self._pool_time = now
            self._pool.set_result(message.pool)
        done = self._front.process_outputs(message, now)
        if done.to_abort:
            self._outbox.put([AbortRequests(tuple(done.to_abort))])
        overrun: set[OutputStream] = set()
        for output in done.outputs:
            stream = self._streams[output.request_id]
            if output.request_id in done.errors:
                self._front.metrics.fail_request(output.request_id, now)
                stream.fail(RequestFailedError(done.errors[output.request_id]))
            elif not stream.put(output):
                overrun.add(stream)
            if output.finished:
                self._release(stream, output.request_id)
        for stream in overrun:
            self.close(stream)

    def _on_end(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        if not self._ready.done():
            self._ready.set_exception(StartError(reason))
            return
        logger.error("the engine has ended: %s", reason)
        self.fail_all(EngineDeadError(reason))
        if self._pool is not None and not self._pool.done():
            self._pool.set_exception(EngineDeadError(reason))
        self._on_death()
