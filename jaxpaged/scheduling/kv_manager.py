"""Which blocks each request references: a cached prefix first, then new blocks as the request grows."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxpaged.core.kv_groups import NULL_BLOCK, KVGroup, units_for
from jaxpaged.scheduling.block_hash import BlockHasher
from jaxpaged.scheduling.block_pool import BlockHash, BlockPool
from jaxpaged.scheduling.host_tier import HostBlock, HostTier
from jaxpaged.scheduling.request import NEVER, Request
from jaxpaged.scheduling.scheduler_output import NO_TRANSFERS, LoadBlocks, SaveBlocks, Transfers
from jaxpaged.scheduling.state_blocks import StateBlocks


@dataclass(frozen=True, slots=True)
class HostedBlock:
    """A block of a prefix whose units have to be loaded from host memory."""

    group: int
    index: int
    units: tuple[HostBlock, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a waiting request.

    Attributes:
        tables: of each group, blocks in order of position; the null block where the content has to be loaded from host
            memory, and where no token after the prefix sees it.
        num_unseen: of each group, number of the latter, which come first.
        num_free: number of units of these blocks that are free now.
        on_host: blocks to load.
        state: the block that has the state after the prefix, or its units in host memory; null without states.
    """

    tables: tuple[tuple[int, ...], ...]
    num_unseen: tuple[int, ...]
    num_free: int = 0
    on_host: tuple[HostedBlock, ...] = ()
    state: int | tuple[HostBlock, ...] = NULL_BLOCK

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])

    @property
    def num_host_units(self) -> int:
        return sum(len(block.units) for block in self.on_host)

    def blocks(self) -> Iterator[int]:
        """The blocks that are in the pool."""
        states = (self.state,) if isinstance(self.state, int) else ()
        return (block for table in (*self.tables, states) for block in table if block != NULL_BLOCK)


