"""Which blocks each request owns: shared prefixes first, then blocks of its own as it grows."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jaxpaged.scheduling.block_pool import NULL_BLOCK, BlockPool, Key, PrefixCache
from jaxpaged.scheduling.host_tier import HostBlock, HostTier, LoadBlocks, SaveBlocks
from jaxpaged.scheduling.request import Request

NOT_SHARED = 2**62  # more blocks than any table has: the cache knows all of them, so it is told of none


@dataclass(frozen=True, slots=True)
class Prefix:
    """What holds the beginning of a request.

    Attributes:
        blocks: one after the other; the null block where it is to be brought back from host memory.
        num_free: how many of the blocks are free until the request takes them.
        on_host: where those are that have to be brought back, in order.
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

    A block's content is known to the prefix cache as soon as the step that writes it is planned for good: steps run in
    order on the device, so whoever reads it in a later step reads what was written.

    Args:
        pool: the pool's blocks.
        block_size: tokens in a block.
        prefix_caching: share the blocks of equal beginnings.
        host: keeps evicted blocks.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, prefix_caching: bool, host: HostTier | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self._shared = prefix_caching
        self._host = host
        self._cache = PrefixCache(block_size, private=not prefix_caching) if prefix_caching or host else None
        # Of the step being planned: blocks that its chunks fill, by key, and whose chunks they are.
        self._planned: dict[Key, int] = {}
        self._writers: dict[int, Request] = {}
        self._copies: list[tuple[int, int]] = []
        self._evicted: list[tuple[Key, int]] = []
        self._loads: list[tuple[HostBlock, int]] = []
        self._saves: list[SaveBlocks] = []
        self._drops: list[int] = []
        # Kept up to date, so that a step need not ask each running request.
        self._num_computed = 0  # tokens of all requests that own blocks
        self._tail_sharers: set[Request] = set()
        self.num_saved = self.num_loaded = 0
        pool.on_evict = self._forget

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def num_missing(self, request: Request, count: int) -> int:
        """Blocks to take before `count` more tokens of a running request can be computed."""
        missing = max(0, -(-(request.num_computed_tokens + count) // self.block_size) - len(request.block_table))
        return missing + 1 if request.shares_tail and count and self._tail_is_shared(request) else missing

    def take(self, request: Request, blocks: int) -> None:
        """Take so many blocks, which are free, for further tokens; the first one for a copy of a shared last block."""
        taken = self.pool.get_new_blocks(blocks)
        if request.shares_tail and self._tail_is_shared(request):
            tail = request.block_table[-1]
            self._copies.append((tail, taken[0]))
            self.pool.free_blocks([tail])
            request.block_table[-1] = taken.pop(0)
            request.table_changed = True
        if request.shares_tail:
            request.shares_tail = False
            self._tail_sharers.remove(request)
        request.block_table.extend(taken)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` own all blocks of a running request; whoever first writes to the last one gets a copy of it."""
        self.pool.touch(parent.block_table)
        child.block_table = list(parent.block_table)
        child.num_computed_tokens, child.num_cached_blocks = parent.num_computed_tokens, parent.num_cached_blocks
        child.block_hashes = list(parent.block_hashes)
        child.table_changed = True
        if parent.num_computed_tokens % self.block_size:
            parent.shares_tail = child.shares_tail = True
            self._tail_sharers |= {parent, child}
        self._num_computed += child.num_computed_tokens

    def drain_transfers(self) -> Transfers:
        """What has to be moved before the next step writes anything."""
        if not (self._evicted or self._copies or self._loads or self._drops):
            return NO_TRANSFERS
        if self._host is not None:
            saves, drops = self._host.save(self._evicted)
            self._saves += saves
            self._drops += drops
        transfers = Transfers(tuple(self._saves), tuple(self._copies), self._grouped_loads(), tuple(self._drops))
        self.num_saved += sum(len(save.blocks) for save in transfers.saves)
        self.num_loaded += len(self._loads)
        for done in (self._evicted, self._saves, self._copies, self._loads, self._drops):
            done.clear()
        return transfers

    def _grouped_loads(self) -> tuple[LoadBlocks, ...]:
        """One load for each segment."""
        targets: dict[int, list[int]] = {}
        for place, block in self._loads:
            targets.setdefault(place.segment, [NULL_BLOCK] * place.size)[place.row] = block
        return tuple(LoadBlocks(segment, tuple(blocks)) for segment, blocks in targets.items())

    def _tail_is_shared(self, request: Request) -> bool:
        return self.pool.ref_count(request.block_table[-1]) > 1

    def find_prefix(self, request: Request) -> Prefix:
        """The longest beginning of a waiting request that blocks hold or a chunk planned for this step will fill.

        Its last token stays to be computed: somebody has to give the logits.
        """
        if self._cache is None or request.message.skip_prefix_read:
            return Prefix()
        blocks: list[int] = []
        on_host: list[HostBlock] = []
        for index in range((len(request.token_ids) - 1) // self.block_size):
            key = self._cache.key(request, index)
            block = self._cache.get(key)
            if block is None:
                block = self._planned.get(key)
            if block is None:
                place = self._host.get(key) if self._host else None
                if place is None:
                    break
                on_host.append(place)
                block = NULL_BLOCK
            blocks.append(block)
        num_free = sum(block != NULL_BLOCK and not self.pool.ref_count(block) for block in blocks)
        return Prefix(tuple(blocks), num_free, tuple(on_host))

    def num_needed(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that a waiting request takes, all its tokens computed, if it begins with `prefix`."""
        return self.blocks_for(request.num_tokens) - len(prefix.blocks) + len(prefix.on_host) + prefix.num_free

    def begin(self, request: Request, prefix: Prefix) -> set[Request]:
        """Let a request own its prefix, which counts as computed.

        Returns:
            Requests whose chunks, planned for this step, fill blocks of it.
        """
        self.unpin(request)
        blocks = list(prefix.blocks)
        self.pool.touch(block for block in blocks if block != NULL_BLOCK)
        if prefix.on_host:
            assert self._cache is not None and self._host is not None
            indices = [index for index, block in enumerate(blocks) if block == NULL_BLOCK]
            taken = self.pool.get_new_blocks(len(indices))
            for index, block, place in zip(indices, taken, prefix.on_host, strict=True):
                blocks[index] = block
                self._loads.append((place, block))
                self._host.use(place)
                if self._cache.add(self._cache.key(request, index), block):
                    self.pool.keep(block)
        request.block_table = blocks
        request.num_cached_blocks = len(prefix.blocks)
        request.num_computed_tokens = len(prefix.blocks) * self.block_size
        self._num_computed += request.num_computed_tokens
        request.table_changed = bool(prefix.blocks)
        return {self._writers[block] for block in prefix.blocks if block in self._writers}

    def plan(self, request: Request, count: int) -> None:
        """Note the blocks that a chunk of `count` tokens of a prompt will fill, if the step stays as it is planned."""
        if self._cache is None:
            return
        end = min(request.num_computed_tokens + count, len(request.token_ids))
        for index in range(request.num_cached_blocks, end // self.block_size):
            block = request.block_table[index]
            if self._planned.setdefault(self._cache.key(request, index), block) == block:
                self._writers[block] = request

    def fills(self, request: Request, prefix: Prefix) -> bool:
        """Whether a chunk of this request that is planned for this step fills blocks of the prefix."""
        return any(self._writers.get(block) is request for block in prefix.blocks)

    def next_key(self, request: Request, count: int) -> tuple[int, Key] | None:
        """Index and key of the first block that a prompt does not fill with its next tokens; None at its end."""
        index = (request.num_computed_tokens + count) // self.block_size
        full = len(request.token_ids) // self.block_size
        if self._cache is None or request.num_cached_blocks == NOT_SHARED or index >= full:
            return None
        return index, self._cache.key(request, index)

    def shares_block(self, request: Request, index: int, key: Key) -> bool:
        """Whether a waiting request would share the block of this index and key once somebody has computed it."""
        if self._cache is None or request.message.skip_prefix_read:
            return False
        return (index + 1) * self.block_size < len(request.token_ids) and self._cache.key(request, index) == key

    def note_computed(self, request: Request) -> None:
        """Tell the prefix cache of the blocks that are full of known tokens and written by planned steps."""
        full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if full <= request.num_cached_blocks or self._cache is None:
            return
        for index in range(request.num_cached_blocks, full):
            block = request.block_table[index]
            if self._cache.add(self._cache.key(request, index), block):
                self.pool.keep(block)
        request.num_cached_blocks = full

    def end_plan(self, num_tokens: int) -> None:
        """A step of so many tokens is final: what was only planned is forgotten, `note_computed` has told the rest."""
        self._num_computed += num_tokens
        self._planned.clear()
        self._writers.clear()

    def unplan(self, request: Request) -> None:
        """A request loses its chunk in the step being planned."""
        if self._copies:
            self._copies = [(source, target) for source, target in self._copies if target not in request.block_table]
        self._planned = {key: block for key, block in self._planned.items() if self._writers[block] is not request}
        self._writers = {block: writer for block, writer in self._writers.items() if writer is not request}

    def release(self, request: Request, *, valid: bool = True) -> None:
        """Give a request's blocks back; their content stays until they are needed.

        Args:
            valid: False where what it has computed must not be shared.
        """
        if valid:
            self.note_computed(request)
        self.pool.free_blocks(request.block_table)
        request.block_table = []
        self._num_computed -= request.num_computed_tokens
        self._tail_sharers.discard(request)
        request.num_computed_tokens = request.num_cached_blocks = 0
        request.shares_tail = request.table_changed = False

    def pin(self, request: Request) -> None:
        """Keep a preempted request's full blocks in host memory, once they are evicted, until it runs again."""
        if self._host is not None:
            request.pinned_hashes = tuple(request.block_hashes)
            self._host.pin(request.pinned_hashes)

    def unpin(self, request: Request) -> None:
        """Undo `pin`: the request runs again, or has ended."""
        if request.pinned_hashes and self._host is not None:
            self._host.unpin(request.pinned_hashes)
            request.pinned_hashes = ()

    def forget(self, request: Request) -> None:
        """A request has ended: what only itself could share is worth nothing any more."""
        self.unpin(request)
        if self._shared or self._cache is None:
            return
        for key in request.block_hashes:
            block = self._cache.get(key)
            if block is not None:
                self._cache.remove(block)
                self.pool.discard(block)

    def reset_prefix_cache(self, requests: Iterable[Request]) -> None:
        """Forget all content; what the running ones of all live requests have computed is shared with nobody."""
        if self._cache is None:
            return
        for block in self._cache.reset():
            self.pool.discard(block)
        if self._host is not None:
            self._drops += self._host.reset()
            self._evicted.clear()
        for request in requests:
            request.pinned_hashes = ()
            request.block_hashes.clear()
            request.num_cached_blocks = NOT_SHARED if request.block_table else 0

    def slots(self) -> tuple[int, int]:
        """KV slots that requests hold, shared ones once, and how many of them are empty.

        A slot reserved for a step in flight counts as filled.
        """
        empty = self.pool.num_references * self.block_size - self._num_computed
        tails: set[int] = set()
        for request in self._tail_sharers:
            if request.block_table[-1] in tails:
                empty -= len(request.block_table) * self.block_size - request.num_computed_tokens
            tails.add(request.block_table[-1])
        return self.pool.num_used * self.block_size, empty

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that the books agree with the block tables."""
        computed = sum(request.num_computed_tokens for request in requests)
        assert self._num_computed == computed, f"{self._num_computed} computed tokens on the books, {computed} in fact"
        assert self._tail_sharers == {request for request in requests if request.shares_tail}, "wrong sharers of tails"
        self.pool.check_integrity(request.block_table for request in requests)
        if self._cache is None:
            assert not self.pool.num_cached, "content is kept although nobody can ask for it"
        else:
            self._cache.check_integrity(self.pool.blocks_with_content())
        if self._host is not None:
            self._host.check_integrity()
        assert not self._planned, "blocks of a plan outlive it"

    def _forget(self, block: int) -> None:
        assert self._cache is not None
        key = self._cache.remove(block)
        if self._host is not None:
            self._evicted.append((key, block))
