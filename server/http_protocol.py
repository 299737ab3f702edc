"""The HTTP parser: uvicorn's for httptools, with the limits that it lacks.

It bounds heads and trailers in size and time, makes room for new connections, and notices that a client has left
whatever else the client has sent. It declines upgrades, which some clients offer with every request.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxpaged.server.protocol.error_answers import RETRY_AFTER_SECONDS, error_json

LINGER_SECONDS = 0.5  # between a refusal and the end of the connection
_OF_UPGRADES = (b"upgrade", b"http2-settings")  # headers, and what `connection` says of them
MAX_PIPELINED = 8  # requests that may wait for the answer to an earlier one on the same connection


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """What clients may take before any of a request is known.

    Attributes:
        max_head_bytes: of a request's line and headers, of its trailers, and of what waits behind a running request.
        head_timeout: seconds from the connection, or the first byte, to the end of the headers.
        write_timeout: seconds for a client to read on while an answer waits.
        max_connections: with as many open, one more replaces the oldest that has sent no request, or gets 503.
    """

    max_head_bytes: int
    head_timeout: float
    write_timeout: float
    max_connections: int


def http_protocol(bounds: HttpBounds) -> type[asyncio.Protocol]:
    """The protocol for one uvicorn server."""
    waiting: dict[BoundedHttp, None] = {}

    def make(**arguments: Any) -> BoundedHttp:
        return BoundedHttp(bounds, waiting, **arguments)

    return cast(type[asyncio.Protocol], make)  # uvicorn only calls it


class BoundedHttp(HttpToolsProtocol):
    """One connection.

    Args:
        waiting: the connections that wait for a head, the oldest first; shared by all of the server.
        arguments: uvicorn's.
    """

    def __init__(self, bounds: HttpBounds, waiting: "dict[BoundedHttp, None]", **arguments: Any) -> None:
        super().__init__(**arguments)
        self._bounds, self._waiting = bounds, waiting
        self._arrived = 0  # bytes since the start of the head, or since the last part of the body
        self._in_head = False
        self._too_long = False
        self._ignoring = False  # of whatever else the client sends
        self._declined: bytes | None = None  # the head of a request that offers an upgrade, without the offer
        self._running: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head, in place of the longest waiting connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            # Not one whose client is still reading an answer.
            oldest = next((other for other in self._waiting if not other.transport.get_write_buffer_size()), None)
            if oldest is not None:
                del self._waiting[oldest]
                self.connections.discard(oldest)
                oldest.transport.abort()
        self._waiting[self] = None
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request, too, where others wait behind it: uvicorn tells only the last one."""
        self._waiting.pop(self, None)
        _cancel(self._head_timer)
        _cancel(self._write_timer)
        running = self._running
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, within the bounds."""
        if self._ignoring:
            return
        if self._head_timer is None and self in self._waiting:
            self._start_head_timer()
        self._arrived += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.logger.warning("invalid HTTP request received")
            self.send_400_response("")
        if self._arrived > self._bounds.max_head_bytes and not self._ignoring:
            self._too_long = True
            self.send_400_response("")

    def _feed(self, data: bytes) -> None:
        while not self._ignoring:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # The parser has left out the body, as if the upgrade were accepted: it starts again without the offer.
                assert self._declined is not None
                data, self._declined = self._declined + data[upgrade.args[0]:], None
                self.parser = httptools.HttpRequestParser(self)  # the other reads nothing more if this is the last one
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            else:
                return

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep headers, not the trailers of a chunked body."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait behind the one that runs, while still noticing that the client leaves."""
        if self._ignoring:
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > \
                self._bounds.max_head_bytes:
            self._too_long = True
            raise ValueError("the head is too long")  # stops the parser; `send_400_response` answers
        if self.parser.should_upgrade():
            self._declined = self._head_without_upgrade()
            return
        self._in_head = False
        self._waiting.pop(self, None)
        _cancel(self._head_timer)
        self._head_timer = None
        self.app = self.config.loaded_app
        if max(len(self.connections), len(self.tasks)) > self._bounds.max_connections:
            self.app = _too_many_connections
            self.logger.warning("refusing a request: %d connections are open", len(self.connections))
        waits = self._is_busy()
        super().on_headers_complete()
        if not waits:
            self._running = self.cycle
        else:
            self.flow.resume_reading()  # uvicorn stops here, which would hide the end of the connection
            if len(self.pipeline) > MAX_PIPELINED:
                self._ignore_the_rest()

    def on_body(self, body: bytes) -> None:
        """Add to the body of the newest request; one that does not run yet may hold little."""
        self._arrived = 0
        if self._ignoring:
            return
        if self.cycle is not self._running and len(self.cycle.body) + len(body) > self._bounds.max_head_bytes:
            self._ignore_the_rest()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The newest request has arrived."""
        if self._declined is not None:
            return
        self._arrived = 0
        if not self._ignoring:
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("a tunnel is asked for, not an upgrade")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _OF_UPGRADES)
            if name not in _OF_UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_response_complete(self) -> None:
        """Start the next request, or wait for one."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._running = following
        elif not self.transport.is_closing():
            self._waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too long, and close the connection."""
        running = self._running
        if not self._too_long and running is not None and running is self.cycle and running.more_body \
                and not running.response_started:
            running.disconnected = True  # nobody waits for the rest of its body any longer
            running.message_event.set()
        elif self._is_busy():
            self._ignore_the_rest()  # an answer that is being written stays whole
            return
        message = "the request is not valid HTTP"
        if self._too_long:
            message = f"the request's line and headers, or its trailers, exceed {self._bounds.max_head_bytes} bytes"
        self._refuse(b"400 Bad Request", message)

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer is written."""
        super().pause_writing()
        self._watch_reader(None)

    def resume_writing(self) -> None:
        """The client reads on."""
        super().resume_writing()
        _cancel(self._write_timer)

    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _ignore_the_rest(self) -> None:
        """Close the connection after the running request. Reading goes on, to notice an earlier end."""
        self._ignoring = True
        self.pipeline.clear()
        assert self._running is not None
        self._running.keep_alive = False

    def _refuse(self, status: bytes, message: str) -> None:
        self._ignoring = True
        _cancel(self._head_timer)
        # Otherwise nothing was asked, or what was asked has been answered.
        if (self._arrived and (self._in_head or self._running is None)) or (
                self._running is not None and not self._running.response_started):
            body = error_json(message, "invalid_request_error")
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                                 b"connection: close\r\n\r\n%b" % (status, len(body), body))
            # Closed at once, what still arrives would reset the connection, and the client would not see the answer.
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._bounds.head_timeout, self._end_silence)

    def _watch_reader(self, unread: int | None) -> None:
        """End a connection whose client has read nothing since there were `unread` bytes."""
        size = self.transport.get_write_buffer_size()
        if unread is not None and size >= unread:
            self.transport.abort()
        else:
            self._write_timer = self.loop.call_later(self._bounds.write_timeout, self._watch_reader, size)

    def _end_silence(self) -> None:
        self._refuse(b"408 Request Timeout", f"the request's line and headers did not arrive within "
                     f"{self._bounds.head_timeout:g} s (--head-timeout)")


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    body = error_json("too many connections (--max-connections); try again later", "overloaded_error")
    await send({"type": "http.response.start", "status": 503, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()), (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
