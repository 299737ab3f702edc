"""What was made lately, kept up to a number of entries and of bytes."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Forgets the least recently used. May be used by several threads.

    Args:
        max_entries: number of entries.
        max_bytes: of all entries together; a larger one is not kept at all.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Of all entries, as they were told."""
        return self._num_bytes

    def get(self, key: Key) -> Value | None:
        """The value that was put under this key, if it is still there."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep a value of so many bytes, and forget others for it."""
        with self._lock:
            self._num_bytes += num_bytes - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = value, num_bytes
            while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
                self._num_bytes -= self._entries.popitem(last=False)[1][1]
