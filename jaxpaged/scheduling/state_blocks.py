"""Recurrent states in blocks of the pool: one per sequence, and copies for requests that share a prefix.

The state of a running request is in a block that it writes alone. At some block borders the state is kept for others:
its block is cached under the hash of the last block before the border, as blocks of tokens are, and the request goes on
in a copy. Likewise a request that begins with a kept state, or a fork that shares one, copies it before it writes. So a
cached state is never written, and whatever moves blocks (eviction, host memory, forks) moves states, too.

Where there is no room for the copy of a state that only this request uses, it is no longer kept.
"""

from collections.abc import Callable, Iterable

from jaxpaged.core.kv_groups import NULL_BLOCK, KVGroup
from jaxpaged.scheduling.block_pool import BlockHash, BlockPool
from jaxpaged.scheduling.request import NEVER, Request


class StateBlocks:
    """The states of all requests.

    Args:
        group: the KV group of states.
        number: its index among the groups of the pool.
        keeps: states are kept for others.
        hash_block: the hash of a request's block of this index and all before it.

    Attributes:
        group: number of the group.
        width: units of a state.
        num_references: units that requests reference, shared ones as often as they do.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, group: KVGroup, number: int, keeps: bool,
        hash_block: Callable[[Request, int], BlockHash],
    ) -> None:
        self.group, self.width = number, group.width
        self.num_references = 0
        self._pool, self._block_size, self._keeps, self._hash_block = pool, block_size, keeps, hash_block
        self._save_every = group.save_every

    def chunk_limit(self, request: Request, count: int) -> int:
        """Number of `count` more tokens up to the next border at which the state is kept."""
        border = self._next_border(request)
        return count if border is None else min(count, border - request.num_computed_tokens)

    def begin(self, request: Request) -> None:
        """An admitted request has its first state, or none, which is a state of zeros."""
        if request.state_block != NULL_BLOCK:
            self.num_references += self.width
        request.state_kept_at, request.table_changed = request.num_computed_tokens, True

    def share(self, parent: Request, child: Request) -> None:
        """A fork begins with the state of its parent."""
        child.state_block, child.state_kept_at = parent.state_block, parent.state_kept_at
        self._pool.touch([child.state_block])
        self.num_references += self.width

    def keep(self, request: Request) -> bool:
        """Keep the state of a request that is at a border, once; returns whether it did."""
        computed = request.num_computed_tokens
        if computed == request.state_kept_at or not self._is_border(request, computed):
            return False
        if computed > len(request.token_ids) or request.num_cached_blocks == NEVER:
            return False
        request.state_kept_at = computed
        self._pool.cache_block(request.state_block, self._hash_block(request, computed // self._block_size - 1),
                               self.group)
        return True

    def num_new_units(self, request: Request) -> int:
        """Units to allocate before a running request can write its state."""
        block = request.state_block
        return self.width if block == NULL_BLOCK or self._pool.ref_count(block) > 1 else 0

    def own(self, request: Request) -> list[tuple[int, int]]:
        """Give a request a state that it may write.

        Returns:
            Units to copy, source and target.
        """
        old, pool = request.state_block, self._pool
        if old != NULL_BLOCK and pool.ref_count(old) == 1:
            if not pool.is_cached(old):
                return []
            if not pool.can_allocate(self.width):
                pool.drop_cached(old)
                return []
        [new] = pool.get_new_blocks(1, self.group)
        request.state_block, request.table_changed = new, True
        if old == NULL_BLOCK:
            self.num_references += self.width
            return []
        pool.free_blocks([old])
        return list(zip(pool.units(old), pool.units(new), strict=True))

    def free(self, request: Request) -> None:
        """Drop a request's state; a kept one stays until its units are needed."""
        if request.state_block != NULL_BLOCK:
            self._pool.free_blocks([request.state_block])
            self.num_references -= self.width
        request.state_block, request.state_kept_at = NULL_BLOCK, 0

    def kept_keys(self, request: Request) -> tuple[BlockHash, ...]:
        """What the last kept state of a stopped request is known by outside the pool."""
        last = next((index for index in range(len(request.block_hashes), 0, -1)
                     if self._is_border(request, index * self._block_size)), None)
        return () if last is None else self._pool.unit_keys(self.group, request.block_hashes[last - 1])

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that each request with blocks has a state, and that they are counted."""
        held = [request.state_block for request in requests if request.state_block != NULL_BLOCK]
        assert self.num_references == len(held) * self.width, "states are miscounted"
        for request in requests:
            if request.slot >= 0 and request.num_computed_tokens:
                assert request.state_block != NULL_BLOCK, "computed tokens without a state"
            written = request.state_block != NULL_BLOCK and not request.shares_tail
            assert not written or (self._pool.ref_count(request.state_block) == 1
                                   and not self._pool.is_cached(request.state_block)), "a state of others is written"

    def _next_border(self, request: Request) -> int | None:
        """The next number of tokens after those computed at which the state is kept."""
        if not self._keeps or request.num_cached_blocks == NEVER:
            return None
        every = self._save_every * self._block_size
        border = (request.num_computed_tokens // every + 1) * every
        last = self._last_full(request)
        return min(border, last) if last > request.num_computed_tokens else border

    def _is_border(self, request: Request, tokens: int) -> bool:
        regular = tokens % (self._save_every * self._block_size) == 0
        return self._keeps and tokens > 0 and (regular or tokens == self._last_full(request))

    def _last_full(self, request: Request) -> int:
        """Tokens of a prompt's full blocks, but for its last token: where its next turn, or the same again, begins."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size
