"""Plans a step: how many tokens of each request it computes, which requests it admits, and which it preempts.

A plan is made in four passes over one token budget: a token for each decoding request, chunks of the running prompts,
the first chunks of waiting requests, and what is left of the budget for the prompts again. It is then final: its chunks
are made, and their tokens count as computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpaged.scheduling.block_pool import BlockHash
from jaxpaged.scheduling.kv_manager import KVManager, Prefix
from jaxpaged.scheduling.policy import Policy
from jaxpaged.scheduling.queues import Queues
from jaxpaged.scheduling.request import Request, RequestStatus
from jaxpaged.scheduling.scheduler_output import (
    NO_TRANSFERS,
    FullSampling,
    NewRequest,
    PromptScoring,
    ScheduledChunk,
    SchedulerOutput,
)

# A step's time grows as its tokens plus about this many, on CPU as on GPU: the weights are read whatever the batch.
STEP_OVERHEAD_TOKENS = 64
# A prompt of more tokens than this, and than a budget, takes no more of a step than the requests beside it, so that the
# gaps in their streams stay small; but at least an eighth of the budget, and more of a small one.
LONG_PROMPT_TOKENS = 2048
LONG_PROMPT_CHUNK = 128
# Waiting requests that one step looks at.
LOOK_AHEAD = 64
# Number of others that may be admitted past a request that does not fit, before none is until it fits.
MAX_PASSED = 16


class StepRequests(NamedTuple):
    """Whose a step's chunks and results are.

    Attributes:
        chunks: the request of each chunk.
        rows: the request of each sampled row.
        proposed: requests with proposed tokens in their chunks.
    """

    chunks: list[Request]
    rows: list[Request]
    proposed: list[Request]


class StepPlan:
    """The tokens of one step.

    Attributes:
        left: tokens of the budget that are not scheduled.
        num_scheduled_tokens: tokens of each request's chunk, in the order of the rows.
        fixed: requests whose chunks fill blocks that others of this step read, or have proposed tokens: they are
            neither cut nor dropped.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.left = budget
        self.num_scheduled_tokens: dict[Request, int] = {}
        self.fixed: set[Request] = set()

    @property
    def num_tokens(self) -> int:
        return self._budget - self.left

    def add_tokens(self, request: Request, count: int) -> None:
        self.num_scheduled_tokens[request] = self.num_scheduled_tokens.get(request, 0) + count
        self.left -= count

    def drop_chunk(self, request: Request) -> None:
        """Drop the chunk of a request, if it has one."""
        self.left += self.num_scheduled_tokens.pop(request, 0)

    def fit(self, step_sizes: Sequence[int]) -> None:
        """Cut prefill chunks down to the next smaller step size where padding would cost more than they bring.

        A token of each stays: without it, a short prompt would wait for as long as the others fill that size.
        """
        total = self.num_tokens
        below = max((size for size in step_sizes if size <= total), default=0)
        above = min((size for size in step_sizes if size >= total), default=total)
        if not below or (below + STEP_OVERHEAD_TOKENS) * total >= (above + STEP_OVERHEAD_TOKENS) * below:
            return
        cuttable = {request: count - 1 for request, count in self.num_scheduled_tokens.items()
                    if count > 1 and request not in self.fixed}
        excess = total - below
        if sum(cuttable.values()) < excess:
            return
        for request in reversed(cuttable):
            cut = min(excess, cuttable[request])
            self.add_tokens(request, -cut)
            excess -= cut


