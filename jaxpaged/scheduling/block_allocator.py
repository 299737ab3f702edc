"""Which blocks are free and how many owners each has.

Block 0 is the null block: padding rows write there and nobody owns it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockAllocator:
    """Hands out the blocks of one pool and takes them back.

    Args:
        num_blocks: blocks in the pool, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._owners = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one owner each; all or none.

        Returns:
            The block ids. The caller has asked `can_allocate` first.
        """
        assert self.can_allocate(count), f"asked for {count} blocks, {len(self._free)} are free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these owned blocks."""
        for block in blocks:
            assert self._owners[block] > 0, f"block {block} has no owner to share with"
            self._owners[block] += 1

    def num_owners(self, block: int) -> int:
        return self._owners[block]

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each; blocks without owners become free, the last of a table first."""
        for block in reversed(blocks):
            assert self._owners[block] > 0, f"block {block} is freed without an owner"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that the books agree with the tables of all live requests: every owner counted, no block lost."""
        owners = Counter(block for table in block_tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert NULL_BLOCK not in free and owners[NULL_BLOCK] == 0, "the null block is in use"
        for block in range(1, self.num_blocks):
            count = self._owners[block]
            assert count == owners[block], f"block {block}: {count} owners on the books, {owners[block]} in the tables"
            assert (count == 0) == (block in free), f"block {block}: {count} owners, free is {block in free}"
