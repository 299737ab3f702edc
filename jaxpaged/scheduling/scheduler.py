"""Decides which tokens each step computes.

There is no prefill and no decode: a request has tokens, some of them are computed, and every step spends its token
budget on the difference, oldest request first. Chunked prefill and recomputation after preemption follow from that.
The scheduler runs one step ahead of the ids it has seen: a dispatched step that samples counts as one assumed token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpaged.messages import EngineRequest, TokenDelta, TokenLogprobs
from jaxpaged.outputs import FinishReason
from jaxpaged.scheduling.block_allocator import BlockAllocator
from jaxpaged.scheduling.policy import FcfsPolicy, Policy
from jaxpaged.scheduling.request import Request, RequestStatus
from jaxpaged.scheduling.sorted_requests import SortedRequests

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}

FAILED_TOKEN = -1  # what the sampler returns for a row whose logits are not finite

# A step's time grows as its tokens plus about this many, on CPU as on GPU: the weights are read whatever the batch.
STEP_OVERHEAD_TOKENS = 64


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
    """

    request: Request
    slot: int
    start: int
    token_ids: Sequence[int]
    num_tokens: int
    samples: bool
    blocks: Sequence[int]
    admit: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: its pieces, and how many tokens they hold."""

    pieces: tuple[ScheduledPiece, ...]
    num_tokens: int

    @property
    def num_sampled(self) -> int:
        return sum(piece.samples for piece in self.pieces)

    @property
    def kind(self) -> str:
        """decode, prefill or mixed, as the metrics call it."""
        longest = max(piece.num_tokens for piece in self.pieces)
        if longest == 1:
            return "decode"
        return "mixed" if any(piece.num_tokens == 1 for piece in self.pieces) else "prefill"


class Scheduler:
    """Serves requests in the order of a policy over slots, blocks and a token budget.

    Args:
        allocator: the pool's blocks.
        block_size: tokens in a block.
        max_num_seqs: slots.
        max_num_batched_tokens: token budget of a step.
        step_sizes: ascending numbers of tokens that a step can have after padding.
        policy: who comes first and who has to go; first come, first served if not given.
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
    ) -> None:
        self._allocator = allocator
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
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, message: EngineRequest) -> None:
        """Queue a request."""
        assert message.request_id not in self._requests, f"request id {message.request_id} is already live"
        needed = self._blocks_for(len(message.prompt_token_ids) + message.max_tokens)
        assert needed <= self._allocator.num_usable, f"{needed} blocks can never be had"
        request = Request(message, self._arrivals)
        self._arrivals += 1
        self._requests[message.request_id] = request
        self._waiting.add(request)

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step and take what it needs; empty when nothing can run now."""
        planned: list[tuple[Request, int]] = []
        budget = self._budget
        index = 0
        while index < len(self._running) and budget:
            request = self._running[index]
            index += 1
            count = min(request.num_to_compute, budget)
            if count and self._make_room(request, count):
                planned.append((request, count))
                budget -= count
        while budget and self._can_admit():
            request = self._waiting[0]
            self._admit(request, now)
            count = min(request.num_to_compute, budget)
            self._take_blocks(request, count)
            planned.append((request, count))
            budget -= count
        pieces = tuple(self._commit(request, count) for request, count in self._fit_step_size(planned))
        return SchedulerOutput(pieces, sum(piece.num_tokens for piece in pieces))

    def update(
        self, step: SchedulerOutput, sampled: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None = None
    ) -> list[TokenDelta]:
        """Take in what a step sampled, in the order of its sampling pieces; finish what has ended.

        Args:
            logprobs: of the sampled ids, None for those whose requests want none.
        """
        deltas = []
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
            request.token_ids.append(token)
            delta = self._after_token(request, token)
            deltas.append(delta if logprob is None else delta._replace(logprobs=(logprob,)))
        return deltas

    def abort(self, request_ids: Iterable[str]) -> list[TokenDelta]:
        """End these requests now; unknown and finished ids are ignored."""
        wanted = dict.fromkeys(request_ids)
        live = [self._requests[request_id] for request_id in wanted if request_id in self._requests]
        return [self._finish(request, RequestStatus.FINISHED_ABORTED) for request in live]

    def is_live(self, request_id: str) -> bool:
        return request_id in self._requests

    def live_ids(self) -> list[str]:
        return list(self._requests)

    def kv_slots(self) -> tuple[int, int]:
        """KV slots held by requests, and how many of them are empty.

        A slot reserved for a step in flight counts as filled.
        """
        held = sum(len(request.block_table) for request in self._running) * self._block_size
        return held, held - sum(request.num_computed for request in self._running)

    def check_integrity(self) -> None:
        """Assert that blocks, slots and queues agree."""
        self._allocator.check_integrity(request.block_table for request in self._requests.values())
        slots = [request.slot for request in self._running] + self._free_slots
        assert len(slots) == len(set(slots)) == self._num_slots and -1 not in slots, f"slots in use and free: {slots}"
        assert len(self._requests) == len(self._waiting) + len(self._running), "a request is in no queue, or in two"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING, f"{request.status!r} among the running"
            assert len(request.block_table) >= self._blocks_for(request.num_computed), "computed tokens without blocks"
        for request in self._waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request.status!r} waits"
            assert request.slot == -1 and not request.block_table, "a waiting request owns something"
        for queue in (self._waiting, self._running):
            queue.check_integrity()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _missing_blocks(self, request: Request, count: int) -> int:
        return max(0, self._blocks_for(request.num_computed + count) - len(request.block_table))

    def _take_blocks(self, request: Request, count: int) -> None:
        request.block_table.extend(self._allocator.allocate(self._missing_blocks(request, count)))

    def _make_room(self, request: Request, count: int) -> bool:
        """Take blocks for `count` more tokens, preempting the youngest; False where the request had to go itself."""
        missing = self._missing_blocks(request, count)
        while not self._allocator.can_allocate(missing):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if missing:
            request.block_table.extend(self._allocator.allocate(missing))
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    def _can_admit(self) -> bool:
        if not self._waiting or not self._free_slots:
            return False
        request = self._waiting[0]
        if request.num_pending:
            return False  # preempted in this very step: its last id is not known yet
        # All of what it has must fit beside what the running still need for theirs, and some blocks to grow, so
        # that half-done prefills do not block one another and nobody is preempted a moment after admission.
        promised = sum(self._missing_blocks(running, running.num_to_compute) for running in self._running)
        growth = sum(self._policy.growth_blocks(running, self._block_size) for running in self._running)
        return self._allocator.can_allocate(self._blocks_for(request.num_tokens) + promised + growth)

    def _admit(self, request: Request, now: float) -> None:
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        if request.scheduled_time is None:
            request.scheduled_time = now
        self._running.add(request)

    def _fit_step_size(self, planned: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Cut prefill pieces down to the next smaller step size where the padding would cost more than they bring.

        A token of each stays: cut away whole, a short prompt would wait for as long as the others fill that size.
        """
        total = sum(count for _, count in planned)
        below = max((size for size in self._step_sizes if size <= total), default=0)
        above = min((size for size in self._step_sizes if size >= total), default=total)
        if not below or (below + STEP_OVERHEAD_TOKENS) * total >= (above + STEP_OVERHEAD_TOKENS) * below:
            return planned
        excess = total - below
        fitted = []
        for request, count in reversed(planned):
            cut = min(excess, count - 1)
            excess -= cut
            fitted.append((request, count - cut))
        return fitted[::-1] if not excess else planned

    def _commit(self, request: Request, count: int) -> ScheduledPiece:
        start, end = request.num_computed, request.num_computed + count
        request.num_computed = end
        samples = end == request.num_tokens
        blocks = request.block_table[self._blocks_for(start) : self._blocks_for(end)]
        request.num_pending += samples
        # By position: hundreds are made per step, and keywords would cost more than the rest of this method.
        return ScheduledPiece(request, request.slot, start, request.token_ids[start:end], count, samples, blocks,
                              start == 0)

    def _after_token(self, request: Request, token: int) -> TokenDelta:
        message = request.message
        if token in message.stop_token_ids:
            reason = None if token in message.eos_token_ids else token
            return self._finish(request, RequestStatus.FINISHED_STOPPED, (token,), reason)
        if len(request.token_ids) >= request.max_length:
            return self._finish(request, RequestStatus.FINISHED_LENGTH, (token,))
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
            self._release(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        request.status = status
        if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            self._policy.finished(request)
        return _delta(request, token_ids, FINISH_REASONS[status], stop_reason, error)

    def _release(self, request: Request) -> None:
        self._allocator.free(request.block_table)
        request.block_table = []
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
    return TokenDelta(request.request_id, token_ids, finish_reason, stop_reason, 0, request.num_preemptions,
                      request.scheduled_time if first else None, error)
