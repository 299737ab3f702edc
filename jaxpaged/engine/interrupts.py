"""Ctrl-C at a moment of our choice: a step that is broken off in the middle leaves an engine that cannot go on."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class DeferredInterrupts:
    """In its with statement Ctrl-C waits for the next `check`, or for the end; a second one does not wait.

    It does nothing outside of the main thread, which alone gets interrupts, nor where the program ignores them.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._waiting = False

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self.check()

    def check(self) -> None:
        """Let in an interrupt that has come, which by default raises KeyboardInterrupt."""
        if self._waiting and self._before is not None:
            self._waiting = False
            self._before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waiting and self._before is not None:
            self._before(number, frame)
        self._waiting = True
