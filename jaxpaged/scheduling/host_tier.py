"""Which blocks have a copy in host memory.

Blocks move there as they are evicted from the pool, so that what only lost its place is brought back instead of
computed again: prefixes that nobody uses just now, and the blocks of preempted requests. Blocks that are saved together
make a chunk, which is dropped as a whole, the least recently used first; a chunk with blocks that a preempted request
waits for stays.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpaged.scheduling.block_pool import Key


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy these blocks to host memory as chunk `chunk`."""

    chunk: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy rows of a chunk to blocks: `blocks` has one for each row of the chunk, the null block where none is."""

    chunk: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block's place in host memory: a row of a chunk of `size` rows."""

    chunk: int
    row: int
    size: int


class HostTier:
    """The books on host memory; who moves the bytes is told what to do.

    Args:
        capacity: blocks that fit.
        chunk_sizes: descending numbers of blocks that a chunk can have, the last one 1.
    """

    def __init__(self, capacity: int, chunk_sizes: Sequence[int]) -> None:
        assert chunk_sizes[-1] == 1, f"chunks of {chunk_sizes} cannot hold any number of blocks"
        self._capacity = capacity
        self._chunk_sizes = tuple(chunk_sizes)
        self._places: dict[Key, HostBlock] = {}
        self._chunks: OrderedDict[int, tuple[Key, ...]] = OrderedDict()
        self._held: Counter[Key] = Counter()
        self._num_chunks = 0
        self.num_used = 0

    def get(self, key: Key) -> HostBlock | None:
        """Where the block with this key is."""
        return self._places.get(key)

    def use(self, place: HostBlock) -> None:
        """Note that a chunk is used now."""
        self._chunks.move_to_end(place.chunk)

    def hold(self, keys: Iterable[Key]) -> None:
        """Keep these blocks, there already or to come, until `let_go`."""
        self._held.update(keys)

    def let_go(self, keys: Iterable[Key]) -> None:
        """Undo a `hold`."""
        self._held.subtract(keys)
        self._held = +self._held

    def save(self, evicted: Sequence[tuple[Key, int]]) -> tuple[list[SaveBlocks], list[int]]:
        """Make room for blocks, given with their keys, and note where they go; what does not fit is not saved.

        Returns:
            What to save, and the chunks to drop.
        """
        new = [(key, block) for key, block in evicted if key not in self._places]
        wanted = [item for item in new if self._held[item[0]]] + [item for item in new if not self._held[item[0]]]
        dropped = self._make_room(min(len(wanted), self._capacity))
        saves = []
        while wanted and self.num_used < self._capacity:
            room = min(len(wanted), self._capacity - self.num_used)
            size = next(size for size in self._chunk_sizes if size <= room)
            chunk, wanted = wanted[:size], wanted[size:]
            saves.append(SaveBlocks(self._num_chunks, tuple(block for _, block in chunk)))
            self._chunks[self._num_chunks] = tuple(key for key, _ in chunk)
            for row, (key, _) in enumerate(chunk):
                self._places[key] = HostBlock(self._num_chunks, row, size)
            self._num_chunks += 1
            self.num_used += size
        return saves, dropped

    def reset(self) -> list[int]:
        """Forget everything; the chunks to drop."""
        dropped = list(self._chunks)
        self._chunks.clear()
        self._places.clear()
        self._held.clear()
        self.num_used = 0
        return dropped

    def check_integrity(self) -> None:
        """Assert that the books agree."""
        assert 0 <= self.num_used == sum(map(len, self._chunks.values())) <= self._capacity
        rows = {key: HostBlock(chunk, row, len(keys)) for chunk, keys in self._chunks.items()
                for row, key in enumerate(keys)}
        assert rows == self._places, "a block is in host memory twice, or nowhere"

    def _make_room(self, count: int) -> list[int]:
        dropped: list[int] = []
        excess = self.num_used + count - self._capacity
        for chunk, keys in self._chunks.items():
            if excess <= 0:
                break
            if not any(self._held[key] for key in keys):
                dropped.append(chunk)
                excess -= len(keys)
        for chunk in dropped:
            for key in self._chunks.pop(chunk):
                del self._places[key]
                self.num_used -= 1
        return dropped
