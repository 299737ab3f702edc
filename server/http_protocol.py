"""The HTTP parser: httptools where it is installed, with the limit on heads that it lacks; h11 otherwise."""

import asyncio
from typing import Literal

MAX_HEAD_BYTES = 64 * 1024


def http_protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """What uvicorn should use. h11 limits the size of a head itself."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHead(HttpToolsProtocol):
        """Closes connections whose request line and headers do not end within MAX_HEAD_BYTES."""

        _head_bytes: int | None = 0

        def data_received(self, data: bytes) -> None:
            if self._head_bytes is not None:
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.send_400_response("The request's headers are too long.")
                    return
                self._head_bytes += len(data)
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._head_bytes = None
            super().on_headers_complete()

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            super().on_message_begin()

    return BoundedHead
