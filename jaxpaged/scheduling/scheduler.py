"""Decides which tokens each step computes.

There is no prefill and no decode: a request has tokens, some of them are computed, and every step spends its token
budget on the difference. Chunked prefill, prefix hits and recomputation after preemption follow from that. The
scheduler runs one step ahead of the ids it has seen: a dispatched step that samples counts as one assumed token.

A step first goes on with every running request that lacks one token; what is left of the budget goes to prompts. One
that would take all of it leaves half to shorter ones, so that neither do they wait for a long prompt nor it for them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpaged.messages import EngineRequest, TokenDelta, TokenLogprobs
from jaxpaged.outputs import FinishReason
from jaxpaged.scheduling.block_allocator import BlockAllocator
from jaxpaged.scheduling.host_tier import HostTier
from jaxpaged.scheduling.kv_manager import NO_TRANSFERS, KVManager, Prefix, Transfers
from jaxpaged.scheduling.policy import FcfsPolicy, Policy
from jaxpaged.scheduling.request import Constraint, Request, RequestStatus
from jaxpaged.scheduling.sorted_requests import SortedRequests
from jaxpaged.scheduling.step_plan import STEP_OVERHEAD_TOKENS, StepPlan

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}

FAILED_TOKEN = -1  # what the sampler returns for a row whose logits are not finite
NO_TOKEN_LEFT = -2  # and for one where everything is forbidden

# A request that does not fit may be passed by so many others before nobody is let in until it fits.
MAX_PASSED = 16
# A prompt of more tokens than this, and than a budget, takes no more of a step than the requests beside it, so that the
# gaps in their streams stay small; but at least an eighth of the budget, and more of a small one.
LONG_PROMPT_TOKENS = 2048
LONG_PROMPT_PIECE = 128
# Waiting requests that one step looks at.
LOOK_AHEAD = 64


class ScheduledPiece(NamedTuple):
    """Consecutive tokens of one request in one step.

    Attributes:
        slot: the request's slot; kept here because a finished request loses it while the step runs.
        start: position of the first token.
        token_ids: ids of the piece; one that is still in flight is missing at the end.
        num_tokens: length of the piece.
        samples: whether the step samples the token after the piece's last.
        blocks: the block of each position in the piece that begins a block, in order.
        admit: the piece is the first since the request got its slot.
        table: all blocks of the request where the slot's columns before `start` have to be written, else empty.

    A piece without tokens samples once more after the row that the piece before it samples after.
    """

    request: Request
    slot: int
    start: int
    token_ids: Sequence[int]
    num_tokens: int
    samples: bool
    blocks: Sequence[int]
    admit: bool
    table: Sequence[int] = ()


class PromptLogprobs(NamedTuple):
    """Log probabilities of the prompt tokens behind the one at `start`."""

    request: Request
    start: int
    values: list[TokenLogprobs]


class PooledTokens(NamedTuple):
    """What an embedding gains from prompt tokens from the one at `start` on: their sum, or the last of them."""

    request: Request
    start: int
    values: list[float]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: its pieces, how many tokens they hold, and which blocks have to be moved before it."""

    pieces: tuple[ScheduledPiece, ...]
    num_tokens: int
    transfers: Transfers = NO_TRANSFERS

    @property
    def num_sampled(self) -> int:
        return sum([piece.samples for piece in self.pieces])

    @property
    def kind(self) -> str:
        """decode, prefill or mixed, as the metrics call it."""
        counts = {piece.num_tokens for piece in self.pieces}
        if max(counts) == 1:
            return "decode"
        return "mixed" if 1 in counts else "prefill"


