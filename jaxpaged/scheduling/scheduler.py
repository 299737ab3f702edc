"""Decides which tokens each step computes.

There is no prefill phase and no decode phase: a request has tokens, some of them are computed, and every step spends
its token budget on the difference. Chunked prefill, prefix hits and recomputation after preemption follow from that.
The scheduler runs one step ahead of the ids it has seen: a dispatched step that samples counts as one assumed token.

A step first continues every running request that lacks one token; the rest of the budget goes to prompts. A prompt that
would use all of it leaves half to shorter ones, so that neither waits for the other.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxpaged.core.kv_groups import KVGroup
from jaxpaged.core.messages import EngineRequest, PackedLogprobs, TokenDelta, TokenLogprobs
from jaxpaged.core.outputs import FinishReason
from jaxpaged.scheduling.block_pool import BlockPool
from jaxpaged.scheduling.families import Branch, Families
from jaxpaged.scheduling.host_tier import HostTier
from jaxpaged.scheduling.kv_manager import KVManager
from jaxpaged.scheduling.planner import StepPlanner, StepRequests
from jaxpaged.scheduling.policy import FcfsPolicy, Policy
from jaxpaged.scheduling.queues import Queues
from jaxpaged.scheduling.request import Request, RequestStatus, StructuredOutputMatcher
from jaxpaged.scheduling.scheduler_output import (
    FAILED_TOKEN,
    NO_TOKEN_LEFT,
    REJECTED_TOKEN,
    PooledTokens,
    PromptLogprobs,
    SchedulerOutput,
)

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Scheduler:
    """Serves requests in the order of a policy, within the slots, the blocks and a token budget.

    Args:
        block_size: tokens in a block.
        groups: KV groups of the model, whose widths the pool has.
        max_num_seqs: number of slots.
        max_num_batched_tokens: token budget of a step.
        step_sizes: ascending numbers of tokens that a step can have after padding.
        policy: the order of requests and of preemption; first come, first served by default.
        prefix_caching: share the blocks of equal prefixes.
        host: host memory for evicted blocks, if there is any.
        swap: host memory keeps what a preempted request has computed, until it runs again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        groups: Sequence[KVGroup] = (KVGroup(),),
        max_num_seqs: int,
        max_num_batched_tokens: int,
        step_sizes: Sequence[int] = (),
        policy: Policy | None = None,
        prefix_caching: bool = True,
        host: HostTier | None = None,
        swap: bool = False,
    ) -> None:
        self._pool = pool
        self._kv = KVManager(pool, block_size, max_chunk=max_num_batched_tokens, groups=groups,
                             prefix_caching=prefix_caching, host=host if prefix_caching or swap else None)
        self._policy = policy or FcfsPolicy()
        self._queues = Queues(self._policy, max_num_seqs)
        self._planner = StepPlanner(
            self._queues, self._kv, self._policy, budget=max_num_batched_tokens,
            max_samples=min(max_num_seqs, max_num_batched_tokens), step_sizes=step_sizes, swap=swap)
        self._families = Families(self._queues, self._planner)
        self._in_flight: dict[int, StepRequests] = {}  # of steps that are not processed yet, by number
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queues.live) - len(self._queues.running)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    def has_unfinished(self) -> bool:
        return bool(self._queues.live)

    def add_request(
        self, message: EngineRequest, matcher: StructuredOutputMatcher | None = None, *, branches: int = 0
    ) -> None:
        """Queue a request.

        Args:
            branches: maximum number of requests that this one can branch into. Such a request is paused after each
                token until `resume`; 0 for an ordinary request.
        """
        assert message.request_id not in self._queues.live, f"request id {message.request_id} is already live"
        needed = self._kv.units_for(len(message.prompt_token_ids) + message.max_tokens)
        assert needed <= self._pool.num_usable, f"{needed} units are more than the pool has"
        first, self._num_arrived = self._num_arrived, self._num_arrived + max(branches, 1)
        if branches:
            self._queues.add_request(self._families.add_family(message, range(first, self._num_arrived)))
            return
        request = Request(message, first, matcher=matcher)
        leader = self._queues.live.get(message.fork_of or "")
        self._queues.add_request(request, leader if leader is not None and leader.num_output_tokens == 0 else None)

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step and allocate what it needs; empty when nothing can run now."""
        self._families.take_turns()
        step, requests = self._planner.plan_step(now)
        # The last running member of a family may just have been preempted, for a block that a paused one holds.
        if not step.chunks and self._families.take_turns():
            step, requests = self._planner.plan_step(now)
        if step.chunks:
            self._in_flight[step.number] = requests
        return step

    def propose(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Propose tokens that may follow those of a running request, for the next step only.

        Where that step has room for them it computes them and samples after each; `update_from_output` keeps those
        that are what has been sampled before them. The request has no other chunk until then. No token is proposed to
        requests with log probabilities, processors, structured outputs or forks, nor while an id is not known yet.

        Raises:
            ValueError: the model has a recurrent state, which cannot take tokens back.
        """
        if self._kv.states:
            raise ValueError("tokens cannot be proposed to a model with a recurrent state: it could not take back "
                             "those that are rejected; serve it without speculation")
        request = self._queues.live.get(request_id)
        if request is not None and not (request.full_sampling or request.scored or request.family):
            self._planner.propose(request, token_ids)

    def update_from_output(
        self, step: SchedulerOutput, sampled: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None = None,
        prompts: Sequence[PromptLogprobs | PooledTokens] = (),
    ) -> list[TokenDelta]:
        """Process what a step has sampled, and finish the requests that end with it.

        Args:
            step: a scheduled step, or a copy of it.
            sampled: token ids in the order of the sampled rows, or FAILED_TOKEN, NO_TOKEN_LEFT or REJECTED_TOKEN.
            logprobs: of the sampled ids, None for requests without log probabilities.
            prompts: prompt log probabilities and pooled hidden states of the requests that want them.
        """
        if not step.chunks:
            return []
        deltas = []
        requests, rows, proposed = self._in_flight.pop(step.number)
        for values in prompts:
            request = requests[values.chunk]
            if isinstance(values, PooledTokens):
                request.pool_tokens(values.start, values.values)
                continue
            if request.prompt_logprobs is None:
                request.prompt_logprobs = PackedLogprobs()
            request.prompt_logprobs.truncate(values.start)  # a preempted prompt starts again
            request.prompt_logprobs.extend(values.values)
        if proposed:
            self._take_back(proposed, rows, sampled)
        ended = RequestStatus.FINISHED_STOPPED
        for request, token, logprob in zip(rows, sampled, logprobs or [None] * len(rows), strict=True):
            if request.status >= ended:
                continue  # it ended while this step was running: the row is ignored
            request.num_pending -= 1
            if token < 0:
                if token == REJECTED_TOKEN:
                    continue
                deltas.append(self._end_without_token(request, token))
                continue
            if request.family is not None:
                self._families.pause(request)
                deltas.append(TokenDelta(request.request_id, (token,), None, None, request.num_cached_tokens,
                                         request.num_preemptions, request.scheduled_time,
                                         logprobs=() if logprob is None else (logprob,)))
                continue
            request.token_ids.append(token)
            delta = self._after_token(request, token)
            if not (request.full_sampling or request.scored):
                deltas.append(delta)
                continue
            if logprob is not None and delta.token_ids:
                delta = delta._replace(logprobs=(logprob,))
            if request.prompt_logprobs:
                delta = delta._replace(prompt_logprobs=request.prompt_logprobs)
                request.prompt_logprobs = None
            if request.message.pooling is not None:
                delta = delta._replace(embedding=request.embedding())
            deltas.append(delta)
            if request.matcher is not None and not request.finished and request.matcher.advance(token):
                deltas.append(self._finish(request, RequestStatus.FINISHED_STOPPED))
        return deltas

    def resume(self, branches: Iterable[Branch]) -> None:
        """Append a token to each paused request that continues; the caller has aborted the others."""
        self._families.resume(branches)

    def abort(self, request_ids: Iterable[str], error: str | None = None) -> list[TokenDelta]:
        """End these requests now, as failed if there is an error; unknown and finished ids are ignored."""
        wanted = dict.fromkeys(request_ids)
        live = [self._queues.live[request_id] for request_id in wanted if request_id in self._queues.live]
        status = RequestStatus.FINISHED_ABORTED if error is None else RequestStatus.FINISHED_ERROR
        return [self._finish(request, status, error=error) for request in live]

    def reset_prefix_cache(self) -> None:
        """Forget the content of all blocks: nothing computed so far is shared with a later request."""
        self._kv.reset_prefix_cache(self._queues.live.values())

    @property
    def num_swapped(self) -> tuple[int, int]:
        """Blocks saved to host memory, and blocks loaded from it."""
        return self._kv.num_saved, self._kv.num_loaded

    def is_live(self, request_id: str) -> bool:
        return request_id in self._queues.live

    def live_ids(self) -> list[str]:
        return list(self._queues.live)

    def kv_slots(self) -> tuple[int, int]:
        """KV slots that requests hold, shared ones once, and the number of empty ones among them.

        A slot reserved for a step in flight counts as filled.
        """
        return self._kv.kv_slots()

    def check_integrity(self) -> None:
        """Assert that blocks, slots and queues agree."""
        self._kv.check_integrity(self._queues.live.values())
        self._queues.check_integrity()
        for request in self._queues.running:
            needed = self._kv.blocks_for(request.num_computed_tokens)
            assert request.num_blocks >= needed, "computed tokens without blocks"

    def _take_back(self, proposed: Iterable[Request], rows: Sequence[Request], sampled: Sequence[int]) -> None:
        """Forget the rejected tokens before a request can end, so that no block is cached with them."""
        rejected = Counter(request for request, token in zip(rows, sampled, strict=True) if token == REJECTED_TOKEN)
        for request in proposed:
            if request.num_proposed:  # else it has lost its blocks while this step was running
                self._kv.take_back(request, rejected[request])
                request.num_proposed = 0

    def _end_without_token(self, request: Request, token: int) -> TokenDelta:
        if token == NO_TOKEN_LEFT:
            if request.matcher is not None and request.matcher.failed:
                return self._finish(request, RequestStatus.FINISHED_ERROR,
                                    error="what structured_outputs asks for could not be computed")
            if request.matcher is not None and not request.matcher.accepting:
                return self._finish(request, RequestStatus.FINISHED_ERROR,
                                    error="structured_outputs and the other sampling parameters, such as "
                                          "allowed_token_ids, leave no token")
            return self._finish(request, RequestStatus.FINISHED_STOPPED)
        assert token == FAILED_TOKEN, f"the sampler returned {token}"
        return self._finish(request, RequestStatus.FINISHED_ERROR,
                            error="the model produced logits that are not finite")

    def _after_token(self, request: Request, token: int) -> TokenDelta:
        message = request.message
        if token in message.stop_token_ids and message.max_tokens:
            reason = None if token in message.eos_token_ids else token
            return self._finish(request, RequestStatus.FINISHED_STOPPED, (token,), reason)
        length = len(request.token_ids)
        if length >= request.max_length:
            shown = (token,) if message.max_tokens else ()  # with max_tokens 0 the sampled token is dropped
            return self._finish(request, RequestStatus.FINISHED_LENGTH, shown)
        # Made here, and not as in `_finish`, because it happens hundreds of times per step.
        return TokenDelta(request.request_id, (token,), None, None, request.num_cached_tokens, request.num_preemptions,
                          request.scheduled_time if length == request.num_prompt_tokens + 1 else None)

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        token_ids: tuple[int, ...] = (),
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> TokenDelta:
        if request.status is RequestStatus.RUNNING:
            self._kv.free(request, cache=status is not RequestStatus.FINISHED_ERROR)
        self._queues.remove_request(request)
        self._families.remove_member(request)
        self._kv.forget(request)
        request.status = status
        if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            self._policy.finished(request)
        first = bool(token_ids) and len(request.token_ids) == request.num_prompt_tokens + len(token_ids)
        return TokenDelta(request.request_id, token_ids, FINISH_REASONS[status], stop_reason, request.num_cached_tokens,
                          request.num_preemptions, request.scheduled_time if first else None, error)
