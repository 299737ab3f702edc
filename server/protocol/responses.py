"""Reading request bodies within a limit, noticing disconnects, and writing answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxpaged.core.errors import EngineDeadError
from jaxpaged.server.protocol.error_answers import BodyTooLargeError, MediaTypeError, error_json


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes; memory stays bounded whatever the client sends.

    Raises:
        BodyTooLargeError: the body is larger.
        MediaTypeError: a content type or encoding other than plain JSON.
    """
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise MediaTypeError("the content type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("compressed request bodies are not supported")
    too_large = BodyTooLargeError(f"the request body exceeds {limit} bytes (--max-request-bytes)")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


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


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with a JSON body."""
    return Response(body, status, headers=headers, media_type="application/json")


def server_error(error: Exception) -> bytes:
    """OpenAI's error object for a failure of the server."""
    return error_json(str(error), "service_unavailable" if isinstance(error, EngineDeadError) else "internal_error")
