"""One sequence on its way through the engine."""

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxpaged.core.messages import EngineRequest, TokenLogprobs


class StructuredOutputMatcher(Protocol):
    """Which tokens may come next in one sequence; see `jaxpaged.engine.structured_output_manager`."""

    @property
    def ready(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def advance(self, token: int) -> bool: ...

    def mask(self) -> Any: ...


class RequestStatus(enum.IntEnum):
    """Where a request is; everything from FINISHED_STOPPED on is an end."""

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
    """A request's tokens and what it owns.

    Attributes:
        order: arrival number; the smaller is never preempted for the larger.
        token_ids: prompt and output known on the host.
        num_prompt_tokens: tokens of the prompt.
        max_length: most tokens that it can have; of a member of a family, until it is resumed.
        num_computed_tokens: tokens whose keys and values are written or will be by a dispatched step.
        num_pending: sampled tokens of dispatched steps whose ids are not read yet, 0 to 2.
        block_table: blocks in order of position; only ever appended to while RUNNING.
        predicted_length: tokens that a policy expects it to have in the end; 0 where none does.
        slot: index of its device-side state while RUNNING, else -1.
        new_in_slot: no chunk has been made since it got its slot.
        block_hashes: prefix-cache keys of its first full blocks, as far as anybody has asked.
        num_cached_blocks: blocks of the table whose content the prefix cache has been told.
        shares_tail: its last block, which is not full, may have other owners: it is copied before it is written.
        table_changed: blocks before the end of its table have changed since the device was told.
        leader: the running or waiting request that computes the prompt for this one, too.
        forks: those for which this one computes the prompt.
        family: those that it is forked from, or that are from it; it is then paused after each token.
        paused: its next logits are computed, and it awaits a branch: the token to continue with.
        pinned_hashes: keys of blocks that host memory keeps for it until it runs again.
        num_cached_tokens: prompt tokens that the prefix cache spared it when it was first let in.
        num_passed: times that a request behind it in the queue was let in because it did not fit itself.
        full_sampling: whether its rows need the full variant of the sampler.
        scored: whether more is wanted of its prompt than keys and values: log probabilities, or an embedding.
        matcher: which tokens may come next; None where all may.
        pooled: of an embedding, as far as its prompt is computed: the sum over the tokens, or the last one's.
        prompt_logprobs: of its prompt tokens but the first, as far as they are there and nobody has been told.
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
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    slot: int = -1
    new_in_slot: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    shares_tail: bool = False
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
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)
    predicted_length: int = 0

    def __post_init__(self) -> None:
        self.request_id = self.message.request_id
        self.token_ids = list(self.message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        most = max(self.message.max_tokens, 1) if self.family is None else 1  # of a prompt alone one is dropped
        self.max_length = self.num_prompt_tokens + most
        self.full_sampling = self.message.params.full_sampling or self.matcher is not None
        self.scored = self.message.params.prompt_logprobs is not None or self.message.pooling is not None

    def resume(self, token: int) -> None:
        """Append the token that follows; the request is no longer paused."""
        self.token_ids.append(token)
        self.max_length = len(self.token_ids) + 1
        self.paused = False

    def pool(self, start: int, values: list[float]) -> None:
        """Take in what the prompt's tokens from `start` on add to the embedding; a preempted prompt begins anew."""
        add = self.message.pooling == "mean" and start > 0
        self.pooled = [old + new for old, new in zip(self.pooled, values, strict=True)] if add else values

    def embedding(self) -> tuple[float, ...]:
        """The embedding of a prompt that is computed."""
        count = self.num_prompt_tokens if self.message.pooling == "mean" else 1
        return tuple(value / count for value in self.pooled)

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
        """Tokens that a step could process now; none once the last token is on its way."""
        tokens = len(self.token_ids) + self.num_pending
        if self.matcher is not None and tokens < self.max_length and (self.num_pending or self._lacks_mask):
            return max(0, len(self.token_ids) - 1 - self.num_computed_tokens)  # all but the token that samples
        return tokens - self.num_computed_tokens if tokens < self.max_length else 0

    @property
    def _lacks_mask(self) -> bool:
        """Whether its next draw, which is also that of its forks, has to wait for a mask."""
        return any(request.matcher is not None and not request.matcher.ready for request in (self, *self.forks))

    @property
    def finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED
