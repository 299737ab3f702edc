"""Predicts output lengths: quantiles over the requests that have finished recently.

Requests are grouped by what is known before the first token: the length of the prompt, max_tokens and the caller's
hint, each in buckets of powers of two. A bucket holds its latest lengths only, so that it follows a drift and its
memory is bounded.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque

from jaxpaged.core.messages import EngineRequest

WINDOW = 256  # lengths that a bucket holds
MIN_SAMPLES = 8  # with fewer, a wider bucket is used
MAX_BUCKETS = 512

_Key = tuple[int, int, int]
_ANY = -1


class _Window:
    """The latest lengths of one bucket, in order of arrival and of size."""

    __slots__ = ("_latest", "_sorted")

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add_length(self, length: int) -> None:
        if len(self._latest) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(length)
        insort(self._sorted, length)

    def quantile_above(self, length: int, quantile: float) -> int | None:
        """The quantile of the lengths above `length`; None where there are none."""
        first = bisect_right(self._sorted, length)
        count = len(self._sorted) - first
        if not count:
            return None
        return self._sorted[first + max(0, _ceil(quantile * count) - 1)]


class LengthPredictor:
    """Learns from finished requests how many tokens the next ones will generate."""

    def __init__(self) -> None:
        self._windows: OrderedDict[_Key, _Window] = OrderedDict()

    def observe(self, message: EngineRequest, output_tokens: int) -> None:
        """Learn from a request that was not aborted."""
        for key in _keys(message):
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = _Window()
                if len(self._windows) > MAX_BUCKETS:
                    self._windows.popitem(last=False)
            self._windows.move_to_end(key)
            window.add_length(output_tokens)

    def remaining(self, message: EngineRequest, output_tokens: int = 0, quantile: float = 0.5) -> int:
        """Tokens that a request will still generate.

        Args:
            output_tokens: tokens generated so far: only longer outputs are compared with it.
            quantile: 0 to 1; 0.5 to order requests, more to reserve room that should suffice.

        Returns:
            1 to what max_tokens leaves. Without enough finished requests the hint, and without a hint max_tokens.
        """
        limit = max(1, message.max_tokens - output_tokens)
        hint = message.params.expected_output_tokens
        for key in _keys(message):
            window = self._windows.get(key)
            if window is not None and len(window) >= MIN_SAMPLES:
                length = window.quantile_above(output_tokens, quantile)
                # Longer than all that were observed: as much again as so far is the best guess (Lindy's law).
                return min(limit, (length or 2 * output_tokens) - output_tokens)
        if hint is not None and hint > output_tokens:
            return min(limit, hint - output_tokens)
        return limit


def _keys(message: EngineRequest) -> tuple[_Key, ...]:
    """The buckets of a request, the narrowest first; with a hint, only those of the same hint."""
    hint = message.params.expected_output_tokens
    prompt, limit, hinted = (value.bit_length() for value in
                             (len(message.prompt_token_ids), message.max_tokens, hint or 0))
    narrow, wide = (prompt, limit, hinted), (_ANY, limit, hinted)
    return (narrow, wide) if hint is not None else (narrow, wide, (_ANY, _ANY, hinted))


def _ceil(value: float) -> int:
    return -int(-value // 1)
