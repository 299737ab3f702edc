"""Request bodies that are still being received: bounded each by itself, and all together."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from starlette.requests import Request

from jaxpaged.server.protocol.error_answers import (
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
    TooManyBodiesError,
    error_status,
)
from jaxpaged.server.protocol.incoming_bodies import IncomingBodies


class Sender:
    """A client that sends a body bit by bit."""

    def __init__(self, **headers: str) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.request = Request({"type": "http", "headers": pairs}, self._parts.get)

    async def send(self, size: int, last: bool = False) -> None:
        self._parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": not last})
        for _ in range(5):
            await asyncio.sleep(0)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 10)

    asyncio.run(bounded())


def test_the_largest_half_sent_body_gives_way() -> None:
    async def test() -> None:
        bodies = IncomingBodies(max_bytes=80, max_total_bytes=100, timeout=60)
        clients = [Sender() for _ in range(4)]
        reading = [asyncio.create_task(bodies.read(client.request)) for client in clients]
        for client, size in zip(clients, (60, 30, 5, 20), strict=True):
            await client.send(size)
        error = (await asyncio.gather(reading[0], return_exceptions=True))[0]
        assert isinstance(error, TooManyBodiesError) and error_status(error) == 503
        for client, size in zip(clients[1:], (40, 5, 5), strict=True):  # 105 in all, 35 of them arrived already
            await client.send(size, last=True)
        assert [len(body) for body in await asyncio.gather(*reading[1:])] == [70, 10, 25]
        # What has arrived or was given up no longer counts.
        again = [Sender(), Sender()]
        reading = [asyncio.create_task(bodies.read(client.request)) for client in again]
        for client in again:
            await client.send(50)
            await client.send(0, last=True)
        assert [len(body) for body in await asyncio.gather(*reading)] == [50, 50]

    run(test())


def test_one_body_is_bounded_in_size_and_time() -> None:
    async def test() -> None:
        bodies = IncomingBodies(max_bytes=80, max_total_bytes=1000, timeout=0.05)
        for headers, sizes, error, status in (
            ({"content_length": "81"}, (), BodyTooLargeError, 413), ({}, (40, 41), BodyTooLargeError, 413),
            ({}, (40, 40), BodyTimeoutError, 408), ({"content_type": "text/plain"}, (), MediaTypeError, 415),
            ({"content_encoding": "gzip"}, (), MediaTypeError, 415),
        ):
            client = Sender(**headers)
            reading = asyncio.create_task(bodies.read(client.request))
            for size in sizes:
                await client.send(size)
            with pytest.raises(error) as caught:
                await reading
            assert error_status(caught.value) == status

    run(test())
