"""How much of each running request a step computes, and who gives its blocks back for that."""

from collections.abc import Sequence

from jaxpaged.scheduling.kv_manager import KVManager, Prefix
from jaxpaged.scheduling.policy import Policy
from jaxpaged.scheduling.queues import Queues
from jaxpaged.scheduling.request import Request, RequestStatus
from jaxpaged.scheduling.scheduler_output import ScheduledChunk

# A step's time grows as its tokens plus about this many, on CPU as on GPU: the weights are read whatever the batch.
STEP_OVERHEAD_TOKENS = 64


class StepPlan:
    """Token counts of a step's chunks.

    Args:
        budget: most tokens in the step.

    Attributes:
        left: tokens of the budget that nobody has yet.
        counts: tokens of each request's chunk, in the order of the rows.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.left = budget
        self.counts: dict[Request, int] = {}
        self._fixed: set[Request] = set()

    @property
    def num_tokens(self) -> int:
        return self._budget - self.left

    def add(self, request: Request, count: int) -> None:
        """Plan `count` more tokens of a request."""
        self.counts[request] = self.counts.get(request, 0) + count
        self.left -= count

    def drop(self, request: Request) -> None:
        """Take a request's chunk out again, if it has one."""
        self.left += self.counts.pop(request, 0)

    def fix(self, request: Request) -> None:
        """Another chunk of this step reads what this request's chunk writes: it stays, and stays as long as it is."""
        self._fixed.add(request)

    def is_fixed(self, request: Request) -> bool:
        return request in self._fixed

    def fit(self, step_sizes: Sequence[int]) -> None:
        """Cut prefill chunks down to the next smaller step size where the padding would cost more than they bring.

        A token of each stays: cut away whole, a short prompt would wait for as long as the others fill that size.
        """
        total = sum(self.counts.values())
        below = max((size for size in step_sizes if size <= total), default=0)
        above = min((size for size in step_sizes if size >= total), default=total)
        if not below or (below + STEP_OVERHEAD_TOKENS) * total >= (above + STEP_OVERHEAD_TOKENS) * below:
            return
        cuttable = {request: count - 1 for request, count in self.counts.items()
                    if count > 1 and request not in self._fixed}
        excess = total - below
        if sum(cuttable.values()) < excess:
            return
        for request in reversed(cuttable):
            cut = min(excess, cuttable[request])
            self.counts[request] -= cut
            self.left += cut
            excess -= cut


# A prompt of more tokens than this, and than a budget, takes no more of a step than the requests beside it, so that the
# gaps in their streams stay small; but at least an eighth of the budget, and more of a small one.
LONG_PROMPT_TOKENS = 2048
LONG_PROMPT_CHUNK = 128
# Waiting requests that one step looks at.
LOOK_AHEAD = 64


