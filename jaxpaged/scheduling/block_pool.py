"""The KV blocks of a pool: which are free, the reference count of each, and the content cached in each.

The pool consists of units of equal bytes. A block of a KV group is a bundle of `width` units, and is known by its first
unit; it is referenced, cached and evicted as a whole. With one group a block is a unit (see `core.kv_groups`).

Block 0 is the null block: padding rows write there and no request references it. The content of a full block can be
cached under its hash, and stays cached while the block is free, until the block is needed for something else. Free
blocks without cached content are used first, then the ones with, the one that has been free longest first.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from jaxpaged.core.kv_groups import NULL_BLOCK

BlockHash = bytes


class BlockPool:
    """Hands out blocks and finds cached ones. All numbers of it are units.

    Args:
        num_blocks: units in the pool, the null block included.
        widths: units of a block of each KV group.

    Attributes:
        evicted: keys and units of content lost since the owner of the pool last cleared this list; see `unit_keys`.
    """

    def __init__(self, num_blocks: int, widths: Sequence[int] = (1,)) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self.evicted: list[tuple[BlockHash, int]] = []
        self._widths = tuple(widths)
        self._first_rows = tuple(accumulate(self._widths, initial=0))
        self._rest: dict[int, tuple[int, ...]] = {}  # the other units of bundles of several
        self._free = deque(range(1, num_blocks))  # without cached content
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # with cached content; least recently freed first
        self._ref_counts = [0] * num_blocks
        self._group_of = bytearray(num_blocks)  # of each block with references
        self._num_used_of = [0] * len(self._widths)
        self._num_references = 0
        self._num_free_cached = 0
        self._block_of: tuple[dict[BlockHash, int], ...] = tuple({} for _ in self._widths)  # per group
        self._hash_of: dict[int, tuple[int, BlockHash]] = {}  # group and hash

    @property
    def num_usable(self) -> int:
        """Blocks that requests can reference: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without references, with cached content or without."""
        return len(self._free) + self._num_free_cached

    @property
    def num_cached(self) -> int:
        """Free blocks with cached content."""
        return self._num_free_cached

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_usable - self.num_free

    @property
    def num_used_of_groups(self) -> tuple[int, ...]:
        """Units with references of each KV group."""
        return tuple(self._num_used_of)

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
        return count <= len(self._free) + self._num_free_cached

    def units(self, block: int) -> tuple[int, ...]:
        """The units of a block."""
        return (block, *self._rest.get(block, ()))

    def unit_keys(self, group: int, block_hash: BlockHash) -> tuple[BlockHash, ...]:
        """What the content of each unit of a group's block is known by outside the pool."""
        first = self._first_rows[group]
        return tuple(block_hash + row.to_bytes(1 if row < 256 else 2) if row else block_hash
                     for row in range(first, first + self._widths[group]))

    def get_new_blocks(self, count: int, group: int = 0) -> list[int]:
        """Take `count` free blocks of a group, one reference each. The caller has checked `can_allocate`."""
        width = self._widths[group]
        needed = count * width
        assert self.can_allocate(needed), f"asked for {needed} units, {self.num_free} are free"
        while len(self._free) < needed:
            block, _ = self._free_cached.popitem(last=False)
            self._num_free_cached -= self._width_of(block)
            self.evicted += zip(self.unit_keys(*self._uncache(block)), self.units(block), strict=True)
            self._free_units(block)
        blocks = [self._free.popleft() for _ in range(needed)]
        if width > 1:
            bundles = [tuple(blocks[first : first + width]) for first in range(0, needed, width)]
            self._rest.update((bundle[0], bundle[1:]) for bundle in bundles)
            blocks = blocks[::width]
        for block in blocks:
            self._ref_counts[block] = 1
            self._group_of[block] = group
        self._num_references += needed
        self._num_used_of[group] += needed
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which have references or cached content."""
        for block in blocks:
            if not self._ref_counts[block]:
                assert block in self._free_cached, f"block {block} has no references and no cached content"
                del self._free_cached[block]
                self._num_free_cached -= self._width_of(block)
                self._num_used_of[self._group_of[block]] += self._width_of(block)
            self._ref_counts[block] += 1
            self._num_references += self._width_of(block)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each; blocks without references become free, the last of a table first.

        Null blocks are skipped.
        """
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert self._ref_counts[block] > 0, f"block {block} is freed without a reference"
            self._ref_counts[block] -= 1
            self._num_references -= self._width_of(block)
            if self._ref_counts[block] == 0:
                self._num_used_of[self._group_of[block]] -= self._width_of(block)
                if block in self._hash_of:
                    self._free_cached[block] = None
                    self._num_free_cached += self._width_of(block)
                else:
                    self._free_units(block)

    def is_cached(self, block: int) -> bool:
        """Whether the content of a block can be found by its hash."""
        return block in self._hash_of

    def get_cached_block(self, block_hash: BlockHash, group: int = 0) -> int | None:
        """The block of a group with this content."""
        return self._block_of[group].get(block_hash)

    def cache_block(self, block: int, block_hash: BlockHash, group: int = 0) -> None:
        """Make the content of a referenced block available; does nothing where another block has the same content."""
        assert self._ref_counts[block] > 0, f"block {block} has no references"
        if self._block_of[group].setdefault(block_hash, block) == block:
            self._hash_of[block] = group, block_hash

    def drop_cached(self, block: int) -> None:
        """Forget the content of a block, which no request can ask for any more."""
        self._uncache(block)
        if block in self._free_cached:
            del self._free_cached[block]
            self._num_free_cached -= self._width_of(block)
            self._free_units(block)

    def reset_prefix_cache(self) -> None:
        """Forget the content of all blocks."""
        for blocks in self._block_of:
            blocks.clear()
        self._hash_of.clear()
        for block in self._free_cached:
            self._free_units(block)
        self._free_cached.clear()
        self._num_free_cached = 0
        self.evicted.clear()

    def group_codes(self) -> str:
        """A letter per unit, the null block excluded, as in `PoolState`; empty with one group."""
        if len(self._widths) == 1:
            return ""
        codes = bytearray(b"-" * self.num_blocks)
        for block, count in enumerate(self._ref_counts):
            if count:
                for unit in self.units(block):
                    codes[unit] = ord("a") + self._group_of[block]
        return codes[NULL_BLOCK + 1:].decode()

    def state_codes(self) -> str:
        """A character per unit, the null block excluded, as in `PoolState`."""
        codes = bytearray(b"fos"[min(count, 2)] for count in self._ref_counts)
        for block in self._free_cached:
            codes[block] = ord("c")
        for block, rest in self._rest.items():
            for unit in rest:
                codes[unit] = codes[block]
        return codes[NULL_BLOCK + 1:].decode()

    def check_integrity(self, block_tables: Iterable[Sequence[int]], num_null: int = 0) -> None:
        """Assert that the bookkeeping agrees with the tables of all live requests: no reference or block is lost.

        Args:
            num_null: null blocks that the tables should have.
        """
        references = Counter(block for table in block_tables for block in table)
        assert references.pop(NULL_BLOCK, 0) == num_null, "the null block is in use"
        free = {*self._free, *(unit for block in self._free_cached for unit in self.units(block))}
        assert len(free) == self.num_free, "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free"
        assert {key: block for block, key in self._hash_of.items()} == {
            (group, key): block for group, blocks in enumerate(self._block_of) for key, block in blocks.items()
        }, "two blocks have one hash"
        assert self._free_cached.keys() == self._hash_of.keys() & free, "free blocks are in the wrong queue"
        used_of = [0] * len(self._widths)
        for block in references:
            used_of[self._group_of[block]] += self._width_of(block)
        assert used_of == self._num_used_of, f"groups use {used_of} units, {self._num_used_of} are counted"
        rest = [unit for block in self._rest for unit in self._rest[block]]
        assert len(rest) == len(set(rest)), "a unit is in two bundles"
        used = [unit for block in references for unit in self.units(block)]
        assert len(used) == len(set(used)) and free.isdisjoint(used), "a unit is used twice"
        assert len(used) + len(free) == self.num_usable, f"{self.num_usable - len(used) - len(free)} units are lost"
        assert self._num_references == sum(
            count * self._width_of(block) for block, count in enumerate(self._ref_counts)), "references are miscounted"
        for block in set(range(1, self.num_blocks)).difference(rest):
            count = self._ref_counts[block]
            assert count == references[block], f"block {block}: ref_count {count}, in {references[block]} tables"
            assert (count == 0) == (block in free), f"block {block}: ref_count {count}, free is {block in free}"

    def _width_of(self, block: int) -> int:
        return 1 + len(self._rest[block]) if block in self._rest else 1

    def _free_units(self, block: int) -> None:
        """Put the units of a block without references and cached content among the free ones."""
        self._free.append(block)
        if block in self._rest:
            self._free.extend(self._rest.pop(block))

    def _uncache(self, block: int) -> tuple[int, BlockHash]:
        group, block_hash = self._hash_of.pop(block)
        del self._block_of[group][block_hash]
        return group, block_hash