class KVManager:
    """The block tables of all requests, one per KV group.

    A block's content is cached as soon as the step that writes it is final: steps run in order on the device, so a
    later step reads what was written. For the same reason a block that no further token of a request sees is freed
    before the request's next step takes new ones.

    Args:
        block_size: tokens in a block.
        max_chunk: maximum number of tokens of a request in one step.
        groups: KV groups of the model; the pool has their widths. That of states, if there is one, is the last.
        prefix_caching: share the blocks of equal prefixes.
        host: saves evicted blocks.

    Attributes:
        column_units: units of a block in every group.
        states: the states of requests; None for a model without any.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, max_chunk: int, groups: Sequence[KVGroup] = (KVGroup(),),
        prefix_caching: bool, host: HostTier | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        tokens = tuple(group for group in groups if not group.save_every)
        self._all_groups, groups = tuple(groups), tokens
        self.column_units = sum(group.width for group in groups)
        self._groups, self._max_chunk = groups, max_chunk
        self._windows = [(index, group) for index, group in enumerate(groups) if group.window is not None]
        # Blocks of a group that a request has at once, at most.
        self._max_blocks = [group.max_blocks(block_size, max_chunk) for group in groups]
        self._prefix_caching = prefix_caching
        self._host = host
        self._caches = prefix_caching or host is not None
        self._hash_block = BlockHasher(block_size, private=not prefix_caching).hash_block
        # Of the step being planned: blocks that its chunks fill, by group and hash, and whose chunks they are.
        self._planned: dict[tuple[int, BlockHash], int] = {}
        self._writers: dict[int, Request] = {}
        self._copies: list[tuple[int, int]] = []
        self._loads: list[tuple[HostBlock, int]] = []
        self._drops: list[int] = []
        # Updated with each change, so that `kv_slots` need not visit every running request.
        self._num_filled_slots = 0
        self._tail_sharers: set[Request] = set()
        self.num_saved = self.num_loaded = 0
        self.states = None if self._all_groups == tokens else StateBlocks(
            pool, block_size, self._all_groups[-1], len(tokens), self._caches, self._hash_block)

    @property
    def fork_units(self) -> int:
        """Units that a fork needs as soon as it continues."""
        return self.column_units + (self.states.width if self.states else 0)

    def blocks_for(self, tokens: int) -> int:
        """Blocks of one group that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def units_for(self, tokens: int) -> int:
        """Maximum number of units that a request of `tokens` tokens has at once."""
        return units_for(self._all_groups, tokens, self.block_size, self._max_chunk)

    def blocks_of(self, request: Request) -> Iterator[int]:
        """All blocks of a request, the null block now and then among them."""
        yield from (block for table in request.block_tables for block in table)
        yield request.state_block

    def chunk_limit(self, request: Request, count: int) -> int:
        """So many of `count` more tokens that a step may compute: it ends where the state is to be kept."""
        return self.states.chunk_limit(request, count) if self.states else count

    def keep_state(self, request: Request) -> None:
        """Before a running request computes more: its state is kept for others where that is due."""
        assert self.states is not None
        if self.states.keep(request):
            request.shares_tail = True
            self._tail_sharers.add(request)

    def slide(self, request: Request) -> None:
        """Free the blocks of a running request that no token from `num_computed_tokens` on sees."""
        request.slides_at = NEVER
        for index, group in self._windows:
            table, passed = request.block_tables[index], request.num_unseen[index]
            first = min(group.first_needed(request.num_computed_tokens, self.block_size), len(table))
            if first > passed:
                self.pool.free_blocks(table[passed:first])
                table[passed:first] = [NULL_BLOCK] * (first - passed)
                request.num_unseen[index] = first
                self._num_filled_slots -= (first - passed) * self.block_size * group.width
            assert group.window is not None
            request.slides_at = min(request.slides_at, (first + 1) * self.block_size + group.window - 1)

    def num_new_units(self, request: Request, count: int) -> int:
        """Units to allocate before `count` more tokens of a running request can be computed in one step."""
        columns = -(-(request.num_computed_tokens + count) // self.block_size) - len(request.block_tables[0])
        missing = columns * self.column_units if columns > 0 else 0
        return missing + self._shared_tail_units(request) if request.shares_tail and count else missing

    def num_units_left(self, request: Request, count: int) -> int:
        """Units that a running request still needs, beyond those it has, for `count` more tokens in several steps."""
        if not self._windows:
            return self.num_new_units(request, count)
        columns = max(0, -(-(request.num_computed_tokens + count) // self.block_size) - len(request.block_tables[0]))
        missing = sum(group.width * min(columns, max(0, most - (len(table) - passed)))
                      for group, most, table, passed in zip(self._groups, self._max_blocks, request.block_tables,
                                                            request.num_unseen, strict=True))
        return missing + self._shared_tail_units(request) if request.shares_tail and count else missing

    def allocate(self, request: Request, count: int) -> None:
        """Allocate the free blocks that `count` more tokens need; one that is shared and not full is copied."""
        shares_tail = request.shares_tail
        if shares_tail:
            for index, table in enumerate(request.block_tables if self._has_open_tail(request) else ()):
                if self.pool.ref_count(table[-1]) > 1:
                    [copy] = self.pool.get_new_blocks(1, index)
                    self._copies += zip(self.pool.units(table[-1]), self.pool.units(copy), strict=True)
                    self.pool.free_blocks([table[-1]])
                    table[-1] = copy
                    request.table_changed = True
            request.shares_tail = False
            self._tail_sharers.remove(request)
        columns = -(-(request.num_computed_tokens + count) // self.block_size) - len(request.block_tables[0])
        if columns > 0:
            for index, table in enumerate(request.block_tables):
                table += self.pool.get_new_blocks(columns, index)
        if self.states and shares_tail:
            self._copies += self.states.own(request)

    def unit_rows(self, request: Request, first: int = 0, end: int | None = None) -> tuple[Sequence[int], ...]:
        """The units of a request's blocks from index `first` to `end`: `column_units` rows of equal length, or none."""
        if self.column_units == 1:
            return (request.block_tables[0][first:end],)
        rows: list[Sequence[int]] = []
        for group, table in zip(self._groups, request.block_tables, strict=True):
            blocks = table[first:end]
            if not blocks:
                return ()
            if group.width == 1:
                rows.append(blocks)
                continue
            null = (NULL_BLOCK,) * group.width
            rows += zip(*(self.pool.units(block) if block != NULL_BLOCK else null for block in blocks), strict=True)
        return tuple(rows)

    def table_rows(self, request: Request) -> tuple[Sequence[int], ...]:
        """All units of a request's blocks, as `unit_rows`, and those of its state."""
        rows = self.unit_rows(request)
        return (*rows, self.pool.units(request.state_block)) if self.states else rows

    def fork(self, parent: Request, child: Request) -> None:
        """Share all blocks of a running request with `child`; the first to write to the last block copies it."""
        for table in parent.block_tables:
            self.pool.touch(block for block in table if block != NULL_BLOCK)
        child.block_tables = [list(table) for table in parent.block_tables]
        child.num_unseen, child.slides_at = list(parent.num_unseen), parent.slides_at
        child.num_computed_tokens, child.num_cached_blocks = parent.num_computed_tokens, parent.num_cached_blocks
        child.block_hashes = list(parent.block_hashes)
        child.table_changed = True
        if self.states:
            self.states.share(parent, child)
        if parent.num_computed_tokens % self.block_size or self.states:
            parent.shares_tail = child.shares_tail = True
            self._tail_sharers |= {parent, child}
        self._num_filled_slots += self._filled_slots(child)

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

        A group that keeps everything must have all of its blocks, one with a window those that the token after it
        sees. Its last token is never part of it: a step has to compute the logits.
        """
        groups = self._groups
        found: tuple[list[int | tuple[HostBlock, ...] | None], ...] = tuple([] for _ in groups)
        if not self._caches or request.message.skip_prefix_read:
            return Prefix(((),) * len(groups), (0,) * len(groups))
        runs, length = [0] * len(groups), 0
        state: int | tuple[HostBlock, ...] = NULL_BLOCK
        for index in range((len(request.token_ids) - 1) // self.block_size):
            block_hash = self._hash_block(request, index)
            for number, blocks in enumerate(found):
                block = self._find_block(number, block_hash)
                blocks.append(block)
                runs[number] = 0 if block is None else runs[number] + 1
            if not runs[0] and groups[0].window is None:
                break
            if all(run >= group.prefix_blocks(index + 1, self.block_size)
                   for run, group in zip(runs, groups, strict=True)):
                if self.states:
                    kept = self._find_block(len(groups), block_hash)
                    if kept is None:
                        continue
                    state = kept
                length = index + 1
        tables, num_unseen, on_host, num_free = [], [], list[HostedBlock](), 0
        for number, (group, blocks) in enumerate(zip(groups, found, strict=True)):
            first = length - group.prefix_blocks(length, self.block_size)
            table = [NULL_BLOCK] * length
            for index in range(first, length):
                block = blocks[index]
                if isinstance(block, int):
                    table[index] = block
                    num_free += 0 if self.pool.ref_count(block) else group.width
                else:
                    assert block is not None
                    on_host.append(HostedBlock(number, index, block))
            tables.append(tuple(table))
            num_unseen.append(first)
        return Prefix(tuple(tables), tuple(num_unseen), num_free, tuple(on_host), state)

    def num_needed(self, request: Request, prefix: Prefix) -> int:
        """Free units that a waiting request with this cached prefix needs for all the tokens it has."""
        columns, units = self.blocks_for(request.num_tokens), prefix.num_host_units + prefix.num_free
        for group, most, passed in zip(self._groups, self._max_blocks, prefix.num_unseen, strict=True):
            units += group.width * max(0, min(columns - passed, most) - (prefix.num_blocks - passed))
        return units + self.states.width if self.states else units

    def allocate_prefix(self, request: Request, prefix: Prefix) -> set[Request]:
        """Give an admitted request its cached prefix, which counts as computed.

        Returns:
            Requests whose chunks, planned for this step, fill blocks of it.
        """
        self._unpin(request)
        self.pool.touch(prefix.blocks())
        request.block_tables = [list(table) for table in prefix.tables]
        for hosted in prefix.on_host:
            assert self._host is not None
            [block] = self.pool.get_new_blocks(1, hosted.group)
            request.block_tables[hosted.group][hosted.index] = block
            for host_block, unit in zip(hosted.units, self.pool.units(block), strict=True):
                self._loads.append((host_block, unit))
                self._host.touch(host_block)
            self.pool.cache_block(block, self._hash_block(request, hosted.index), hosted.group)
        request.num_unseen = list(prefix.num_unseen)
        request.slides_at = 0 if self._windows else NEVER
        request.num_cached_blocks = prefix.num_blocks
        request.num_computed_tokens = prefix.num_blocks * self.block_size
        self._num_filled_slots += self._filled_slots(request)
        request.table_changed = prefix.num_blocks > 0
        if self.states:
            self._begin_state(request, prefix)
        return {self._writers[block] for block in prefix.blocks() if block in self._writers}

    def _begin_state(self, request: Request, prefix: Prefix) -> None:
        """The state after the prefix; what it is written to is allocated with the next blocks."""
        assert self.states is not None
        if isinstance(prefix.state, int):
            request.state_block = prefix.state
        else:
            assert self._host is not None
            [request.state_block] = self.pool.get_new_blocks(1, self.states.group)
            for host_block, unit in zip(prefix.state, self.pool.units(request.state_block), strict=True):
                self._loads.append((host_block, unit))
                self._host.touch(host_block)
            # Not cached: it would have to be copied before it is loaded. Host memory keeps it.
        self.states.begin(request)
        request.shares_tail = True
        self._tail_sharers.add(request)

    def plan_blocks(self, request: Request, count: int) -> None:
        """Let later admissions of this step share the blocks that a planned chunk of `count` prompt tokens fills."""
        if not self._caches:
            return
        end = min(request.num_computed_tokens + count, len(request.token_ids))
        for index in range(request.num_cached_blocks, end // self.block_size):
            block_hash = self._hash_block(request, index)
            for group, table in enumerate(request.block_tables):
                block = table[index]
                if block != NULL_BLOCK and self._planned.setdefault((group, block_hash), block) == block:
                    self._writers[block] = request

    def unplan_blocks(self, request: Request) -> None:
        """Undo `plan_blocks`, and the copy of a last block: the request loses its chunk in the step being planned."""
        if self._copies:
            own = {unit for block in self.blocks_of(request) for unit in self.pool.units(block)}
            self._copies = [(source, target) for source, target in self._copies if target not in own]
        self._planned = {key: block for key, block in self._planned.items() if self._writers[block] is not request}
        self._writers = {block: writer for block, writer in self._writers.items() if writer is not request}

    def fills(self, request: Request, prefix: Prefix) -> bool:
        """Whether the chunk of this request that is planned for this step fills blocks of the prefix."""
        return any(self._writers.get(block) is request for block in prefix.blocks())

    def next_block(self, request: Request, count: int) -> tuple[int, BlockHash] | None:
        """Index and hash of the first block that a prompt does not fill with its next tokens; None at its end."""
        index = (request.num_computed_tokens + count) // self.block_size
        full = len(request.token_ids) // self.block_size
        if not self._caches or request.num_cached_blocks == NEVER or index >= full:
            return None
        if self.states:
            return None  # others can only begin where a state is kept
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
            block_hash = self._hash_block(request, index)
            for group, table in enumerate(request.block_tables):
                if table[index] != NULL_BLOCK:
                    self.pool.cache_block(table[index], block_hash, group)
        request.num_cached_blocks = full

    def finish_plan(self, num_tokens: int) -> None:
        """A step of `num_tokens` tokens is final; `cache_full_blocks` has cached what it fills."""
        self._num_filled_slots += num_tokens * self.column_units
        self._planned.clear()
        self._writers.clear()

    def take_back(self, request: Request, count: int) -> None:
        """The last `count` computed tokens of a running request were only proposed, and rejected."""
        request.num_computed_tokens -= count
        self._num_filled_slots -= count * self.column_units
        needed = self.blocks_for(request.num_computed_tokens)
        for table in request.block_tables:
            self.pool.free_blocks(table[needed:])
            del table[needed:]

    def free(self, request: Request, *, cache: bool = True) -> None:
        """Free a request's blocks; cached content stays until the blocks are needed.

        Args:
            cache: False where what it has computed must not be shared.
        """
        if cache:
            self.cache_full_blocks(request)
            if self.states:
                self.states.keep(request)
        self._num_filled_slots -= self._filled_slots(request)
        for table in request.block_tables:
            self.pool.free_blocks(table)
        if self.states:
            self.states.free(request)
        request.block_tables, request.num_unseen, request.slides_at = [], [], NEVER
        self._tail_sharers.discard(request)
        request.num_computed_tokens = request.num_cached_blocks = request.num_proposed = 0
        request.shares_tail = request.table_changed = False

    def pin(self, request: Request) -> None:
        """Keep a preempted request's full blocks in host memory, once they are evicted, until it runs again."""
        if self._host is not None:
            request.pinned_hashes = tuple(key for group in range(len(self._groups)) for block_hash in
                                          request.block_hashes for key in self.pool.unit_keys(group, block_hash))
            if self.states:
                request.pinned_hashes += self.states.kept_keys(request)
            self._host.pin(request.pinned_hashes)

    def forget(self, request: Request) -> None:
        """A request has ended: drop cached content that no other request can share."""
        self._unpin(request)
        if self._prefix_caching or not self._caches:
            return
        for block_hash in request.block_hashes:
            for group in range(len(self._all_groups)):
                block = self.pool.get_cached_block(block_hash, group)
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
            request.num_cached_blocks = NEVER if request.block_tables else 0

    def kv_slots(self) -> tuple[int, int]:
        """KV slots that requests hold, shared ones once, and the number of empty ones among them, in units of the pool.

        A slot reserved for a step in flight counts as filled.
        """
        num_states = self.states.num_references if self.states else 0
        empty = (self.pool.num_references - num_states) * self.block_size - self._num_filled_slots
        tails: set[int] = set()
        for request in self._tail_sharers:
            if not request.block_tables[0]:
                continue
            tail = request.block_tables[0][-1]
            if tail in tails:
                empty -= (request.num_blocks * self.block_size - request.num_computed_tokens) * self.column_units
            tails.add(tail)
        return self.pool.num_used * self.block_size, empty

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that the bookkeeping agrees with the block tables of all live requests."""
        filled = sum(map(self._filled_slots, requests))
        assert self._num_filled_slots == filled, f"{self._num_filled_slots} counted, {filled} filled slots"
        for request in requests:
            assert len(set(map(len, request.block_tables))) <= 1, "the tables of a request differ in length"
            for table, passed in zip(request.block_tables, request.num_unseen, strict=True):
                assert not any(table[:passed]), "a block that no token sees is referenced"
                assert all(table[passed:]), "a block that is still seen has been freed"
        assert self._tail_sharers == {request for request in requests if request.shares_tail}, "wrong sharers of tails"
        states = [[request.state_block] for request in requests if request.state_block != NULL_BLOCK]
        self.pool.check_integrity((*(table for request in requests for table in request.block_tables), *states),
                                  sum(sum(request.num_unseen) for request in requests))
        if self.states:
            self.states.check_integrity(requests)
        assert self._caches or not self.pool.num_cached, "content is cached although prefix caching is off"
        if self._host is not None:
            self._host.check_integrity()
        assert not self._planned, "planned blocks outlive their step"

    def _unpin(self, request: Request) -> None:
        if request.pinned_hashes and self._host is not None:
            self._host.unpin(request.pinned_hashes)
            request.pinned_hashes = ()

    def _find_block(self, group: int, block_hash: BlockHash) -> int | tuple[HostBlock, ...] | None:
        """The block of a group with this content, or the units of its copy in host memory."""
        block = self.pool.get_cached_block(block_hash, group)
        if block is None:
            block = self._planned.get((group, block_hash))
        if block is not None or self._host is None:
            return block
        if self._host.get(self.pool.unit_keys(group, block_hash)[0]) is None:
            return None
        units = [self._host.get(key) for key in self.pool.unit_keys(group, block_hash)]
        return tuple(unit for unit in units if unit is not None) if None not in units else None

    def _filled_slots(self, request: Request) -> int:
        passed = sum(group.width * count for group, count in zip(self._groups, request.num_unseen, strict=False))
        return request.num_computed_tokens * self.column_units - passed * self.block_size

    def _shared_tail_units(self, request: Request) -> int:
        units = self.states.num_new_units(request) if self.states else 0
        if not self._has_open_tail(request):
            return units
        return units + sum(group.width for group, table in zip(self._groups, request.block_tables, strict=True)
                           if self.pool.ref_count(table[-1]) > 1)

    def _has_open_tail(self, request: Request) -> bool:
        """Whether the last block of a request is not full."""
        return request.num_computed_tokens % self.block_size > 0

    def _grouped_loads(self) -> tuple[LoadBlocks, ...]:
        """One load for each segment."""
        targets: dict[int, list[int]] = {}
        for host_block, block in self._loads:
            targets.setdefault(host_block.segment, [NULL_BLOCK] * host_block.size)[host_block.row] = block
        return tuple(LoadBlocks(segment, tuple(blocks)) for segment, blocks in targets.items())
