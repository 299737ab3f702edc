"""How many of a choice's tokens are reasoning."""

from collections.abc import Callable, Iterable

from jaxpaged.core.reasoning import ReasoningStart


class ReasoningTokens:
    """Counts the tokens between the marks of the reasoning; one that also holds a part of a mark counts.

    Args:
        start: where the choice begins.
        token_bytes: the bytes of a token.
    """

    def __init__(self, start: ReasoningStart, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._begin, self._end = start.format.begin.encode(), start.format.end.encode()
        self._inside, self._after = start.phase == "inside", start.phase == "after"
        self._opening = not start.held or not self._inside  # the opening mark may come next
        self._held = start.held.encode()  # what may turn out to be a mark
        self._owners = [0] * len(self._held)  # the token, from 1 on, that each byte of it belongs to; 0 for the prompt
        self._num_seen = self._last_counted = 0
        self.count = 0

    def add_tokens(self, ids: Iterable[int], last: bool) -> None:
        """Count the next tokens; `last` if none follow."""
        for token in ids:
            if self._after:
                return
            self._num_seen += 1
            data = self._token_bytes(token)
            self._held += data
            self._owners += [self._num_seen] * len(data)
            self._decide()
        if last and self._inside:
            self._release(len(self._held))

    def _decide(self) -> None:
        """Find the marks in what is held, and release what cannot be part of one."""
        if self._opening and not self._after:
            text = self._held.lstrip()
            if self._begin.startswith(text) and text != self._begin:
                return
            self._opening = False
            if text.startswith(self._begin):
                self._inside = True
                self._drop(len(self._held) - len(text) + len(self._begin))
            self._after = not self._inside
        if self._inside and not self._after:
            found = self._held.find(self._end)
            keep = next(size for size in range(len(self._end) - 1, -1, -1) if self._held.endswith(self._end[:size]))
            self._release(found if found >= 0 else len(self._held) - keep)
            self._inside, self._after = found < 0, found >= 0

    def _release(self, size: int) -> None:
        """Count the tokens of the first bytes held, which are reasoning."""
        owners = {owner for owner in self._owners[:size] if owner > self._last_counted}
        if owners:
            self.count += len(owners)
            self._last_counted = max(owners)
        self._drop(size)

    def _drop(self, size: int) -> None:
        self._held, self._owners = self._held[size:], self._owners[size:]
