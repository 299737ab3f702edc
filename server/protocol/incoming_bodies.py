"""Receiving request bodies: bounded in size and in time, each by itself and all together."""

import asyncio

from starlette.requests import Request

from jaxpaged.server.protocol.error_answers import (
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
    TooManyBodiesError,
)


class IncomingBodies:
    """The bodies that are being received. Belongs to the event loop's thread.

    Args:
        max_bytes: of one body.
        max_total_bytes: of all that have not arrived completely; beyond it the largest of them is given up.
        timeout: seconds for one body.
    """

    def __init__(self, *, max_bytes: int, max_total_bytes: int, timeout: float) -> None:
        self._max_bytes, self._max_total_bytes, self._timeout = max_bytes, max_total_bytes, timeout
        self._sizes: dict[asyncio.Timeout, int] = {}
        self._total = 0
        self._given_up: set[asyncio.Timeout] = set()

    async def read(self, request: Request) -> bytes:
        """The body of a request; memory stays bounded whatever clients send.

        Raises:
            BodyTooLargeError: it is too large.
            BodyTimeoutError: it did not arrive in time, or `end_all` was called.
            TooManyBodiesError: it was given up for others.
            MediaTypeError: a content type or encoding other than plain JSON.
        """
        self._check_headers(request)
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                self._sizes[deadline] = 0
                parts = []
                async for part in request.stream():
                    parts.append(part)
                    self._grow(deadline, len(part))
                return b"".join(parts)
        except TimeoutError:
            if deadline in self._given_up:
                raise TooManyBodiesError("too many large request bodies are being received; try again later") from None
            raise BodyTimeoutError(f"the request body did not arrive within {self._timeout:g} s (--body-timeout)"
                                   ) from None
        finally:
            self._total -= self._sizes.pop(deadline, 0)
            self._given_up.discard(deadline)

    def end_all(self) -> None:
        """Wait for none of the present bodies any longer."""
        for deadline in self._sizes:
            deadline.reschedule(0.0)

    def _check_headers(self, request: Request) -> None:
        media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise MediaTypeError("the content type must be application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise MediaTypeError("compressed request bodies are not supported")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()

    def _grow(self, deadline: asyncio.Timeout, count: int) -> None:
        if deadline not in self._sizes:
            return  # given up already
        self._sizes[deadline] += count
        self._total += count
        if self._sizes[deadline] > self._max_bytes:
            raise self._too_large()
        if self._total > self._max_total_bytes:
            largest = max(self._sizes, key=lambda other: self._sizes[other])
            self._total -= self._sizes.pop(largest)
            self._given_up.add(largest)
            largest.reschedule(0.0)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the request body exceeds {self._max_bytes} bytes (--max-request-bytes)")
