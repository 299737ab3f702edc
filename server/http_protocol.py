"""The HTTP parser: httptools if installed, with the limit on head sizes that it lacks; h11 otherwise."""

import asyncio
from typing import Literal

from starlette.types import Receive, Scope, Send

from jaxpaged.server.protocol.error_answers import RETRY_AFTER_SECONDS, error_json


def http_protocol(max_head_bytes: int) -> type[asyncio.Protocol] | Literal["h11"]:
    """The protocol for uvicorn. h11 limits the size of a head itself."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHead(HttpToolsProtocol):
        """Closes connections whose request line and headers exceed the limit, complete or not.

        Too many connections get an OpenAI error object; uvicorn's own answer is plain text.
        """

        _arrived = 0  # bytes since the end of the last message
        _in_head = _too_long = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._max_connections, self.limit_concurrency = self.config.limit_concurrency, None

        def data_received(self, data: bytes) -> None:
            self._arrived += len(data)
            super().data_received(data)
            if self._in_head and self._arrived > max_head_bytes and not self._too_long:
                self._too_long = True
                self.send_400_response("")

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > max_head_bytes:
                self._too_long = True
                raise ValueError("the head is too long")  # stops the parser; uvicorn answers 400
            self.app = self.config.loaded_app
            limit = self._max_connections
            if limit is not None and max(len(self.connections), len(self.tasks)) >= limit:
                self.app = _too_many_connections
                self.logger.warning("refusing a request: %d connections are open", len(self.connections))
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._arrived = 0
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            if self._too_long:
                msg = f"The request's line and headers exceed {max_head_bytes} bytes."
            super().send_400_response(msg)

    return BoundedHead


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    body = error_json("too many connections (--max-connections); try again later", "overloaded_error")
    await send({"type": "http.response.start", "status": 503, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()), (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