class StepPlanner:
    """Spends the token budget, slots and blocks of each step on running and waiting requests.

    Args:
        queues: the requests; admitted ones go from waiting to running, preempted ones back.
        kv: their blocks, and what is cached of a prompt.
        policy: which request may preempt which, and the number of blocks that stay free for growth.
        budget: maximum number of tokens in a step.
        max_samples: maximum number of rows that a step samples.
        step_sizes: ascending numbers of tokens that a step can have after padding.
        swap: host memory keeps what a preempted request has computed, until it runs again.

    Attributes:
        num_preemptions: since the start.
    """

    def __init__(
        self, queues: Queues, kv: KVManager, policy: Policy, *, budget: int, max_samples: int,
        step_sizes: Sequence[int], swap: bool,
    ) -> None:
        self.num_preemptions = 0
        self._queues = queues
        self._kv = kv
        self._pool = kv.pool
        self._block_size = kv.block_size
        self._policy = policy
        self._budget = budget
        self._max_samples = max_samples
        self._step_sizes = tuple(step_sizes)
        self._swap = swap
        self._plan = StepPlan(budget)
        self._proposals: dict[Request, Sequence[int]] = {}
        self._num_steps = 0

    def propose(self, request: Request, token_ids: Sequence[int]) -> None:
        """Let the next step compute, where it has room for them, tokens that may follow those of a request."""
        self._proposals[request] = token_ids

    def plan_step(self, now: float) -> tuple[SchedulerOutput, StepRequests]:
        """The next step, with the blocks it needs; empty when nothing can run now."""
        plan = self._plan = StepPlan(self._budget)
        prefills = self._plan_decodes()
        self._plan_prefills(prefills)
        if self._queues.waiting:
            self._admit_waiting(prefills, now)
        self._plan_rest(prefills)
        if self._proposals:
            self._plan_proposals()
        plan.fit(self._step_sizes)
        chunks, requests = self._make_chunks()
        if self._queues.num_forks:
            chunks, requests = self._add_forks(chunks, requests, now)
        self._proposals.clear()
        self._kv.finish_plan(plan.num_tokens)
        # Without a chunk nothing is dispatched: blocks to move wait for the next step.
        transfers = self._kv.drain_transfers() if chunks else NO_TRANSFERS
        rows = requests.rows
        full = _full_sampling(rows) if any([request.full_sampling for request in rows]) else None
        self._num_steps += 1
        proposed = sum([request.num_proposed for request in requests.proposed])
        return SchedulerOutput(tuple(chunks), plan.num_tokens, len(rows), proposed, transfers, full,
                               self._num_steps), requests

    def admit_branches(self, forks: Sequence[tuple[Request, Request]]) -> None:
        """Run forks, given with their parents, beside them; those without room wait like other requests."""
        reserved = self._reserved_blocks() if forks else 0
        for parent, fork in forks:
            if parent.slot >= 0 and self._has_room_for_fork(reserved):
                self._kv.fork(parent, fork)
                self._queues.start_running(fork, parent.scheduled_time or 0.0)
                reserved += self._fork_units(fork)
            else:
                fork.block_hashes = list(parent.block_hashes)
                fork.status = RequestStatus.PREEMPTED  # its cached prompt tokens are counted already
                self._queues.waiting.add_request(fork)

    def stop(self, request: Request) -> None:
        """Free the blocks and the slot of a running request without a chunk in the step; it is in no queue then."""
        self._kv.free(request)
        self._queues.stop_running(request)
        if self._swap:
            self._kv.pin(request)
        request.status = RequestStatus.PREEMPTED

    # Running requests

    def _plan_decodes(self) -> list[Request]:
        """Plan the running requests that lack one token; return the others that lack some, in their order.

        One token of the budget is left for the first of those: requests after it cannot use all of it up.
        """
        plan, block_size, running = self._plan, self._block_size, RequestStatus.RUNNING
        prefills: list[Request] = []
        for request in self._queues.running.first():
            if plan.left <= bool(prefills):
                break
            if request.status is not running:
                break  # preempted by one before it, as are those after it
            count = request.num_to_compute
            if not count:
                continue
            if count > 1:
                prefills.append(request)
            elif ((request.num_computed_tokens < len(request.block_tables[0]) * block_size
                   and request.num_computed_tokens < request.slides_at and not request.shares_tail)
                  or self._allocate(request, 1)):
                plan.num_scheduled_tokens[request] = 1
                plan.left -= 1
        return prefills

    def _plan_prefills(self, prefills: list[Request]) -> None:
        """Plan chunks of the running prompts: the first one's, then the others', those that lack least first."""
        if prefills:
            first, *others = prefills
            others.sort(key=lambda request: request.num_to_compute)
            self._plan_chunk(first, others)
            for request in others:
                self._plan_chunk(request)

    def _plan_chunk(self, request: Request, others: Sequence[Request] = ()) -> None:
        """Plan a chunk of a prompt; `others` lack tokens as well, the first of them least."""
        count, left = self._kv.chunk_limit(request, request.num_to_compute), self._plan.left
        if self._is_long_prompt(request):
            minimum = max(self._budget // 8, min(self._budget // 4, LONG_PROMPT_CHUNK))
            left = min(left, max(minimum, self._budget - left + STEP_OVERHEAD_TOKENS))
        if count > left:
            shorter = (others and others[0].num_to_compute < count) or any(
                waiting.num_tokens < count for waiting in self._queues.waiting.first(LOOK_AHEAD))
            count = min(left, max(1, left // 2)) if shorter else left
        if count and request.status is RequestStatus.RUNNING and self._allocate(request, count):
            self._kv.plan_blocks(request, count)
            self._plan.add_tokens(request, count)

    def _plan_rest(self, prefills: list[Request]) -> None:
        """Spend what is left of the budget on the planned prompts in their order, as far as free blocks allow."""
        for request in prefills:
            planned = self._plan.num_scheduled_tokens.get(request, 0)
            count = min(self._kv.chunk_limit(request, request.num_to_compute), planned + self._plan.left)
            if not 0 < planned < count or self._is_long_prompt(request):
                continue
            if self._pool.can_allocate(self._kv.num_new_units(request, count)):
                self._allocate(request, count)
                self._plan.add_tokens(request, count - planned)

    def _plan_proposals(self) -> None:
        """Spend what is left of the budget, the sampled rows and the free blocks on proposed tokens."""
        rows = self._max_samples - len(self._plan.num_scheduled_tokens)
        for request, tokens in self._proposals.items():
            count = min(len(tokens), self._plan.left, rows, request.max_length - len(request.token_ids) - 1)
            last_token = self._plan.num_scheduled_tokens.get(request) == request.num_to_compute == 1
            # Forks continue after the last row of the leader's chunk, which has to be that of a known token.
            if (last_token and count > 0 and not request.num_pending and not request.forks
                    and self._pool.can_allocate(self._kv.num_new_units(request, 1 + count))):
                self._allocate(request, 1 + count)
                self._plan.add_tokens(request, count)
                self._plan.fixed.add(request)
                rows -= count

    def _is_long_prompt(self, request: Request) -> bool:
        """Whether a prompt is so long that the requests beside it would notice if it filled every step."""
        uncached = request.num_tokens - request.num_cached_tokens
        return uncached > max(LONG_PROMPT_TOKENS, self._budget) and len(self._queues.running) > 1

    def _allocate(self, request: Request, count: int) -> bool:
        """Allocate blocks for `count` more tokens, preempting the last request; False if that was this one.

        Blocks that none of these tokens sees are freed first.
        """
        if request.num_computed_tokens >= request.slides_at:
            self._kv.slide(request)
        if self._kv.states:
            self._kv.keep_state(request)
        while not self._pool.can_allocate(missing := self._kv.num_new_units(request, count)):
            victim = self._queues.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if missing or request.shares_tail:
            self._kv.allocate(request, count)
        return True

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and slot; it waits to run again."""
        self._plan.drop_chunk(request)
        self._kv.unplan_blocks(request)
        self.stop(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if not request.paused:
            self._queues.waiting.add_request(request)

    # Waiting requests

    def _admit_waiting(self, prefills: list[Request], now: float) -> None:
        """Admit waiting requests in their order, as long as there are tokens, slots and blocks; extend `prefills`.

        A request that does not fit is passed by a bounded number of others. One whose prefix is being computed waits
        for it and blocks no other.
        """
        ahead = [next_block for request in prefills if (next_block := self._next_block(request))]
        passed: list[Request] = []
        reserved = -1
        for request in self._queues.waiting.first(LOOK_AHEAD):
            if request.num_pending:
                return  # preempted in this very step: its last id is not known yet
            if self._waits_for_prefix(request, ahead):
                continue
            running = self._queues.running
            may_preempt = len(running) > 0 and self._policy.preempts(request, running[-1])
            if not (may_preempt or (self._queues.num_free_slots and self._plan.left)):
                return
            if reserved < 0:
                reserved = self._reserved_blocks()
            if not (may_preempt or self._pool.can_allocate(reserved + self._kv.column_units)):
                return  # no request fits
            prefix = self._kv.find_prefix(request)
            # All of what it has must fit beside what the running still need for theirs, and some blocks to grow unless
            # it has the pool alone, so that half-done prefills do not block one another and no request is preempted a
            # moment after its admission.
            growth = self._policy.growth_blocks(request, self._block_size) if len(running) else 0
            needed = self._kv.num_needed(request, prefix) + growth * self._kv.column_units
            if not (self._queues.num_free_slots and self._plan.left and self._pool.can_allocate(needed + reserved)):
                if not (may_preempt and self._preempt_for(request, prefix, needed, reserved)):
                    if request.status is RequestStatus.PREEMPTED:
                        return
                    passed.append(request)
                    continue
                reserved = self._reserved_blocks()
            if any(other.num_passed >= MAX_PASSED for other in passed):
                return
            for other in passed:
                other.num_passed += 1
            self._admit(request, prefix, now)
            prefills.append(request)
            self._plan_chunk(request)
            reserved += self._reserved_for(request)
            if next_block := self._next_block(request):
                ahead.append(next_block)

    def _admit(self, request: Request, prefix: Prefix, now: float) -> None:
        self._plan.fixed |= self._kv.allocate_prefix(request, prefix)
        if request.status is RequestStatus.WAITING and not request.message.choice:
            request.num_cached_tokens = request.num_computed_tokens  # sharing among choices does not count
        self._queues.waiting.remove_request(request)
        self._queues.start_running(request, now)

    def _next_block(self, request: Request) -> tuple[Request, int, BlockHash] | None:
        """The first block of a running prompt that this step does not fill."""
        found = self._kv.next_block(request, self._plan.num_scheduled_tokens.get(request, 0))
        return found and (request, *found)

    def _waits_for_prefix(self, request: Request, ahead: list[tuple[Request, int, BlockHash]]) -> bool:
        """Whether a running request is about to compute so much of this one's prefix that waiting is cheaper."""
        for other, index, block_hash in ahead:
            start = index * self._block_size
            shared = request.token_ids[start : start + STEP_OVERHEAD_TOKENS]
            if (len(shared) == STEP_OVERHEAD_TOKENS and shared == other.token_ids[start : start + len(shared)]
                    and self._kv.shares_block(request, index, block_hash)):
                return True
        return False

    def _reserved_blocks(self) -> int:
        return sum([self._reserved_for(request) for request in self._queues.running])

    def _reserved_for(self, request: Request) -> int:
        """Units that a running request still needs for the tokens it has, and some to grow."""
        growth = self._policy.growth_blocks(request, self._block_size) * self._kv.column_units
        return self._kv.num_units_left(request, request.num_to_compute) + growth

    def _fork_units(self, fork: Request) -> int:
        """Units that a fork needs as soon as it continues, and some to grow."""
        return self._kv.fork_units + self._policy.growth_blocks(fork, self._block_size) * self._kv.column_units

    def _preempt_for(self, request: Request, prefix: Prefix, needed: int, reserved: int) -> bool:
        """Preempt as many of the last running requests as a waiting one needs, if it may and that is enough.

        Args:
            prefix: cached prefix of the waiting one; blocks of it that victims free are no gain.
            needed: units that the waiting one needs.
            reserved: units that the running ones still need.
        """
        slots, tokens, blocks = self._queues.num_free_slots, self._plan.left, self._pool.num_free
        running = list(self._queues.running)
        victims: list[Request] = []
        shared = set(prefix.blocks())
        while not (slots and tokens > 0 and blocks >= needed + reserved):
            if not running or not self._policy.preempts(request, running[-1]):
                return False
            victim = running.pop()
            if victim in self._plan.fixed or self._kv.fills(victim, prefix):
                return False
            victims.append(victim)
            reserved -= self._reserved_for(victim)
            slots += 1
            tokens += self._plan.num_scheduled_tokens.get(victim, 0)
            blocks += sum(len(self._pool.units(block)) for block in self._kv.blocks_of(victim)
                          if self._pool.ref_count(block) == 1 and block not in shared)
        for victim in victims:
            self._preempt(victim)
        return True

    # Chunks

    def _make_chunks(self) -> tuple[list[ScheduledChunk], StepRequests]:
        chunks: list[ScheduledChunk] = []
        rows: list[Request] = []
        proposed: list[Request] = []
        block_size, unit_rows = self._block_size, self._kv.unit_rows
        for request, count in self._plan.num_scheduled_tokens.items():
            start, known = request.num_computed_tokens, request.token_ids
            end = start + count
            request.num_computed_tokens = end
            token_ids = known[start:end] if start < len(known) else ()
            samples = end - len(known) - request.num_pending + 1
            if samples <= 0:
                samples = 0
            elif samples == 1:
                rows.append(request)
            else:
                rows += [request] * samples
                proposed.append(request)
                request.num_proposed = samples - 1
                token_ids = [*token_ids, *self._proposals[request][: samples - 1]]
            request.num_pending += samples
            if end // block_size > request.num_cached_blocks:
                self._kv.cache_full_blocks(request)
            new, rewrite = _new_request(request) if request.new_in_slot else None, request.table_changed
            if new or rewrite:
                request.new_in_slot = request.table_changed = False
            # By position: hundreds are made per step, and keywords would cost more than the rest of this loop.
            chunks.append(ScheduledChunk(
                request.request_id, request.slot, start, token_ids, count, samples,
                unit_rows(request, -(-start // block_size), -(-end // block_size))
                if count > 1 or not start % block_size else (), new, self._kv.table_rows(request) if rewrite else (),
                _scoring(request, start, end) if request.scored else None))
        return chunks, StepRequests(list(self._plan.num_scheduled_tokens), rows, proposed)

    def _add_forks(
        self, chunks: Sequence[ScheduledChunk], requests: StepRequests, now: float
    ) -> tuple[list[ScheduledChunk], StepRequests]:
        """The chunks, and after each that ends a prompt those of its forks; forks without room wait in the queue."""
        room = self._max_samples - len(requests.rows)
        all_chunks: list[ScheduledChunk] = []
        found = StepRequests([], [], requests.proposed)
        for chunk, leader in zip(chunks, requests.chunks, strict=True):
            all_chunks.append(chunk)
            found.chunks.append(leader)
            found.rows.extend([leader] * chunk.num_samples)
            if not chunk.num_samples or not leader.forks:
                continue
            reserved = self._reserved_blocks()
            for fork in self._queues.detach_forks(leader):
                if room > 0 and self._has_room_for_fork(reserved):
                    all_chunks.append(self._fork(leader, fork, now))
                    found.chunks.append(fork)
                    found.rows.append(fork)
                    reserved += self._fork_units(fork)
                    room -= 1
                else:
                    self._queues.waiting.add_request(fork)
        return all_chunks, found

    def _has_room_for_fork(self, reserved: int) -> bool:
        # Each fork will need a block of its own as soon as it continues.
        return self._queues.num_free_slots > 0 and self._pool.can_allocate(reserved + self._kv.fork_units)

    def _fork(self, leader: Request, fork: Request, now: float) -> ScheduledChunk:
        self._kv.fork(leader, fork)
        self._queues.start_running(fork, now)
        fork.num_cached_tokens = leader.num_cached_tokens
        fork.num_pending = 1
        fork.new_in_slot = fork.table_changed = False
        return ScheduledChunk(fork.request_id, fork.slot, fork.num_computed_tokens, (), 0, 1, (), _new_request(fork),
                              self._kv.table_rows(fork))


def _new_request(request: Request) -> NewRequest:
    return NewRequest(request.message, tuple(request.token_ids[request.num_prompt_tokens :]))


def _scoring(request: Request, start: int, end: int) -> PromptScoring | None:
    """What the tokens from `start` to `end` of a scored request have to return; nothing a second time."""
    message = request.message
    if message.pooling is not None:
        return PromptScoring(message.pooling)
    if start >= request.num_prompt_tokens - 1 or len(request.token_ids) > request.num_prompt_tokens:
        return None
    return PromptScoring(None, tuple(request.token_ids[start + 1 : end + 1]), message.params.prompt_logprobs or 0)


def _full_sampling(rows: Sequence[Request]) -> FullSampling:
    return FullSampling(tuple(request.message.params.logprobs for request in rows),
                        tuple((row, request.matcher.mask()) for row, request in enumerate(rows)
                              if request.matcher is not None))
