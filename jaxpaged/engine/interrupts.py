"""Ctrl-C between steps only: an interrupt inside a step leaves an engine that cannot continue."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class DeferredInterrupts:
    """Defers Ctrl-C inside its with statement to the next `check`, or to the end; a second one is not deferred.

    It does nothing outside the main thread, which alone receives interrupts, nor where the program ignores them.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._pending = False

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.check()

    def check(self) -> None:
        """Deliver a deferred interrupt, which by default raises KeyboardInterrupt."""
        if self._pending and self._previous is not None:
            self._pending = False
            self._previous(signal.SIGINT, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending and self._previous is not None:
            self._previous(number, frame)
        self._pending = True
