"""The hash of a block's content: of its tokens, all tokens before them, and the request's cache salt."""

from array import array
from hashlib import blake2b

from jaxpaged.scheduling.block_pool import BlockHash
from jaxpaged.scheduling.request import Request

_HASH_BYTES = 32


class BlockHasher:
    """Hashes blocks.

    Args:
        block_size: tokens in a block.
        private: no two requests have equal hashes; a preempted request still finds what it has computed itself.
    """

    def __init__(self, block_size: int, *, private: bool = False) -> None:
        self._block_size = block_size
        self._private = private

    def hash_block(self, request: Request, index: int) -> BlockHash:
        """The hash of a block whose tokens are all known; each is computed once in a request's life."""
        hashes, size = request.block_hashes, self._block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            tokens = request.token_ids[start : start + size]
            assert len(tokens) == size, f"block {len(hashes)} of {request.request_id} is not full"
            parent = hashes[-1] if hashes else self._root(request)
            hashes.append(blake2b(parent + array("i", tokens).tobytes(), digest_size=_HASH_BYTES).digest())
        return hashes[index]

    def _root(self, request: Request) -> BlockHash:
        salt = request.message.cache_salt
        if self._private:
            root = b"own %d" % request.order
        elif salt is None:
            root = b"plain"
        else:
            root = b"salt " + salt.encode("utf-8", "surrogatepass")
        return blake2b(root, digest_size=_HASH_BYTES).digest()
