"""A least-recently-used cache, bounded in entries and in bytes."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Evicts the least recently used entry. May be used by several threads.

    Args:
        max_entries: number of entries.
        max_bytes: of all entries together; a larger entry is not cached.
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
        """Of all entries, as given to `put`."""
        return self._num_bytes

    def get(self, key: Key) -> Value | None:
        """The value of this key; None if it is not cached."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Cache a value of `num_bytes`, and evict others for it."""
        with self._lock:
            self._num_bytes += num_bytes - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = value, num_bytes
            while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
                self._num_bytes -= self._entries.popitem(last=False)[1][1]
