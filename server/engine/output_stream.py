"""What the engine has made for one HTTP call and nobody has read yet."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpaged.core.errors import JaxpagedError
from jaxpaged.core.outputs import CompletionOutput, RequestOutput

_MOST_UNMERGED = 64  # parts of a request that wait unread; merging each one as it comes would cost quadratic time


class RequestFailedError(JaxpagedError):
    """The engine has given up one request and goes on with the others."""


class StreamClosedError(JaxpagedError):
    """Nobody waits for these outputs any more."""


class OutputStream:
    """Outputs of the requests of one HTTP call. What nobody has read yet is merged, so that it stays small.

    Args:
        max_unread: tokens and alternatives to them that may wait; None for a call that is read at its end.
        per_token: a token and its alternatives.

    Attributes:
        admitted: sequences that count against the server's capacity.
        closed: nobody waits any more.
        preparing: what is made of the prompts before they are submitted, while that goes on.
        running: request id -> number of its sequences, of those that have not ended.
    """

    def __init__(self, admitted: int, max_unread: int | None = None, per_token: int = 1) -> None:
        self.admitted = admitted
        self._max_unread, self._per_token = max_unread, per_token
        self._num_unread = 0
        self.closed = False
        self.preparing: asyncio.Future[Any] | None = None
        self.running: dict[str, int] = {}
        self._news: dict[str, list[RequestOutput]] = {}
        self._error: Exception | None = None
        self._wake, self._complete = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()  # of the last `get`
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> bool:
        """Add the newest part of one request; False if too much waits, which fails the stream."""
        parts = self._news.setdefault(output.request_id, [])
        parts.append(output)
        if len(parts) == _MOST_UNMERGED:
            parts[:] = [merge_outputs(parts)]
        self._wake.set()
        if self._max_unread is None:
            return True
        self._num_unread += self._per_token * sum(len(choice.token_ids) for choice in output.outputs)
        if self._num_unread <= self._max_unread:
            return True
        self._news.clear()
        self.fail(RequestFailedError(f"the client has left more than {self._max_unread} tokens, and alternatives to "
                                     "them, unread"))
        return False

    def end(self, request_id: str) -> None:
        """Note that a request has ended."""
        self.admitted -= self.running.pop(request_id)
        if not self.running:
            self._complete.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error; the first one stays."""
        self._error = self._error or error
        if self.preparing is not None:
            self.preparing.cancel()
        self._wake.set()
        self._complete.set()

    def wake_every(self, seconds: float) -> None:
        """From now on `get` returns without news after so long without any.

        One timer, that looks at the clock: setting one for each `get` cost a tenth of what a token costs here.
        """
        quiet = self._loop.time() - self._last
        if quiet >= seconds:
            quiet = 0.0
            self._wake.set()
        if not self.closed:
            self._timer = self._loop.call_later(seconds - quiet, self.wake_every, seconds)

    def close(self) -> None:
        """Nobody waits for it any more."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Raise what the stream has failed with, if it has."""
        if self._error is not None:
            raise self._error

    async def get(self) -> list[RequestOutput]:
        """What has come since the last call, each request at most once; at least one part, but see `wake_every`.

        Raises:
            Exception: what the stream failed with, as soon as it has.
        """
        await self._wake.wait()
        self.check()
        self._wake.clear()
        self._last = self._loop.time()
        news = [merge_outputs(parts) for parts in self._news.values()]
        self._news.clear()
        self._num_unread = 0
        return news

    async def get_all(self) -> list[RequestOutput]:
        """Everything, once all requests have ended.

        Raises:
            Exception: what the stream failed with.
        """
        await self._complete.wait()
        return await self.get()


def merge_outputs(parts: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive DELTA outputs of one request as one."""
    if len(parts) == 1:
        return parts[0]
    choices: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        for choice in part.outputs:
            choices.setdefault(choice.index, []).append(choice)
    return replace(parts[-1], outputs=tuple(
        replace(pieces[-1], text="".join(piece.text for piece in pieces),
                token_ids=tuple(number for piece in pieces for number in piece.token_ids),
                logprobs=None if pieces[-1].logprobs is None else tuple(
                    entry for piece in pieces for entry in piece.logprobs or ()),
                text_offsets=tuple(place for piece in pieces for place in piece.text_offsets))
        for _, pieces in sorted(choices.items())))
