"""Which blocks are free and how many owners each has.

Block 0 is the null block: padding rows write there and nobody owns it. A free block may still hold content that
somebody might ask for again; such blocks are handed out last, the one that has been free longest first.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from jaxpaged.scheduling.request import Request

NULL_BLOCK = 0


class BlockPool:
    """Hands out the blocks of one pool and takes them back.

    Args:
        num_blocks: blocks in the pool, the null block included.

    Attributes:
        on_evict: called with each kept block that is handed out for something else, before it is.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = lambda block: None
        self._free = deque(range(1, num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with content; least recently freed first
        self._has_content = bytearray(num_blocks)
        self._owners = [0] * num_blocks
        self._num_references = 0

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without owners, with content or without."""
        return len(self._free) + len(self._kept)

    @property
    def num_cached(self) -> int:
        """Free blocks with content."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_references(self) -> int:
        """Owners of all blocks together."""
        return self._num_references

    @property
    def num_shared(self) -> int:
        """Blocks that sharing saves: owners beyond each block's first."""
        return self._num_references - self.num_used

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free) + len(self._kept)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks with one owner each; all or none.

        Returns:
            The block ids. The caller has asked `can_allocate` first.
        """
        assert self.can_allocate(count), f"asked for {count} blocks, {self.num_free} are free"
        blocks = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        while len(blocks) < count:
            block, _ = self._kept.popitem(last=False)
            self.on_evict(block)
            self._has_content[block] = False
            blocks.append(block)
        for block in blocks:
            self._owners[block] = 1
        self._num_references += count
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these blocks, which have owners or content."""
        for block in blocks:
            if not self._owners[block]:
                assert self._has_content[block], f"block {block} has no owner to share with, and no content"
                del self._kept[block]
            self._owners[block] += 1
            self._num_references += 1

    def ref_count(self, block: int) -> int:
        return self._owners[block]

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each; blocks without owners become free, the last of a table first."""
        for block in reversed(blocks):
            assert self._owners[block] > 0, f"block {block} is freed without an owner"
            self._owners[block] -= 1
            self._num_references -= 1
            if self._owners[block] == 0:
                if self._has_content[block]:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Note that an owned block holds content worth keeping once it is free."""
        assert self._owners[block] > 0, f"block {block} has no owner"
        self._has_content[block] = True

    def discard(self, block: int) -> None:
        """Note that nobody will ask for a block's content any more."""
        self._has_content[block] = False
        if block in self._kept:
            del self._kept[block]
            self._free.append(block)

    def state_codes(self) -> str:
        """What each block but the null block is used for, as `PoolState` spells it."""
        codes = bytearray(b"fos"[min(owners, 2)] for owners in self._owners)
        for block in self._kept:
            codes[block] = ord("c")
        return codes[NULL_BLOCK + 1:].decode()

    def blocks_with_content(self) -> set[int]:
        """Blocks, free or not, whose content is kept."""
        return {block for block in range(self.num_blocks) if self._has_content[block]}

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that the books agree with the tables of all live requests: every owner counted, no block lost."""
        owners = Counter(block for table in block_tables for block in table)
        free = {*self._free, *self._kept}
        assert len(free) == self.num_free, "a block is free twice"
        assert NULL_BLOCK not in free and owners[NULL_BLOCK] == 0, "the null block is in use"
        assert all(self._has_content[block] for block in self._kept), "a kept block has no content"
        assert not any(self._has_content[block] for block in self._free), "a block with content is among the empty ones"
        assert self._num_references == sum(self._owners), "owners are miscounted"
        for block in range(1, self.num_blocks):
            count = self._owners[block]
            assert count == owners[block], f"block {block}: {count} owners on the books, {owners[block]} in the tables"
            assert (count == 0) == (block in free), f"block {block}: {count} owners, free is {block in free}"


Key = bytes
_KEY_BYTES = 32


class PrefixCache:
    """Keys of blocks and blocks of keys. Who owns a block, and when one is evicted, is the allocator's business.

    Args:
        block_size: tokens in a block.
        private: no two requests have equal keys; what a preempted one has computed is still found by itself.
    """

    def __init__(self, block_size: int, *, private: bool = False) -> None:
        self._block_size = block_size
        self._private = private
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def key(self, request: Request, index: int) -> Key:
        """The key of a request's block, whose tokens are all known; each is computed once in a request's life."""
        keys, size = request.block_hashes, self._block_size
        while len(keys) <= index:
            start = len(keys) * size
            tokens = request.token_ids[start : start + size]
            assert len(tokens) == size, f"block {len(keys)} of {request.request_id} is not full"
            parent = keys[-1] if keys else self._root(request)
            keys.append(blake2b(parent + array("i", tokens).tobytes(), digest_size=_KEY_BYTES).digest())
        return keys[index]

    def get(self, key: Key) -> int | None:
        """The block with this key."""
        return self._blocks.get(key)

    def add(self, key: Key, block: int) -> bool:
        """Note what a block holds; False, and nothing noted, where another block holds the same."""
        if self._blocks.setdefault(key, block) != block:
            return False
        self._keys[block] = key
        return True

    def remove(self, block: int) -> Key:
        """Forget a block that gets other content; the key that it had."""
        key = self._keys.pop(block)
        del self._blocks[key]
        return key

    def reset(self) -> list[int]:
        """Forget everything: no key made so far is ever equal to one made later. Returns the blocks that had keys."""
        blocks = list(self._keys)
        self._blocks.clear()
        self._keys.clear()
        self._generation += 1
        return blocks

    def check_integrity(self, blocks: set[int]) -> None:
        """Assert that exactly these blocks have keys, each its own."""
        assert self._keys.keys() == blocks, f"blocks with keys {sorted(self._keys)}, with content {sorted(blocks)}"
        assert {key: block for block, key in self._keys.items()} == self._blocks, "two blocks have one key"

    def _root(self, request: Request) -> Key:
        salt = request.message.cache_salt
        if self._private:
            return blake2b(b"%d own %d" % (self._generation, request.order), digest_size=_KEY_BYTES).digest()
        start = b"plain" if salt is None else b"salt " + salt.encode("utf-8", "surrogatepass")
        return blake2b(b"%d %b" % (self._generation, start), digest_size=_KEY_BYTES).digest()