class Scheduler:
    """Serves requests in the order of a policy over slots, blocks and a token budget.

    Args:
        allocator: the pool's blocks.
        block_size: tokens in a block.
        max_num_seqs: slots.
        max_num_batched_tokens: token budget of a step.
        step_sizes: ascending numbers of tokens that a step can have after padding.
        policy: who comes first and who has to go; first come, first served if not given.
        prefix_caching: share the blocks of equal beginnings.
        host: books on host memory for evicted blocks, if there is any.
        swap: host memory keeps what a preempted request has computed, until it runs again.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        step_sizes: Sequence[int] = (),
        policy: Policy | None = None,
        prefix_caching: bool = True,
        host: HostTier | None = None,
        swap: bool = False,
    ) -> None:
        self._allocator = allocator
        self._kv = KVManager(allocator, block_size, prefix_caching=prefix_caching,
                             host=host if prefix_caching or swap else None)
        self._swap = swap
        self._block_size = block_size
        self._budget = max_num_batched_tokens
        self._step_sizes = tuple(step_sizes)
        self._num_slots = max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._policy = policy or FcfsPolicy()
        self._waiting = SortedRequests(self._policy.queue_key)
        self._running = SortedRequests(self._policy.running_key)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._plan = StepPlan(0)
        self._num_forks = 0  # that wait for their leader's first token
        self._now = 0.0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_forks

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, message: EngineRequest, constraint: Constraint | None = None) -> None:
        """Queue a request."""
        assert message.request_id not in self._requests, f"request id {message.request_id} is already live"
        needed = self._kv.blocks_for(len(message.prompt_token_ids) + message.max_tokens)
        assert needed <= self._allocator.num_usable, f"{needed} blocks can never be had"
        request = Request(message, self._arrivals, constraint=constraint)
        self._arrivals += 1
        self._requests[message.request_id] = request
        leader = self._requests.get(message.fork_of or "")
        if leader is not None and leader.num_output_tokens == 0:
            request.leader = leader
            leader.forks.append(request)
            self._num_forks += 1
        else:
            self._waiting.add(request)

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step and take what it needs; empty when nothing can run now."""
        self._now = now
        self._plan = plan = StepPlan(self._budget)
        prefills = self._plan_decodes()
        self._plan_prefills(prefills)
        self._admit_waiting(prefills)
        self._plan_rest(prefills)
        plan.fit(self._step_sizes)
        pieces = [self._commit(request, count) for request, count in plan.counts.items()]
        if self._num_forks:
            pieces = self._with_forks(pieces)
        self._kv.end_plan()
        # Without a piece nothing is dispatched: what there is to move waits for the next step.
        transfers = self._kv.drain_transfers() if pieces else NO_TRANSFERS
        return SchedulerOutput(tuple(pieces), self._budget - plan.left, transfers)

    def update(
        self, step: SchedulerOutput, sampled: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None = None,
        prompts: Sequence[PromptLogprobs | PooledTokens] = (),
    ) -> list[TokenDelta]:
        """Take in what a step sampled, in the order of its sampling pieces; finish what has ended.

        Args:
            logprobs: of the sampled ids, None for those whose requests want none.
            prompts: of the pieces whose requests want log probabilities of their prompts, or embeddings.
        """
        deltas = []
        for found in prompts:
            if isinstance(found, PooledTokens):
                found.request.pool(found.start, found.values)
                continue
            del found.request.prompt_logprobs[found.start :]  # a prompt that was preempted began anew
            found.request.prompt_logprobs += found.values
        rows = [piece for piece in step.pieces if piece.samples]
        for piece, token, logprob in zip(rows, sampled, logprobs or [None] * len(rows), strict=True):
            request = piece.request
            if request.finished:
                continue  # it ended while this step was already running: the row is ignored
            request.num_pending -= 1
            if token == FAILED_TOKEN:
                error = "the model produced logits that are not finite"
                deltas.append(self._finish(request, RequestStatus.FINISHED_ERROR, error=error))
                continue
            if token == NO_TOKEN_LEFT:
                deltas.append(self._finish(request, RequestStatus.FINISHED_STOPPED))
                continue
            request.token_ids.append(token)
            delta = self._after_token(request, token)
            if logprob is not None and delta.token_ids:
                delta = delta._replace(logprobs=(logprob,))
            if request.prompt_logprobs:
                delta = delta._replace(prompt_logprobs=tuple(request.prompt_logprobs))
                request.prompt_logprobs = []
            if request.message.pooling is not None:
                delta = delta._replace(embedding=request.embedding())
            deltas.append(delta)
            if request.constraint is not None and not request.finished and request.constraint.advance(token):
                deltas.append(self._finish(request, RequestStatus.FINISHED_STOPPED))
        return deltas

    def abort(self, request_ids: Iterable[str]) -> list[TokenDelta]:
        """End these requests now; unknown and finished ids are ignored."""
        wanted = dict.fromkeys(request_ids)
        live = [self._requests[request_id] for request_id in wanted if request_id in self._requests]
        return [self._finish(request, RequestStatus.FINISHED_ABORTED) for request in live]

    def reset_prefix_cache(self) -> None:
        """Forget the content of all blocks: nothing computed so far is shared with a later request."""
        self._kv.reset_prefix_cache(self._requests.values())

    @property
    def num_swapped(self) -> tuple[int, int]:
        """Blocks that went to host memory, and blocks that came back."""
        return self._kv.num_saved, self._kv.num_loaded

    def is_live(self, request_id: str) -> bool:
        return request_id in self._requests

    def live_ids(self) -> list[str]:
        return list(self._requests)

    def kv_slots(self) -> tuple[int, int]:
        """KV slots held by requests, shared ones once, and how many of them are empty.

        A slot reserved for a step in flight counts as filled.
        """
        empty = 0
        shared: dict[int, int] = {}
        for request in self._running:
            room = len(request.block_table) * self._block_size - request.num_computed
            if request.shares_tail:
                shared[request.block_table[-1]] = room
            else:
                empty += room
        return self._allocator.num_used * self._block_size, empty + sum(shared.values())

    def check_integrity(self) -> None:
        """Assert that blocks, slots and queues agree."""
        self._kv.check_integrity(self._requests.values())
        slots = [request.slot for request in self._running] + self._free_slots
        assert len(slots) == len(set(slots)) == self._num_slots and -1 not in slots, f"slots in use and free: {slots}"
        forks = [fork for request in self._requests.values() for fork in request.forks]
        assert len(forks) == self._num_forks and all(fork.leader and fork in fork.leader.forks for fork in forks)
        queued = len(self._waiting) + len(self._running) + len(forks)
        assert len(self._requests) == queued, "a request is in no queue, or in two"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING, f"{request.status!r} among the running"
            assert len(request.block_table) >= self._kv.blocks_for(request.num_computed), "computed tokens, no blocks"
        for request in (*self._waiting, *forks):
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request.status!r} waits"
            assert request.slot == -1 and not request.block_table, "a waiting request owns something"
        for queue in (self._waiting, self._running):
            queue.check_integrity()

    # Planning a step

    def _plan_decodes(self) -> list[Request]:
        """Plan the running requests that lack one token; return the others that lack some, in their order.

        The first of those keeps a token of the budget: requests after it cannot use all of it up.
        """
        plan, block_size = self._plan, self._block_size
        prefills: list[Request] = []
        for request in list(self._running):
            if plan.left <= bool(prefills):
                break
            if request.status is not RequestStatus.RUNNING:
                break  # preempted by one before it, as are those after it
            count = request.num_to_compute
            if not count:
                continue
            if count > 1:
                prefills.append(request)
            elif ((request.num_computed < len(request.block_table) * block_size and not request.shares_tail)
                  or self._take_blocks(request, 1)):
                plan.counts[request] = 1
                plan.left -= 1
        return prefills

    def _plan_prefills(self, prefills: list[Request]) -> None:
        """Plan pieces of the prompts under way: the first one's, then the others', those that lack least first."""
        if prefills:
            first, *others = prefills
            others.sort(key=lambda request: request.num_to_compute)
            self._plan_piece(first, others)
            for request in others:
                self._plan_piece(request)

    def _plan_rest(self, prefills: list[Request]) -> None:
        """Spend what is left of the budget on the planned prompts in their order, as far as free blocks allow."""
        for request in prefills:
            planned = self._plan.counts.get(request, 0)
            count = min(request.num_to_compute, planned + self._plan.left)
            if not 0 < planned < count or self._gives_way(request):
                continue
            if self._allocator.can_allocate(self._kv.num_missing(request, count)):
                self._take_blocks(request, count)
                self._plan.add(request, count - planned)

    def _plan_piece(self, request: Request, others: Sequence[Request] = ()) -> None:
        """Plan a piece of a prompt; `others` lack tokens as well, the first of them least."""
        count, left = request.num_to_compute, self._plan.left
        if self._gives_way(request):
            least = max(self._budget // 8, min(self._budget // 4, LONG_PROMPT_PIECE))
            left = min(left, max(least, self._budget - left + STEP_OVERHEAD_TOKENS))
        if count > left:
            shorter = (others and others[0].num_to_compute < count) or any(
                waiting.num_tokens < count for waiting in self._waiting.first(LOOK_AHEAD))
            count = min(left, max(1, left // 2)) if shorter else left
        if count and request.status is RequestStatus.RUNNING and self._take_blocks(request, count):
            self._kv.plan(request, count)
            self._plan.add(request, count)

    def _gives_way(self, request: Request) -> bool:
        """Whether a prompt is so long that the requests beside it would feel every step full of it."""
        lacked = request.num_tokens - request.num_cached
        return lacked > max(LONG_PROMPT_TOKENS, self._budget) and len(self._running) > 1

    def _take_blocks(self, request: Request, count: int) -> bool:
        """Take the blocks for `count` more tokens, preempting the last; False where the request had to go itself."""
        while not self._allocator.can_allocate(missing := self._kv.num_missing(request, count)):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if missing or request.shares_tail:
            self._kv.take(request, missing)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._plan.drop(request)
        self._kv.unplan(request)
        self._release(request)
        if self._swap:
            self._kv.hold(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    # Letting requests in

    def _admit_waiting(self, prefills: list[Request]) -> None:
        """Let waiting requests in, in their order, as long as there are tokens, slots and blocks.

        One that does not fit is passed by a bounded number of others, one whose beginning is being computed waits for
        it and keeps nobody waiting.
        """
        if not self._waiting:
            return
        ahead = [next_key for request in prefills if (next_key := self._next_key(request))]
        passed: list[Request] = []
        reserved = -1
        for request in self._waiting.first(LOOK_AHEAD):
            if request.num_pending:
                return  # preempted in this very step: its last id is not known yet
            if self._waits_for_leader(request, ahead):
                continue
            if not (self._free_slots and self._plan.left) and not self._may_preempt(request):
                return
            if reserved < 0:
                reserved = sum([self._reserved_for(running) for running in self._running])
            may_preempt = self._may_preempt(request)
            if not (may_preempt or self._allocator.can_allocate(reserved + 1)):
                return  # nobody fits
            prefix = self._kv.find_prefix(request)
            if not self._fits(request, prefix, reserved):
                if not (may_preempt and self._preempt_for(request, prefix, reserved)):
                    if request.status is RequestStatus.PREEMPTED or request.num_passed >= MAX_PASSED:
                        return
                    passed.append(request)
                    continue
                reserved = sum([self._reserved_for(running) for running in self._running])
            for other in passed:
                other.num_passed += 1
            self._admit(request, prefix)
            prefills.append(request)
            self._plan_piece(request)
            reserved += self._reserved_for(request)
            if next_key := self._next_key(request):
                ahead.append(next_key)

    def _next_key(self, request: Request) -> tuple[Request, int, bytes] | None:
        """The first block that this step does not fill of a prompt under way."""
        found = self._kv.next_key(request, self._plan.counts.get(request, 0))
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
        return bool(self._free_slots) and self._plan.left > 0 and self._allocator.can_allocate(
            self._needed_for(request, prefix) + reserved)

    def _needed_for(self, request: Request, prefix: Prefix) -> int:
        """Blocks that a waiting request needs for the tokens it has, and some to grow unless it has the pool alone."""
        growth = self._policy.growth_blocks(request, self._block_size) if len(self._running) else 0
        return self._kv.num_needed(request, prefix) + growth

    def _may_preempt(self, request: Request) -> bool:
        return len(self._running) > 0 and self._policy.preempts(request, self._running[-1])

    def _preempt_for(self, request: Request, prefix: Prefix, reserved: int) -> bool:
        """Preempt as many of the last running requests as a waiting one needs, if it may and that is enough.

        Args:
            reserved: blocks that the running ones still need.
        """
        slots, tokens, blocks = len(self._free_slots), self._plan.left, self._allocator.num_free
        stay = list(self._running)
        victims: list[Request] = []
        needed = self._needed_for(request, prefix)
        while not (slots and tokens > 0 and blocks >= needed + reserved):
            if not stay or not self._policy.preempts(request, stay[-1]) or self._plan.is_fixed(stay[-1]):
                return False
            victims.append(stay.pop())
            reserved -= self._reserved_for(victims[-1])
            slots += 1
            tokens += self._plan.counts.get(victims[-1], 0)
            blocks += sum(self._allocator.num_owners(block) == 1 for block in victims[-1].block_table)
        for victim in victims:
            self._preempt(victim)
        return True

    def _admit(self, request: Request, prefix: Prefix) -> None:
        for writer in self._kv.begin(request, prefix):
            self._plan.fix(writer)
        if request.status is RequestStatus.WAITING and not request.message.choice:
            request.num_cached = request.num_computed  # what choices share with one another does not count
        self._waiting.remove(request)
        self._run(request)

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.new_in_slot = True
        if request.scheduled_time is None:
            request.scheduled_time = self._now
        self._running.add(request)

    # Carrying it out

    def _commit(self, request: Request, count: int) -> ScheduledPiece:
        start, end = request.num_computed, request.num_computed + count
        request.num_computed = end
        samples = end == len(request.token_ids) + request.num_pending
        table, block_size = request.block_table, self._block_size
        blocks = table[-(-start // block_size) : -(-end // block_size)]
        admit, rewrite = request.new_in_slot, request.new_table
        request.new_in_slot = request.new_table = False
        request.num_pending += samples
        if end // block_size > request.num_keyed:
            self._kv.note_computed(request)
        # By position: hundreds are made per step, and keywords would cost more than the rest of this method.
        return ScheduledPiece(request, request.slot, start, request.token_ids[start:end], count, samples, blocks,
                              admit, tuple(table) if rewrite else ())

    def _with_forks(self, pieces: Sequence[ScheduledPiece]) -> list[ScheduledPiece]:
        """The pieces, and after each that ends a prompt those of its forks; forks without room wait like others."""
        room = min(self._num_slots, self._budget) - sum(piece.samples for piece in pieces)
        all_pieces: list[ScheduledPiece] = []
        for piece in pieces:
            all_pieces.append(piece)
            leader = piece.request
            if not piece.samples or not leader.forks:
                continue
            reserved = sum(self._reserved_for(running) for running in self._running)
            for fork in self._detach_forks(leader):
                # Each will need a block of its own as soon as it goes on.
                if room > 0 and self._free_slots and self._allocator.can_allocate(reserved + 1):
                    all_pieces.append(self._fork(leader, fork))
                    reserved += 1 + self._policy.growth_blocks(fork, self._block_size)
                    room -= 1
                else:
                    self._waiting.add(fork)
        return all_pieces

    def _fork(self, leader: Request, fork: Request) -> ScheduledPiece:
        self._kv.fork(leader, fork)
        self._run(fork)
        fork.num_cached = leader.num_cached
        fork.num_pending = 1
        fork.new_in_slot = fork.new_table = False
        return ScheduledPiece(fork, fork.slot, fork.num_computed, (), 0, True, (), True, tuple(fork.block_table))

    def _detach_forks(self, leader: Request) -> list[Request]:
        forks, leader.forks = leader.forks, []
        for fork in forks:
            fork.leader = None
        self._num_forks -= len(forks)
        return forks

    def _after_token(self, request: Request, token: int) -> TokenDelta:
        message = request.message
        if token in message.stop_token_ids and message.max_tokens:
            reason = None if token in message.eos_token_ids else token
            return self._finish(request, RequestStatus.FINISHED_STOPPED, (token,), reason)
        if len(request.token_ids) >= request.max_length:
            shown = (token,) if message.max_tokens else ()  # of a prompt alone nothing but the end is told
            return self._finish(request, RequestStatus.FINISHED_LENGTH, shown)
        return _delta(request, (token,))

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        token_ids: tuple[int, ...] = (),
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> TokenDelta:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request, valid=status is not RequestStatus.FINISHED_ERROR)
        elif request.leader is not None:
            request.leader.forks.remove(request)
            request.leader = None
            self._num_forks -= 1
        else:
            self._waiting.remove(request)
        for fork in self._detach_forks(request):
            self._waiting.add(fork)
        self._kv.forget(request)
        del self._requests[request.request_id]
        request.status = status
        if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            self._policy.finished(request)
        return _delta(request, token_ids, FINISH_REASONS[status], stop_reason, error)

    def _release(self, request: Request, *, valid: bool = True) -> None:
        self._kv.release(request, valid=valid)
        self._free_slots.append(request.slot)
        request.slot = -1


def _delta(
    request: Request,
    token_ids: tuple[int, ...],
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
    error: str | None = None,
) -> TokenDelta:
    first = bool(token_ids) and len(request.token_ids) == request.num_prompt_tokens + len(token_ids)
    return TokenDelta(request.request_id, token_ids, finish_reason, stop_reason, request.num_cached,
                      request.num_preemptions, request.scheduled_time if first else None, error)
