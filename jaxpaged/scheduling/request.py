"""One sequence on its way through the engine."""

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxpaged.core.messages import EngineRequest, PackedLogprobs


class StructuredOutputMatcher(Protocol):
    """Which tokens may come next in one sequence; see `jaxpaged.engine.structured_output_manager`."""

    @property
    def ready(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    @property
    def accepting(self) -> bool: ...

    def advance(self, token: int) -> bool: ...

    def mask(self) -> Any: ...


NEVER = 2**62  # more tokens, or blocks, than any request has


class RequestStatus(enum.IntEnum):
    """State of a request; everything from FINISHED_STOPPED on is finished."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6


@dataclass(slots=True, eq=False)
class Family:
    """Requests that are forked from one another token by token: the beams of a search.

    Attributes:
        members: the live ones.
        free_orders: arrival numbers that no member has.
    """

    members: "list[Request]" = field(default_factory=list)
    free_orders: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """A request's tokens, slot and blocks.

    Attributes:
        order: arrival number; a request is never preempted for one with a larger number.
        token_ids: prompt and output tokens known on the host.
        max_length: maximum number of tokens; for a member of a family, until it is resumed.
        num_computed_tokens: tokens whose keys and values are written, or will be by a dispatched step.
        num_pending: sampled rows of dispatched steps whose ids are not read yet: 0 to 2, or one more than
            `num_proposed`.
        num_proposed: computed tokens that were only proposed; it has no further chunk until it is known which of them
            follow.
        block_tables: of each KV group, its blocks in order of position, all of the same length; the null block where
            no further token of the request sees the block. Empty while it has no blocks.
        num_unseen: of each KV group, number of those null blocks.
        slides_at: number of computed tokens from which on some group has a block that no further token sees.
        predicted_length: number of tokens that the policy expects at the end; 0 without a prediction.
        slot: index of its device-side state while RUNNING, else -1.
        new_in_slot: it has no chunk yet since it got its slot.
        block_hashes: hashes of its first full blocks, as far as they have been needed.
        num_cached_blocks: blocks of the table, from the first on, whose content is cached.
        shares_tail: its last block, which is not full, or its state may have other references: it is copied before it
            is written.
        state_block: the block with its state, for a model that has one; else, and before it has any, the null block.
        state_kept_at: number of computed tokens at which its state was last kept, or found, for others.
        table_changed: blocks before the end of its table have changed since the last chunk.
        leader: the running or waiting request that computes the prompt for this one, too.
        forks: requests for which this one computes the prompt.
        family: the requests it is forked with token by token; it is then paused after each token.
        paused: its next logits are computed, and it awaits a branch: the token to continue with.
        pinned_hashes: hashes of blocks that host memory keeps for it until it runs again.
        num_cached_tokens: prompt tokens that were cached when it was first admitted.
        num_passed: number of requests that were admitted past it because it did not fit.
        full_sampling: its rows need the full variant of the sampler.
        scored: its prompt needs log probabilities or an embedding.
        matcher: which tokens may come next; None where all may.
        pooled: embedding of the computed part of the prompt: the sum over the tokens, or that of the last one.
        prompt_logprobs: of the prompt tokens but the first, as far as they are computed and not returned yet;
            None before the first.
    """

    message: EngineRequest
    order: int
    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_length: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_pending: int = 0
    num_proposed: int = 0
    num_preemptions: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    num_unseen: list[int] = field(default_factory=list)
    slides_at: int = NEVER
    slot: int = -1
    new_in_slot: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    shares_tail: bool = False
    state_block: int = 0
    state_kept_at: int = 0
    table_changed: bool = False
    leader: "Request | None" = None
    forks: "list[Request]" = field(default_factory=list)
    family: Family | None = None
    paused: bool = False
    pinned_hashes: tuple[bytes, ...] = ()
    num_cached_tokens: int = 0
    num_passed: int = 0
    scheduled_time: float | None = None
    full_sampling: bool = False
    scored: bool = False
    matcher: StructuredOutputMatcher | None = None
    prompt_logprobs: PackedLogprobs | None = None
    pooled: list[float] = field(default_factory=list)
    predicted_length: int = 0

    def __post_init__(self) -> None:
        self.request_id = self.message.request_id
        self.token_ids = list(self.message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        # With max_tokens 0 a token is sampled all the same, and dropped.
        self.max_length = self.num_prompt_tokens + (max(self.message.max_tokens, 1) if self.family is None else 1)
        self.full_sampling = self.message.params.full_sampling or self.matcher is not None
        self.scored = self.message.params.prompt_logprobs is not None or self.message.pooling is not None

    def resume(self, token: int) -> None:
        """Append the token that follows; the request is no longer paused."""
        self.token_ids.append(token)
        self.max_length = len(self.token_ids) + 1
        self.paused = False

    def pool_tokens(self, start: int, values: list[float]) -> None:
        """Add prompt tokens from `start` on to the embedding; a preempted prompt starts again at 0."""
        add = self.message.pooling == "mean" and start > 0
        self.pooled = [old + new for old, new in zip(self.pooled, values, strict=True)] if add else values

    def embedding(self) -> tuple[float, ...]:
        """The embedding of the computed prompt."""
        count = self.num_prompt_tokens if self.message.pooling == "mean" else 1
        return tuple(value / count for value in self.pooled)

    @property
    def num_blocks(self) -> int:
        """Length of its block tables."""
        return len(self.block_tables[0]) if self.block_tables else 0

    @property
    def num_tokens(self) -> int:
        """Known tokens plus the assumed ones of steps in flight."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, the assumed ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that a step can compute now; none once the last token is being sampled."""
        if self.num_proposed:
            return 0
        tokens = len(self.token_ids) + self.num_pending
        if self.matcher is not None and tokens < self.max_length and (self.num_pending or self._lacks_mask):
            return max(0, len(self.token_ids) - 1 - self.num_computed_tokens)  # all but the token that samples
        return tokens - self.num_computed_tokens if tokens < self.max_length else 0

    @property
    def _lacks_mask(self) -> bool:
        """Whether sampling its next token, and the first ones of its forks, has to wait for a mask."""
        return any(request.matcher is not None and not request.matcher.ready for request in (self, *self.forks))

    @property
    def finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED
