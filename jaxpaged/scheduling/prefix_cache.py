"""Which full blocks hold which tokens, so that requests with the same beginning share them.

A block's key is a link of a chain: a strong hash over the key of the block before it and its own token ids. Equal keys
mean equal tokens from the start of the sequence, which is all that keys and values depend on. The chain starts from the
request's salt.
"""

from array import array
from hashlib import blake2b

from jaxpaged.scheduling.request import Request

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
        keys, size = request.block_keys, self._block_size
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
