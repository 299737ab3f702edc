"""Which blocks have a copy in host memory.

Blocks evicted from the pool are saved there and loaded back instead of being computed again: prefixes that no request
uses just now, and the blocks of preempted requests. Blocks saved together form a segment, which is dropped as a whole,
the least recently used first. A segment with pinned blocks, which a preempted request needs again, is not dropped.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpaged.scheduling.block_pool import Key


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy these blocks to host memory as segment `segment`."""

    segment: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy rows of a segment to blocks: `blocks` has one for each row of the segment, the null block where none is."""

    segment: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block's place in host memory: a row of a segment of `size` rows."""

    segment: int
    row: int
    size: int


class HostTier:
    """The books on host memory; who moves the bytes is told what to do.

    Args:
        capacity: blocks that fit.
        transfer_sizes: descending numbers of blocks that a segment can have, the last one 1.
    """

    def __init__(self, capacity: int, transfer_sizes: Sequence[int]) -> None:
        assert transfer_sizes[-1] == 1, f"segments of {transfer_sizes} cannot hold any number of blocks"
        self._capacity = capacity
        self._transfer_sizes = tuple(transfer_sizes)
        self._places: dict[Key, HostBlock] = {}
        self._segments: OrderedDict[int, tuple[Key, ...]] = OrderedDict()
        self._pins: Counter[Key] = Counter()
        self._num_segments = 0
        self.num_used = 0

    def get(self, key: Key) -> HostBlock | None:
        """Where the block with this key is."""
        return self._places.get(key)

    def use(self, place: HostBlock) -> None:
        """Note that a segment is used now."""
        self._segments.move_to_end(place.segment)

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep these blocks, there already or to come, until `unpin`."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo a `pin`."""
        self._pins.subtract(keys)
        self._pins = +self._pins

    def save(self, evicted: Sequence[tuple[Key, int]]) -> tuple[list[SaveBlocks], list[int]]:
        """Make room for blocks, given with their keys, and note where they go; what does not fit is not saved.

        Returns:
            What to save, and the segments to drop.
        """
        new = [(key, block) for key, block in evicted if key not in self._places]
        wanted = [item for item in new if self._pins[item[0]]] + [item for item in new if not self._pins[item[0]]]
        dropped = self._make_room(min(len(wanted), self._capacity))
        saves = []
        while wanted and self.num_used < self._capacity:
            room = min(len(wanted), self._capacity - self.num_used)
            size = next(size for size in self._transfer_sizes if size <= room)
            segment, wanted = wanted[:size], wanted[size:]
            saves.append(SaveBlocks(self._num_segments, tuple(block for _, block in segment)))
            self._segments[self._num_segments] = tuple(key for key, _ in segment)
            for row, (key, _) in enumerate(segment):
                self._places[key] = HostBlock(self._num_segments, row, size)
            self._num_segments += 1
            self.num_used += size
        return saves, dropped

    def reset(self) -> list[int]:
        """Forget everything; the segments to drop."""
        dropped = list(self._segments)
        self._segments.clear()
        self._places.clear()
        self._pins.clear()
        self.num_used = 0
        return dropped

    def check_integrity(self) -> None:
        """Assert that the books agree."""
        assert 0 <= self.num_used == sum(map(len, self._segments.values())) <= self._capacity
        rows = {key: HostBlock(segment, row, len(keys)) for segment, keys in self._segments.items()
                for row, key in enumerate(keys)}
        assert rows == self._places, "a block is in host memory twice, or nowhere"

    def _make_room(self, count: int) -> list[int]:
        dropped: list[int] = []
        excess = self.num_used + count - self._capacity
        for segment, keys in self._segments.items():
            if excess <= 0:
                break
            if not any(self._pins[key] for key in keys):
                dropped.append(segment)
                excess -= len(keys)
        for segment in dropped:
            for key in self._segments.pop(segment):
                del self._places[key]
                self.num_used -= 1
        return dropped
