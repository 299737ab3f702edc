"""Noticing disconnects, and writing answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxpaged.core.errors import EngineDeadError, UnavailableError
from jaxpaged.server.protocol.error_answers import error_json

PIECE_BYTES = 2**18  # of a large body


@contextlib.contextmanager
def on_disconnect(receive: Receive, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` if the client disconnects while the block runs. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        action()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class EventStream(Response):
    """A stream of server-sent events; each item of `events` holds one or more whole events.

    Args:
        close: called if the client disconnects and again at the end in any case; ends `events`.
    """

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache",
                                                                  "x-accel-buffering": "no"})
        del self.headers["content-length"]  # Response sets that of an empty body
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with on_disconnect(receive, self._close):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()


class JsonParts(Response):
    """An answer with a JSON body that may be large; it is written bit by bit, as fast as the client reads."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        rest = iter(self._parts)
        while True:
            piece = bytearray()
            for part in rest:
                piece += part
                if len(piece) >= PIECE_BYTES:
                    break
            else:
                await send({"type": "http.response.body", "body": bytes(piece)})
                return
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with a JSON body."""
    return Response(body, status, headers=headers, media_type="application/json")


def server_error(error: Exception) -> bytes:
    """OpenAI's error object for a failure of the server."""
    unavailable = isinstance(error, (EngineDeadError, UnavailableError))
    return error_json(str(error), "service_unavailable" if unavailable else "internal_error")
