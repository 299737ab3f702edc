"""The waiting requests in the order of a policy's keys."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from jaxpaged.scheduling.request import Request

Key = tuple[float, ...]


class SortedRequests:
    """Requests sorted by a key that is asked once, when they come in; no two keys are equal."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._entries: list[tuple[Key, Request]] = []
        self._keys: dict[Request, Key] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)

    def __getitem__(self, index: int) -> Request:
        return self._entries[index][1]

    def all(self) -> list[Request]:
        """A list of them, which stays as it is when requests come and go."""
        return [request for _, request in self._entries]

    def first(self, count: int) -> list[Request]:
        return [request for _, request in self._entries[:count]]

    def add(self, request: Request) -> None:
        key = self._keys[request] = self._key(request)
        insort(self._entries, (key, request))

    def remove(self, request: Request) -> None:
        key = self._keys.pop(request)
        index = bisect_left(self._entries, (key,))
        assert self._entries[index][1] is request, f"two requests have the key {key}"
        del self._entries[index]

    def check_integrity(self) -> None:
        """Assert that the order is that of the keys."""
        keys = [key for key, _ in self._entries]
        assert keys == sorted(set(keys)), f"out of order: {keys}"
        assert [self._keys[request] for _, request in self._entries] == keys and len(keys) == len(self._keys)
