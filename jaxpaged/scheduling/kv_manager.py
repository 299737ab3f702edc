"""Which blocks each request references: a cached prefix first, then new blocks as the request grows."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jaxpaged.scheduling.block_hash import BlockHasher
from jaxpaged.scheduling.block_pool import NULL_BLOCK, BlockHash, BlockPool
from jaxpaged.scheduling.host_tier import HostBlock, HostTier, LoadBlocks, SaveBlocks
from jaxpaged.scheduling.request import Request

NEVER_CACHED = 2**62  # as `num_cached_blocks`, more than any table has: no further block of the request is cached


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a waiting request.

    Attributes:
        blocks: in order of position; the null block where the content has to be loaded from host memory.
        num_free: number of these blocks that are free now.
        on_host: host blocks to load, in order.
    """

    blocks: tuple[int, ...] = ()
    num_free: int = 0
    on_host: tuple[HostBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfers:
    """Blocks to move before a step writes anything, in this order.

    Attributes:
        saves: blocks to copy to host memory.
        copies: pairs of blocks, source and target.
        loads: blocks to fill from host memory.
        drops: segments of host memory that are not needed any more.
    """

    saves: tuple[SaveBlocks, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    loads: tuple[LoadBlocks, ...] = ()
    drops: tuple[int, ...] = ()


NO_TRANSFERS = Transfers()


class KVManager:
    """The block tables of all requests.

    A block's content is cached as soon as the step that writes it is final: steps run in order on the device, so a
    later step reads what was written.

    Args:
        block_size: tokens in a block.
        prefix_caching: share the blocks of equal prefixes.
        host: saves evicted blocks.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, prefix_caching: bool, host: HostTier | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._host = host
        self._caches = prefix_caching or host is not None
        self._hash_block = BlockHasher(block_size, private=not prefix_caching).hash_block
        # Of the step being planned: blocks that its chunks fill, by hash, and whose chunks they are.
        self._planned: dict[BlockHash, int] = {}
        self._writers: dict[int, Request] = {}
        self._copies: list[tuple[int, int]] = []
        self._loads: list[tuple[HostBlock, int]] = []
        self._drops: list[int] = []
        # Updated with each change, so that `kv_slots` need not visit every running request.
        self._num_computed_tokens = 0
        self._tail_sharers: set[Request] = set()
        self.num_saved = self.num_loaded = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def num_new_blocks(self, request: Request, count: int) -> int:
        """Blocks to allocate before `count` more tokens of a running request can be computed."""
        missing = max(0, -(-(request.num_computed_tokens + count) // self.block_size) - len(request.block_table))
        return missing + 1 if request.shares_tail and count and self._tail_is_shared(request) else missing

    def allocate(self, request: Request, blocks: int) -> None:
        """Allocate free blocks for further tokens; the first one replaces a shared last block by a copy."""
        new = self.pool.get_new_blocks(blocks)
        if request.shares_tail and self._tail_is_shared(request):
            tail = request.block_table[-1]
            self._copies.append((tail, new[0]))
            self.pool.free_blocks([tail])
            request.block_table[-1] = new.pop(0)
            request.table_changed = True
        if request.shares_tail:
            request.shares_tail = False
            self._tail_sharers.remove(request)
        request.block_table.extend(new)

    def fork(self, parent: Request, child: Request) -> None:
        """Share all blocks of a running request with `child`; the first to write to the last block copies it."""
        self.pool.touch(parent.block_table)
        child.block_table = list(parent.block_table)
        child.num_computed_tokens, child.num_cached_blocks = parent.num_computed_tokens, parent.num_cached_blocks
        child.block_hashes = list(parent.block_hashes)
        child.table_changed = True
        if parent.num_computed_tokens % self.block_size:
            parent.shares_tail = child.shares_tail = True
            self._tail_sharers |= {parent, child}
        self._num_computed_tokens += child.num_computed_tokens

    def drain_transfers(self) -> Transfers:
        """What has to be moved before the next step writes anything."""
        evicted, saves = self.pool.evicted, list[SaveBlocks]()
        if not (evicted or self._copies or self._loads or self._drops):
            return NO_TRANSFERS
        if self._host is not None:
            saves, drops = self._host.save(evicted)
            self._drops += drops
        transfers = Transfers(tuple(saves), tuple(self._copies), self._grouped_loads(), tuple(self._drops))
        self.num_saved += sum(len(save.blocks) for save in saves)
        self.num_loaded += len(self._loads)
        for done in (evicted, self._copies, self._loads, self._drops):
            done.clear()
        return transfers

    def find_prefix(self, request: Request) -> Prefix:
        """The longest prefix of a waiting request that is cached or that a chunk planned for this step will fill.

        Its last token is never part of it: a step has to compute the logits.
        """
        if not self._caches or request.message.skip_prefix_read:
            return Prefix()
        blocks: list[int] = []
        on_host: list[HostBlock] = []
        for index in range((len(request.token_ids) - 1) // self.block_size):
            block_hash = self._hash_block(request, index)
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                block = self._planned.get(block_hash)
            if block is None:
                host_block = self._host.get(block_hash) if self._host else None
                if host_block is None:
                    break
                on_host.append(host_block)
                block = NULL_BLOCK
            blocks.append(block)
        num_free = sum(block != NULL_BLOCK and not self.pool.ref_count(block) for block in blocks)
        return Prefix(tuple(blocks), num_free, tuple(on_host))

    def num_needed(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that a waiting request with this cached prefix needs for all the tokens it has."""
        return self.blocks_for(request.num_tokens) - len(prefix.blocks) + len(prefix.on_host) + prefix.num_free

    def allocate_prefix(self, request: Request, prefix: Prefix) -> set[Request]:
        """Give an admitted request its cached prefix, which counts as computed.

        Returns:
            Requests whose chunks, planned for this step, fill blocks of it.
        """
        self._unpin(request)
        blocks = list(prefix.blocks)
        self.pool.touch(block for block in blocks if block != NULL_BLOCK)
        if prefix.on_host:
            assert self._host is not None
            indices = [index for index, block in enumerate(blocks) if block == NULL_BLOCK]
            new = self.pool.get_new_blocks(len(indices))
            for index, block, host_block in zip(indices, new, prefix.on_host, strict=True):
                blocks[index] = block
                self._loads.append((host_block, block))
                self._host.touch(host_block)
                self.pool.cache_block(block, self._hash_block(request, index))
        request.block_table = blocks
        request.num_cached_blocks = len(prefix.blocks)
        request.num_computed_tokens = len(prefix.blocks) * self.block_size
        self._num_computed_tokens += request.num_computed_tokens
        request.table_changed = bool(prefix.blocks)
        return {self._writers[block] for block in prefix.blocks if block in self._writers}

    def plan_blocks(self, request: Request, count: int) -> None:
        """Let later admissions of this step share the blocks that a planned chunk of `count` prompt tokens fills."""
        if not self._caches:
            return
        end = min(request.num_computed_tokens + count, len(request.token_ids))
        for index in range(request.num_cached_blocks, end // self.block_size):
            block = request.block_table[index]
            if self._planned.setdefault(self._hash_block(request, index), block) == block:
                self._writers[block] = request

    def unplan_blocks(self, request: Request) -> None:
        """Undo `plan_blocks`, and the copy of a last block: the request loses its chunk in the step being planned."""
        if self._copies:
            self._copies = [(source, target) for source, target in self._copies if target not in request.block_table]
        self._planned = {key: block for key, block in self._planned.items() if self._writers[block] is not request}
        self._writers = {block: writer for block, writer in self._writers.items() if writer is not request}

    def fills(self, request: Request, prefix: Prefix) -> bool:
        """Whether the chunk of this request that is planned for this step fills blocks of the prefix."""
        return any(self._writers.get(block) is request for block in prefix.blocks)

    def next_block(self, request: Request, count: int) -> tuple[int, BlockHash] | None:
        """Index and hash of the first block that a prompt does not fill with its next tokens; None at its end."""
        index = (request.num_computed_tokens + count) // self.block_size
        full = len(request.token_ids) // self.block_size
        if not self._caches or request.num_cached_blocks == NEVER_CACHED or index >= full:
            return None
        return index, self._hash_block(request, index)

    def shares_block(self, request: Request, index: int, block_hash: BlockHash) -> bool:
        """Whether a waiting request could share the block with this index and hash once it is computed."""
        if not self._caches or request.message.skip_prefix_read:
            return False
        return (index + 1) * self.block_size < len(request.token_ids) \
            and self._hash_block(request, index) == block_hash

    def cache_full_blocks(self, request: Request) -> None:
        """Cache the blocks that are full of known tokens and written by final steps."""
        full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if full <= request.num_cached_blocks or not self._caches:
            return
        for index in range(request.num_cached_blocks, full):
            self.pool.cache_block(request.block_table[index], self._hash_block(request, index))
        request.num_cached_blocks = full

    def finish_plan(self, num_tokens: int) -> None:
        """A step of so many tokens is final; `cache_full_blocks` has cached what it fills."""
        self._num_computed_tokens += num_tokens
        self._planned.clear()
        self._writers.clear()

    def free(self, request: Request, *, cache: bool = True) -> None:
        """Free a request's blocks; cached content stays until the blocks are needed.

        Args:
            cache: False where what it has computed must not be shared.
        """
        if cache:
            self.cache_full_blocks(request)
        self.pool.free_blocks(request.block_table)
        request.block_table = []
        self._num_computed_tokens -= request.num_computed_tokens
        self._tail_sharers.discard(request)
        request.num_computed_tokens = request.num_cached_blocks = 0
        request.shares_tail = request.table_changed = False

    def pin(self, request: Request) -> None:
        """Keep a preempted request's full blocks in host memory, once they are evicted, until it runs again."""
        if self._host is not None:
            request.pinned_hashes = tuple(request.block_hashes)
            self._host.pin(request.pinned_hashes)

    def forget(self, request: Request) -> None:
        """A request has ended: drop cached content that no other request can share."""
        self._unpin(request)
        if self._prefix_caching or not self._caches:
            return
        for block_hash in request.block_hashes:
            block = self.pool.get_cached_block(block_hash)
            if block is not None:
                self.pool.drop_cached(block)

    def reset_prefix_cache(self, requests: Iterable[Request]) -> None:
        """Forget all cached content, and cache no further block of the live requests that are running.

        Args:
            requests: all live requests.
        """
        if not self._caches:
            return
        self.pool.reset_prefix_cache()
        if self._host is not None:
            self._drops += self._host.reset()
        for request in requests:
            request.pinned_hashes = ()
            request.block_hashes.clear()
            request.num_cached_blocks = NEVER_CACHED if request.block_table else 0

    def kv_slots(self) -> tuple[int, int]:
        """KV slots that requests hold, shared ones once, and the number of empty ones among them.

        A slot reserved for a step in flight counts as filled.
        """
        empty = self.pool.num_references * self.block_size - self._num_computed_tokens
        tails: set[int] = set()
        for request in self._tail_sharers:
            if request.block_table[-1] in tails:
                empty -= len(request.block_table) * self.block_size - request.num_computed_tokens
            tails.add(request.block_table[-1])
        return self.pool.num_used * self.block_size, empty

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that the bookkeeping agrees with the block tables of all live requests."""
        computed = sum(request.num_computed_tokens for request in requests)
        assert self._num_computed_tokens == computed, f"{self._num_computed_tokens} counted, {computed} computed tokens"
        assert self._tail_sharers == {request for request in requests if request.shares_tail}, "wrong sharers of tails"
        self.pool.check_integrity(request.block_table for request in requests)
        assert self._caches or not self.pool.num_cached, "content is cached although prefix caching is off"
        if self._host is not None:
            self._host.check_integrity()
        assert not self._planned, "planned blocks outlive their step"

    def _unpin(self, request: Request) -> None:
        if request.pinned_hashes and self._host is not None:
            self._host.unpin(request.pinned_hashes)
            request.pinned_hashes = ()

    def _tail_is_shared(self, request: Request) -> bool:
        return self.pool.ref_count(request.block_table[-1]) > 1

    def _grouped_loads(self) -> tuple[LoadBlocks, ...]:
        """One load for each segment."""
        targets: dict[int, list[int]] = {}
        for host_block, block in self._loads:
            targets.setdefault(host_block.segment, [NULL_BLOCK] * host_block.size)[host_block.row] = block
        return tuple(LoadBlocks(segment, tuple(blocks)) for segment, blocks in targets.items())
