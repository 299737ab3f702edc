"""The KV blocks of a pool: which are free, how many requests reference each, and what content each has cached.

Block 0 is the null block: padding rows write there and no request references it. The content of a full block can be
cached under its hash, and stays cached while the block is free, until the block is needed for something else. Free
blocks without cached content are used first, then the ones with, the one that has been free longest first.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0

BlockHash = bytes


class BlockPool:
    """Hands out blocks and finds cached ones.

    Args:
        num_blocks: blocks in the pool, the null block included.

    Attributes:
        evicted: hashes and blocks of content lost since the owner of the pool last cleared this list.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self.evicted: list[tuple[BlockHash, int]] = []
        self._free = deque(range(1, num_blocks))  # without cached content
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # with cached content; least recently freed first
        self._ref_counts = [0] * num_blocks
        self._num_references = 0
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can reference: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without references, with cached content or without."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_cached(self) -> int:
        """Free blocks with cached content."""
        return len(self._free_cached)

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_usable - self.num_free

    @property
    def num_references(self) -> int:
        """References to all blocks together."""
        return self._num_references

    @property
    def num_shared(self) -> int:
        """Blocks that sharing saves: references beyond each block's first."""
        return self._num_references - self.num_used

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free) + len(self._free_cached)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` free blocks, one reference each. The caller has checked `can_allocate`."""
        assert self.can_allocate(count), f"asked for {count} blocks, {self.num_free} are free"
        blocks = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        while len(blocks) < count:
            block, _ = self._free_cached.popitem(last=False)
            self.evicted.append((self._uncache(block), block))
            blocks.append(block)
        for block in blocks:
            self._ref_counts[block] = 1
        self._num_references += count
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which have references or cached content."""
        for block in blocks:
            if not self._ref_counts[block]:
                assert block in self._free_cached, f"block {block} has no references and no cached content"
                del self._free_cached[block]
            self._ref_counts[block] += 1
            self._num_references += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each; blocks without references become free, the last of a table first."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is freed without a reference"
            self._ref_counts[block] -= 1
            self._num_references -= 1
            if self._ref_counts[block] == 0:
                if block in self._hash_of:
                    self._free_cached[block] = None
                else:
                    self._free.append(block)

    def get_cached_block(self, block_hash: BlockHash) -> int | None:
        """The block with this content."""
        return self._block_of.get(block_hash)

    def cache_block(self, block: int, block_hash: BlockHash) -> None:
        """Make the content of a referenced block available; does nothing where another block has the same content."""
        assert self._ref_counts[block] > 0, f"block {block} has no references"
        if self._block_of.setdefault(block_hash, block) == block:
            self._hash_of[block] = block_hash

    def drop_cached(self, block: int) -> None:
        """Forget the content of a block, which no request can ask for any more."""
        self._uncache(block)
        if block in self._free_cached:
            del self._free_cached[block]
            self._free.append(block)

    def reset_prefix_cache(self) -> None:
        """Forget the content of all blocks."""
        self._block_of.clear()
        self._hash_of.clear()
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self.evicted.clear()

    def state_codes(self) -> str:
        """A character per block, the null block excluded, as in `PoolState`."""
        codes = bytearray(b"fos"[min(count, 2)] for count in self._ref_counts)
        for block in self._free_cached:
            codes[block] = ord("c")
        return codes[NULL_BLOCK + 1:].decode()

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that the bookkeeping agrees with the tables of all live requests: no reference or block is lost."""
        references = Counter(block for table in block_tables for block in table)
        free = {*self._free, *self._free_cached}
        assert len(free) == self.num_free, "a block is free twice"
        assert NULL_BLOCK not in free and references[NULL_BLOCK] == 0, "the null block is in use"
        assert {key: block for block, key in self._hash_of.items()} == self._block_of, "two blocks have one hash"
        assert self._free_cached.keys() == self._hash_of.keys() & free, "free blocks are in the wrong queue"
        assert self._num_references == sum(self._ref_counts), "references are miscounted"
        for block in range(1, self.num_blocks):
            count = self._ref_counts[block]
            assert count == references[block], f"block {block}: ref_count {count}, in {references[block]} tables"
            assert (count == 0) == (block in free), f"block {block}: ref_count {count}, free is {block in free}"

    def _uncache(self, block: int) -> BlockHash:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        return block_hash
