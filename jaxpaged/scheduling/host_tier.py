"""Which blocks have a copy in host memory.

Blocks evicted from the pool are saved there and loaded back instead of being computed again: prefixes that no request
uses just now, and the blocks of preempted requests. Blocks saved together form a segment, which is dropped as a whole,
the least recently used first. A segment with pinned blocks, which a preempted request needs again, is not dropped.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpaged.scheduling.block_pool import BlockHash
from jaxpaged.scheduling.scheduler_output import SaveBlocks


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block in host memory: a row of a segment of `size` rows."""

    segment: int
    row: int
    size: int


class HostTier:
    """The bookkeeping of host memory; the model runner moves the bytes.

    Args:
        capacity: blocks that fit.
        transfer_sizes: descending numbers of blocks that a segment can have, the last one 1.
    """

    def __init__(self, capacity: int, transfer_sizes: Sequence[int]) -> None:
        assert transfer_sizes[-1] == 1, f"segments of {transfer_sizes} cannot hold any number of blocks"
        self._capacity = capacity
        self._transfer_sizes = tuple(transfer_sizes)
        self._blocks: dict[BlockHash, HostBlock] = {}
        self._segments: OrderedDict[int, tuple[BlockHash, ...]] = OrderedDict()  # least recently used first
        self._pins: Counter[BlockHash] = Counter()
        self._num_segments = 0
        self.num_used = 0

    def get(self, block_hash: BlockHash) -> HostBlock | None:
        """The copy of the block with this hash."""
        return self._blocks.get(block_hash)

    def touch(self, block: HostBlock) -> None:
        """Mark a block's segment as the most recently used."""
        self._segments.move_to_end(block.segment)

    def pin(self, hashes: Iterable[BlockHash]) -> None:
        """Do not drop these blocks, saved already or later, until `unpin`."""
        self._pins.update(hashes)

    def unpin(self, hashes: Iterable[BlockHash]) -> None:
        """Undo a `pin`."""
        self._pins.subtract(hashes)
        self._pins = +self._pins

    def save(self, evicted: Sequence[tuple[BlockHash, int]]) -> tuple[list[SaveBlocks], list[int]]:
        """Record evicted blocks, pinned ones first, dropping others for them; what does not fit is not saved.

        Returns:
            What to save, and the segments to drop afterwards.
        """
        new = [item for item in evicted if item[0] not in self._blocks]
        new.sort(key=lambda item: not self._pins[item[0]])
        dropped = self._make_room(min(len(new), self._capacity))
        saves = []
        while new and self.num_used < self._capacity:
            room = min(len(new), self._capacity - self.num_used)
            size = next(size for size in self._transfer_sizes if size <= room)
            rows, new = new[:size], new[size:]
            saves.append(SaveBlocks(self._num_segments, tuple(block for _, block in rows)))
            self._segments[self._num_segments] = tuple(block_hash for block_hash, _ in rows)
            for row, (block_hash, _) in enumerate(rows):
                self._blocks[block_hash] = HostBlock(self._num_segments, row, size)
            self._num_segments += 1
            self.num_used += size
        return saves, dropped

    def reset(self) -> list[int]:
        """Forget everything. Returns the segments to drop."""
        dropped = list(self._segments)
        self._segments.clear()
        self._blocks.clear()
        self._pins.clear()
        self.num_used = 0
        return dropped

    def check_integrity(self) -> None:
        """Assert that blocks, segments and their number agree."""
        assert 0 <= self.num_used == sum(map(len, self._segments.values())) <= self._capacity
        rows = {block_hash: HostBlock(segment, row, len(hashes)) for segment, hashes in self._segments.items()
                for row, block_hash in enumerate(hashes)}
        assert rows == self._blocks, "a block is in host memory twice, or nowhere"

    def _make_room(self, count: int) -> list[int]:
        dropped: list[int] = []
        excess = self.num_used + count - self._capacity
        for segment, hashes in self._segments.items():
            if excess <= 0:
                break
            if not any(self._pins[block_hash] for block_hash in hashes):
                dropped.append(segment)
                excess -= len(hashes)
        for segment in dropped:
            for block_hash in self._segments.pop(segment):
                del self._blocks[block_hash]
                self.num_used -= 1
        return dropped
