"""Where every live request is: waiting, running in a slot, or waiting for the leader that computes its prompt.

A paused member of a family that has lost its slot is in no queue: it waits again once it is resumed.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from jaxpaged.scheduling.policy import Policy
from jaxpaged.scheduling.request import Request, RequestStatus

Key = tuple[float, ...]


class RequestQueue:
    """Requests sorted by a key, which is computed once when a request is added; no two keys are equal."""

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

    def first(self, count: int | None = None) -> list[Request]:
        """A copy of the first requests, of all by default."""
        return [request for _, request in self._entries[:count]]

    def add_request(self, request: Request) -> None:
        key = self._keys[request] = self._key(request)
        insort(self._entries, (key, request))

    def remove_request(self, request: Request) -> None:
        key = self._keys.pop(request)
        index = bisect_left(self._entries, (key,))
        assert self._entries[index][1] is request, f"two requests have the key {key}"
        del self._entries[index]

    def check_integrity(self) -> None:
        """Assert that the order is that of the keys."""
        keys = [key for key, _ in self._entries]
        assert keys == sorted(set(keys)), f"out of order: {keys}"
        assert [self._keys[request] for _, request in self._entries] == keys and len(keys) == len(self._keys)


class Queues:
    """The live requests and the slots.

    Args:
        policy: gives the order of the waiting and of the running requests.
        num_slots: maximum number of running requests.

    Attributes:
        live: all requests, by id.
        num_forks: requests that wait for the first token of their leader, in its list of forks.
    """

    def __init__(self, policy: Policy, num_slots: int) -> None:
        self.live: dict[str, Request] = {}
        self.waiting = RequestQueue(policy.queue_key)
        self.running = RequestQueue(policy.running_key)
        self.num_forks = 0
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def add_request(self, request: Request, leader: Request | None = None) -> None:
        """Add a new request; with a leader it waits until that one's prompt is computed."""
        self.live[request.request_id] = request
        if leader is None:
            self.waiting.add_request(request)
        else:
            request.leader = leader
            leader.forks.append(request)
            self.num_forks += 1

    def start_running(self, request: Request, now: float) -> None:
        """Give a slot to a request that is in no queue."""
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.new_in_slot = True
        if request.scheduled_time is None:
            request.scheduled_time = now
        self.running.add_request(request)

    def stop_running(self, request: Request) -> None:
        """Free a running request's slot; it is in no queue then."""
        self.running.remove_request(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def detach_forks(self, leader: Request) -> list[Request]:
        """The requests that wait for a leader's first token; they are in no queue then."""
        forks, leader.forks = leader.forks, []
        for fork in forks:
            fork.leader = None
        self.num_forks -= len(forks)
        return forks

    def remove_request(self, request: Request) -> None:
        """Remove a request that has ended; its forks wait like other requests."""
        if request.status is RequestStatus.RUNNING:
            self.stop_running(request)
        elif request.leader is not None:
            request.leader.forks.remove(request)
            request.leader = None
            self.num_forks -= 1
        elif not request.paused:
            self.waiting.remove_request(request)
        for fork in self.detach_forks(request):
            self.waiting.add_request(fork)
        del self.live[request.request_id]

    def check_integrity(self) -> None:
        """Assert that each request is in one queue, and each slot free or used once."""
        slots = [request.slot for request in self.running] + self._free_slots
        assert len(slots) == len(set(slots)) == self._num_slots and -1 not in slots, f"slots in use and free: {slots}"
        forks = [fork for request in self.live.values() for fork in request.forks]
        assert len(forks) == self.num_forks and all(fork.leader and fork in fork.leader.forks for fork in forks)
        paused = [request for request in self.live.values() if request.paused and request.slot == -1]
        queued = len(self.waiting) + len(self.running) + len(forks) + len(paused)
        assert len(self.live) == queued, "a request is in no queue, or in two"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING, f"{request.status!r} in the running queue"
        for request in (*self.waiting, *forks, *paused):
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request.status!r} waits"
            assert request.slot == -1 and not request.block_tables, "a waiting request has a slot or blocks"
        for queue in (self.waiting, self.running):
            queue.check_integrity()