class StepPlanner:
    """Spends a step's token budget on the running requests.

    Args:
        queues: who runs; preempted requests go back among the waiting.
        kv: their blocks.
        budget: most tokens of a step.
        step_sizes: ascending numbers of tokens that a step can have after padding.
        swap: host memory keeps what a preempted request has computed, until it runs again.

    Attributes:
        plan: the step being planned.
        num_preemptions: since the start.
    """

    def __init__(self, queues: Queues, kv: KVManager, *, budget: int, step_sizes: Sequence[int], swap: bool) -> None:
        self.plan = StepPlan(0)
        self.num_preemptions = 0
        self._queues = queues
        self._kv = kv
        self._pool = kv.pool
        self._block_size = kv.block_size
        self._budget = budget
        self._step_sizes = tuple(step_sizes)
        self._swap = swap

    def begin(self) -> None:
        """Begin a step."""
        self.plan = StepPlan(self._budget)

    def commit(self) -> list[ScheduledChunk]:
        """Fit the plan to a step size; it is final then, and its tokens count as computed."""
        self.plan.fit(self._step_sizes)
        chunks = []
        block_size = self._block_size
        for request, count in self.plan.counts.items():
            start, known, table = request.num_computed_tokens, request.token_ids, request.block_table
            end = start + count
            request.num_computed_tokens = end
            samples = end == len(known) + request.num_pending
            request.num_pending += samples
            if end // block_size > request.num_cached_blocks:
                self._kv.note_computed(request)
            admit, rewrite = request.new_in_slot, request.table_changed
            if admit or rewrite:
                request.new_in_slot = request.table_changed = False
            # By position: hundreds are made per step, and keywords would cost more than the rest of this loop.
            chunks.append(ScheduledChunk(
                request, request.slot, start, known[start:end] if start < len(known) else (), count, samples,
                table[-(-start // block_size) : -(-end // block_size)] if count > 1 or not start % block_size else (),
                admit, tuple(table) if rewrite else ()))
        return chunks

    def plan_decodes(self) -> list[Request]:
        """Plan the running requests that lack one token; return the others that lack some, in their order.

        The first of those keeps a token of the budget: requests after it cannot use all of it up.
        """
        plan, block_size, running = self.plan, self._block_size, RequestStatus.RUNNING
        prefills: list[Request] = []
        for request in self._queues.running.all():
            if plan.left <= bool(prefills):
                break
            if request.status is not running:
                break  # preempted by one before it, as are those after it
            count = request.num_to_compute
            if not count:
                continue
            if count > 1:
                prefills.append(request)
            elif ((request.num_computed_tokens < len(request.block_table) * block_size and not request.shares_tail)
                  or self._take_blocks(request, 1)):
                plan.counts[request] = 1
                plan.left -= 1
        return prefills

    def plan_prefills(self, prefills: list[Request]) -> None:
        """Plan chunks of the prompts under way: the first one's, then the others', those that lack least first."""
        if prefills:
            first, *others = prefills
            others.sort(key=lambda request: request.num_to_compute)
            self.plan_piece(first, others)
            for request in others:
                self.plan_piece(request)

    def plan_rest(self, prefills: list[Request]) -> None:
        """Spend what is left of the budget on the planned prompts in their order, as far as free blocks allow."""
        for request in prefills:
            planned = self.plan.counts.get(request, 0)
            count = min(request.num_to_compute, planned + self.plan.left)
            if not 0 < planned < count or self._is_long_prompt(request):
                continue
            if self._pool.can_allocate(self._kv.num_missing(request, count)):
                self._take_blocks(request, count)
                self.plan.add(request, count - planned)

    def plan_piece(self, request: Request, others: Sequence[Request] = ()) -> None:
        """Plan a chunk of a prompt; `others` lack tokens as well, the first of them least."""
        count, left = request.num_to_compute, self.plan.left
        if self._is_long_prompt(request):
            least = max(self._budget // 8, min(self._budget // 4, LONG_PROMPT_CHUNK))
            left = min(left, max(least, self._budget - left + STEP_OVERHEAD_TOKENS))
        if count > left:
            shorter = (others and others[0].num_to_compute < count) or any(
                waiting.num_tokens < count for waiting in self._queues.waiting.first(LOOK_AHEAD))
            count = min(left, max(1, left // 2)) if shorter else left
        if count and request.status is RequestStatus.RUNNING and self._take_blocks(request, count):
            self._kv.plan(request, count)
            self.plan.add(request, count)

    def _is_long_prompt(self, request: Request) -> bool:
        """Whether a prompt is so long that the requests beside it would feel every step full of it."""
        lacked = request.num_tokens - request.num_cached_tokens
        return lacked > max(LONG_PROMPT_TOKENS, self._budget) and len(self._queues.running) > 1

    def _take_blocks(self, request: Request, count: int) -> bool:
        """Take the blocks for `count` more tokens, preempting the last; False where the request had to go itself."""
        while not self._pool.can_allocate(missing := self._kv.num_missing(request, count)):
            victim = self._queues.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        if missing or request.shares_tail:
            self._kv.take(request, missing)
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and slot back; it goes on later."""
        self.plan.drop(request)
        self._kv.unplan(request)
        self.stop(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if not request.paused:
            self._queues.waiting.add(request)

    def stop(self, request: Request) -> None:
        """Take the blocks and the slot of a running request that has no chunk in the step; it is in no queue then."""
        self._kv.release(request)
        self._queues.stop(request)
        if self._swap:
            self._kv.pin(request)
        request.status = RequestStatus.PREEMPTED


# A request that does not fit may be passed by so many others before nobody is let in until it fits.
MAX_PASSED = 16


class Admission:
    """Lets waiting requests in, in the order of a policy, as long as there are tokens, slots and blocks.

    Args:
        queues: who waits and who runs.
        kv: the blocks, and what of a prompt they hold already.
        planner: plans the first chunk of whoever is let in, and preempts for those who may ask for it.
        max_samples: most rows that a step can sample.
    """

    def __init__(
        self, queues: Queues, kv: KVManager, planner: StepPlanner, policy: Policy, *, max_samples: int
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._pool = kv.pool
        self._block_size = kv.block_size
        self._planner = planner
        self._policy = policy
        self._max_samples = max_samples

    def admit_waiting(self, prefills: list[Request], now: float) -> None:
        """Let waiting requests in, in their order, as long as there are tokens, slots and blocks.

        One that does not fit is passed by a bounded number of others, one whose beginning is being computed waits for
        it and keeps nobody waiting.
        """
        if not self._queues.waiting:
            return
        ahead = [next_key for request in prefills if (next_key := self._next_key(request))]
        passed: list[Request] = []
        reserved = -1
        for request in self._queues.waiting.first(LOOK_AHEAD):
            if request.num_pending:
                return  # preempted in this very step: its last id is not known yet
            if self._waits_for_leader(request, ahead):
                continue
            if not (self._queues.num_free_slots and self._planner.plan.left) and not self._may_preempt(request):
                return
            if reserved < 0:
                reserved = sum([self._reserved_for(running) for running in self._queues.running])
            may_preempt = self._may_preempt(request)
            if not (may_preempt or self._pool.can_allocate(reserved + 1)):
                return  # nobody fits
            prefix = self._kv.find_prefix(request)
            if not self._fits(request, prefix, reserved):
                if not (may_preempt and self._preempt_for(request, prefix, reserved)):
                    if request.status is RequestStatus.PREEMPTED:
                        return
                    passed.append(request)
                    continue
                reserved = sum([self._reserved_for(running) for running in self._queues.running])
            if any(other.num_passed >= MAX_PASSED for other in passed):
                return
            for other in passed:
                other.num_passed += 1
            self._admit(request, prefix, now)
            prefills.append(request)
            self._planner.plan_piece(request)
            reserved += self._reserved_for(request)
            if next_key := self._next_key(request):
                ahead.append(next_key)

    def _next_key(self, request: Request) -> tuple[Request, int, bytes] | None:
        """The first block that this step does not fill of a prompt under way."""
        found = self._kv.next_key(request, self._planner.plan.counts.get(request, 0))
        return found and (request, *found)

    def _waits_for_leader(self, request: Request, ahead: list[tuple[Request, int, bytes]]) -> bool:
        """Whether a running request is about to compute so much of this one's beginning that waiting is cheaper."""
        for leader, index, key in ahead:
            start = index * self._block_size
            shared = request.token_ids[start : start + STEP_OVERHEAD_TOKENS]
            if (len(shared) == STEP_OVERHEAD_TOKENS and shared == leader.token_ids[start : start + len(shared)]
                    and self._kv.shares_block(request, index, key)):
                return True
        return False

    def _reserved_for(self, request: Request) -> int:
        """Blocks that a running request still needs for the tokens it has, and some to grow."""
        return self._kv.num_missing(request, request.num_to_compute) + self._policy.growth_blocks(
            request, self._block_size)

    def _fits(self, request: Request, prefix: Prefix, reserved: int) -> bool:
        # All of what it has must fit beside what the running still need for theirs, and some blocks to grow, so
        # that half-done prefills do not block one another and nobody is preempted a moment after admission.
        return self._queues.num_free_slots > 0 and self._planner.plan.left > 0 and self._pool.can_allocate(
            self._needed_for(request, prefix) + reserved)

    def _needed_for(self, request: Request, prefix: Prefix) -> int:
        """Blocks that a waiting request needs for the tokens it has, and some to grow unless it has the pool alone."""
        growth = self._policy.growth_blocks(request, self._block_size) if len(self._queues.running) else 0
        return self._kv.num_needed(request, prefix) + growth

    def _may_preempt(self, request: Request) -> bool:
        return len(self._queues.running) > 0 and self._policy.preempts(request, self._queues.running[-1])

    def _preempt_for(self, request: Request, prefix: Prefix, reserved: int) -> bool:
        """Preempt as many of the last running requests as a waiting one needs, if it may and that is enough.

        Args:
            prefix: what holds the beginning of the waiting one; blocks in it that victims give back are no gain.
            reserved: blocks that the running ones still need.
        """
        slots, tokens, blocks = self._queues.num_free_slots, self._planner.plan.left, self._pool.num_free
        stay = list(self._queues.running)
        victims: list[Request] = []
        needed = self._needed_for(request, prefix)
        kept = set(prefix.blocks)
        while not (slots and tokens > 0 and blocks >= needed + reserved):
            if not stay or not self._policy.preempts(request, stay[-1]):
                return False
            victim = stay.pop()
            if self._planner.plan.is_fixed(victim) or self._kv.fills(victim, prefix):
                return False
            victims.append(victim)
            reserved -= self._reserved_for(victim)
            slots += 1
            tokens += self._planner.plan.counts.get(victim, 0)
            blocks += sum(self._pool.ref_count(block) == 1 and block not in kept for block in victim.block_table)
        for victim in victims:
            self._planner.preempt(victim)
        return True

    def _admit(self, request: Request, prefix: Prefix, now: float) -> None:
        for writer in self._kv.begin(request, prefix):
            self._planner.plan.fix(writer)
        if request.status is RequestStatus.WAITING and not request.message.choice:
            request.num_cached_tokens = request.num_computed_tokens  # sharing among choices does not count
        self._queues.waiting.remove(request)
        self._queues.run(request, now)

    def with_forks(self, chunks: Sequence[ScheduledChunk], now: float) -> list[ScheduledChunk]:
        """The chunks, and after each that ends a prompt those of its forks; forks without room wait like others."""
        room = self._max_samples - sum(chunk.samples for chunk in chunks)
        all_chunks: list[ScheduledChunk] = []
        for chunk in chunks:
            all_chunks.append(chunk)
            leader = chunk.request
            if not chunk.samples or not leader.forks:
                continue
            reserved = sum(self._reserved_for(running) for running in self._queues.running)
            for fork in self._queues.detach_forks(leader):
                # Each will need a block of its own as soon as it goes on.
                if room > 0 and self._queues.num_free_slots and self._pool.can_allocate(reserved + 1):
                    all_chunks.append(self._fork(leader, fork, now))
                    reserved += 1 + self._policy.growth_blocks(fork, self._block_size)
                    room -= 1
                else:
                    self._queues.waiting.add(fork)
        return all_chunks

    def fork_paused(self, forks: Sequence[tuple[Request, Request]]) -> None:
        """Let forks, given with their parents, run beside them; those without room wait like others."""
        reserved = sum(self._reserved_for(running) for running in self._queues.running) if forks else 0
        for parent, fork in forks:
            if parent.slot >= 0 and self._queues.num_free_slots and self._pool.can_allocate(reserved + 1):
                self._kv.fork(parent, fork)
                self._queues.run(fork, parent.scheduled_time or 0.0)
                reserved += 1 + self._policy.growth_blocks(fork, self._block_size)
            else:
                fork.block_hashes = list(parent.block_hashes)
                fork.status = RequestStatus.PREEMPTED  # what its prompt had in the cache has been told
                self._queues.waiting.add(fork)

    def _fork(self, leader: Request, fork: Request, now: float) -> ScheduledChunk:
        self._kv.fork(leader, fork)
        self._queues.run(fork, now)
        fork.num_cached_tokens = leader.num_cached_tokens
        fork.num_pending = 1
        fork.new_in_slot = fork.table_changed = False
        return ScheduledChunk(fork, fork.slot, fork.num_computed_tokens, (), 0, True, (), True, tuple(fork.block_table))
