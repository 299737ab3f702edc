"""Which waiting requests are let in, and when."""

from collections.abc import Sequence

from jaxpaged.scheduling.kv_manager import KVManager, Prefix
from jaxpaged.scheduling.planner import LOOK_AHEAD, StepPlanner
from jaxpaged.scheduling.policy import Policy
from jaxpaged.scheduling.queues import Queues
from jaxpaged.scheduling.request import Request, RequestStatus
from jaxpaged.scheduling.scheduler_output import ScheduledPiece
from jaxpaged.scheduling.step_plan import STEP_OVERHEAD_TOKENS

# A request that does not fit may be passed by so many others before nobody is let in until it fits.
MAX_PASSED = 16


class Admission:
    """Lets waiting requests in, in the order of a policy, as long as there are tokens, slots and blocks.

    Args:
        queues: who waits and who runs.
        kv: the blocks, and what of a prompt they hold already.
        planner: plans the first piece of whoever is let in, and preempts for those who may ask for it.
        max_samples: most rows that a step can sample.
    """

    def __init__(
        self, queues: Queues, kv: KVManager, planner: StepPlanner, policy: Policy, *, max_samples: int
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._allocator = kv.allocator
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
            if not (may_preempt or self._allocator.can_allocate(reserved + 1)):
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
        return self._queues.num_free_slots > 0 and self._planner.plan.left > 0 and self._allocator.can_allocate(
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
        slots, tokens, blocks = self._queues.num_free_slots, self._planner.plan.left, self._allocator.num_free
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
            blocks += sum(self._allocator.num_owners(block) == 1 and block not in kept for block in victim.block_table)
        for victim in victims:
            self._planner.preempt(victim)
        return True

    def _admit(self, request: Request, prefix: Prefix, now: float) -> None:
        for writer in self._kv.begin(request, prefix):
            self._planner.plan.fix(writer)
        if request.status is RequestStatus.WAITING and not request.message.choice:
            request.num_cached = request.num_computed  # what choices share with one another does not count
        self._queues.waiting.remove(request)
        self._queues.run(request, now)

    def with_forks(self, pieces: Sequence[ScheduledPiece], now: float) -> list[ScheduledPiece]:
        """The pieces, and after each that ends a prompt those of its forks; forks without room wait like others."""
        room = self._max_samples - sum(piece.samples for piece in pieces)
        all_pieces: list[ScheduledPiece] = []
        for piece in pieces:
            all_pieces.append(piece)
            leader = piece.request
            if not piece.samples or not leader.forks:
                continue
            reserved = sum(self._reserved_for(running) for running in self._queues.running)
            for fork in self._queues.detach_forks(leader):
                # Each will need a block of its own as soon as it goes on.
                if room > 0 and self._queues.num_free_slots and self._allocator.can_allocate(reserved + 1):
                    all_pieces.append(self._fork(leader, fork, now))
                    reserved += 1 + self._policy.growth_blocks(fork, self._block_size)
                    room -= 1
                else:
                    self._queues.waiting.add(fork)
        return all_pieces

    def fork_standing(self, forks: Sequence[tuple[Request, Request]]) -> None:
        """Let forks, given with their parents, run beside them; those without room wait like others."""
        reserved = sum(self._reserved_for(running) for running in self._queues.running) if forks else 0
        for parent, fork in forks:
            if parent.slot >= 0 and self._queues.num_free_slots and self._allocator.can_allocate(reserved + 1):
                self._kv.fork(parent, fork)
                self._queues.run(fork, parent.scheduled_time or 0.0)
                reserved += 1 + self._policy.growth_blocks(fork, self._block_size)
            else:
                fork.block_keys = list(parent.block_keys)
                fork.status = RequestStatus.PREEMPTED  # what its prompt had in the cache has been told
                self._queues.waiting.add(fork)

    def _fork(self, leader: Request, fork: Request, now: float) -> ScheduledPiece:
        self._kv.fork(leader, fork)
        self._queues.run(fork, now)
        fork.num_cached = leader.num_cached
        fork.num_pending = 1
        fork.new_in_slot = fork.new_table = False
        return ScheduledPiece(fork, fork.slot, fork.num_computed, (), 0, True, (), True, tuple(fork.block_table))
