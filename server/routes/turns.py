"""Long work on one answer, done in turns with all else that the event loop has to do."""

import asyncio
import time

SECONDS = 0.004


class Turn:
    """A stretch of work on one answer, after which the event loop has its turn."""

    def __init__(self) -> None:
        self._ends = time.monotonic() + SECONDS

    @property
    def is_over(self) -> bool:
        """Whether others have waited long enough."""
        return time.monotonic() > self._ends

    async def start_next(self) -> None:
        """Let the event loop do all that it has to do now."""
        await asyncio.sleep(0)
        self._ends = time.monotonic() + SECONDS
