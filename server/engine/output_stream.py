"""Outputs of one HTTP request that the engine has produced and the client has not read yet."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpaged.core.errors import JaxpagedError
from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.frontend.lazy_logprobs import join_logprobs

_MAX_UNMERGED = 64  # unread parts of a request; merging each one on arrival would take quadratic time


class RequestFailedError(JaxpagedError):
    """The engine has failed one request and continues with the others."""


class StreamClosedError(JaxpagedError):
    """The stream was closed; its outputs are no longer needed."""


class OutputStream:
    """Outputs of the engine requests of one HTTP request. Unread ones are merged to save memory.

    Args:
        max_unread: maximum number of unread tokens and alternatives; None if the answer is not streamed.
        per_token: 1 plus the number of alternatives.

    Attributes:
        admitted: number of sequences that count against the server's capacity.
        closed: its outputs are no longer needed.
        preparing: the pending work on the prompts before they are submitted.
        running: request id -> number of its sequences, for unfinished requests.
    """

    def __init__(self, admitted: int, max_unread: int | None = None, per_token: int = 1) -> None:
        self.admitted = admitted
        self._max_unread, self._per_token = max_unread, per_token
        self._num_unread = 0
        self.closed = False
        self.preparing: asyncio.Future[Any] | None = None
        self.running: dict[str, int] = {}
        self._new_outputs: dict[str, list[RequestOutput]] = {}
        self._error: Exception | None = None
        self._wake, self._complete = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()  # time of the last `get`
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> bool:
        """Add new output of one request; False if too much is unread, which fails the stream."""
        parts = self._new_outputs.setdefault(output.request_id, [])
        parts.append(output)
        if len(parts) == _MAX_UNMERGED:
            parts[:] = [merge_outputs(parts)]
        self._wake.set()
        if self._max_unread is None:
            return True
        self._num_unread += self._per_token * sum(len(choice.token_ids) for choice in output.outputs)
        if self._num_unread <= self._max_unread:
            return True
        self._new_outputs.clear()
        self.fail(RequestFailedError(f"the client has left more than {self._max_unread} tokens and alternatives "
                                     "unread"))
        return False

    def end(self, request_id: str) -> None:
        """Record the end of a request."""
        self.admitted -= self.running.pop(request_id)
        if not self.running:
            self._complete.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error; the first one wins."""
        self._error = self._error or error
        if self.preparing is not None:
            self.preparing.cancel()
        self._wake.set()
        self._complete.set()

    def wake_every(self, seconds: float) -> None:
        """Let `get` return an empty list after this long without new output.

        One timer checks the clock: setting one for each `get` takes a tenth of the time per token.
        """
        quiet = self._loop.time() - self._last
        if quiet >= seconds:
            quiet = 0.0
            self._wake.set()
        if not self.closed:
            self._timer = self._loop.call_later(seconds - quiet, self.wake_every, seconds)

    def close(self) -> None:
        """Mark the stream as closed and stop its timer."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Raise the error that the stream has failed with, if any."""
        if self._error is not None:
            raise self._error

    async def get(self) -> list[RequestOutput]:
        """The new outputs, at most one per request; empty only after `wake_every`.

        Raises:
            Exception: the stream has failed.
        """
        await self._wake.wait()
        self.check()
        self._wake.clear()
        self._last = self._loop.time()
        outputs = [merge_outputs(parts) for parts in self._new_outputs.values()]
        self._new_outputs.clear()
        self._num_unread = 0
        return outputs

    async def get_all(self) -> list[RequestOutput]:
        """All outputs, once all requests have ended.

        Raises:
            Exception: the stream has failed.
        """
        await self._complete.wait()
        return await self.get()


def merge_outputs(parts: Sequence[RequestOutput]) -> RequestOutput:
    """Join consecutive DELTA outputs of one request."""
    if len(parts) == 1:
        return parts[0]
    choices: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        for choice in part.outputs:
            choices.setdefault(choice.index, []).append(choice)
    return replace(parts[-1], outputs=tuple(
        replace(deltas[-1], text="".join(delta.text for delta in deltas),
                token_ids=tuple(token for delta in deltas for token in delta.token_ids),
                logprobs=None if deltas[-1].logprobs is None else join_logprobs(
                    delta.logprobs or () for delta in deltas),
                text_offsets=tuple(offset for delta in deltas for offset in delta.text_offsets))
        for _, deltas in sorted(choices.items())))
