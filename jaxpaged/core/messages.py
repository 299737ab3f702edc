"""Messages between the engine and its front end, within one process or between two.

One batch goes each way per step. The engine sees token ids and stop ids; text, stop strings and templates stay in the
front end. Times are seconds of `time.monotonic()`, which all processes of one machine share.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

from jaxpaged.core.kv_groups import UNBOUNDED, KVGroup
from jaxpaged.core.outputs import FinishReason
from jaxpaged.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that structured output has to match; it is known to compile.

    Attributes:
        text: the grammar as llguidance reads it.
        num_bytes: memory that it takes when compiled.
        dropped: keywords of a JSON schema that it does not enforce.
    """

    text: str
    num_bytes: int
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate; a request with n > 1 becomes n of these, numbered by `choice`.

    Attributes:
        request_id: unique among the live ones.
        stop_token_ids: ids that end generation: the user's, and the model's EOS ids unless `ignore_eos`.
        eos_token_ids: the model's EOS ids; a stop on one of them reports no `stop_reason`.
        max_tokens: resolved by the sender; prompt and max_tokens together fit the context.
        bad_word_ids: sequences of tokens that must not occur in the output.
        grammar: what the output has to match.
        seed: 64 bits, or None to let the engine choose.
        cache_salt: requests share prefixes only with requests of the same salt.
        skip_prefix_read: compute every prompt token, even cached ones.
        pooling: make an embedding of the prompt, of its last token or the mean of all; the sampled token is ignored.
        fork_of: id of the request's first choice: the prompt is computed once for all choices.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    choice: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    skip_prefix_read: bool = False
    grammar: Grammar | None = None
    pooling: Literal["last", "mean"] | None = None
    fork_of: str | None = None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Abort these requests; unknown or finished ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached blocks: later requests share nothing that has been computed so far."""


@dataclass(frozen=True, slots=True)
class DescribePool:
    """Ask for a PoolState, which is sent with the next outputs; nothing is recorded otherwise."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the loop without finishing the running requests."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position.

    Attributes:
        logprob: of the token at this position.
        rank: 1 plus the number of more probable tokens.
        top: (id, logprob) of the most probable tokens in order, as many as were requested.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log probabilities at many positions, of equally many alternatives each.

    They are kept in arrays, which are sent in a hundredth of the time of as many objects; each position becomes an
    object only when it is read.
    """

    __slots__ = ("_count", "_ids", "_logprobs", "_ranks", "_values")

    def __init__(self) -> None:
        self._count = 0  # of alternatives
        self._logprobs, self._values = array("d"), array("d")
        self._ranks, self._ids = array("q"), array("q")

    def extend(self, found: Iterable[TokenLogprobs]) -> None:
        """Add positions at the end."""
        if isinstance(found, PackedLogprobs):
            self._take_count(found._count)
            for mine, other in zip(self._arrays(), found._arrays(), strict=True):
                mine.extend(other)
            return
        for item in found:
            self._take_count(len(item.top))
            self._logprobs.append(item.logprob)
            self._ranks.append(item.rank)
            self._ids.extend([number for number, _ in item.top])
            self._values.extend([value for _, value in item.top])

    def truncate(self, length: int) -> None:
        """Drop all positions from this one on."""
        del self._logprobs[length:], self._ranks[length:]
        del self._ids[length * self._count :], self._values[length * self._count :]

    def _take_count(self, count: int) -> None:
        assert count == self._count or not self, "all positions have equally many alternatives"
        self._count = count

    def _arrays(self) -> tuple["array[Any]", ...]:
        return self._logprobs, self._ranks, self._ids, self._values

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprobs, ...]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | tuple[TokenLogprobs, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        first = range(len(self))[index] * self._count
        top = zip(self._ids[first : first + self._count], self._values[first : first + self._count], strict=True)
        return TokenLogprobs(self._logprobs[index], self._ranks[index], tuple(top))


class TokenDelta(NamedTuple):
    """New tokens of one sequence, with finish_reason if it has ended.

    A step makes one for each running sequence: a tuple costs less than a dataclass.

    `error` explains finish_reason "error". `scheduled_time` is set once, on the delta with the first token. `logprobs`
    has one entry for each of `token_ids` if the request asks for them, else none. `prompt_logprobs` has one for each
    prompt token but the first, and is set once, with the first token or the end. `embedding` is that of the
    prompt, if requested.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of the engine after a step; counters are totals since its start.

    Blocks are units of the pool; `group_blocks_used` are those with references of each KV group.
    `blocks_swapped_out` and `blocks_swapped_in` count those copied to host memory and back.
    `blocks_used_sum` and `blocks_shared_sum` are sums over all steps: of the blocks with references, and of the
    references beyond each block's first.
    `kv_slots_held_sum` and `kv_slots_empty_sum` are sums of the two gauges over all steps, for a mean over a run.
    `step_seconds` has (kind, seconds) of the steps since the last message, kind being "decode", "prefill" or "mixed";
    `step_tokens` the number of tokens in each without padding.
    """

    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    group_blocks_used: tuple[int, ...] = (0,)
    blocks_used_sum: int = 0
    blocks_shared_sum: int = 0
    kv_slots_held: int = 0
    kv_slots_empty: int = 0
    kv_slots_held_sum: int = 0
    kv_slots_empty_sum: int = 0
    num_preemptions: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    padding_tokens: int = 0
    compilations: int = 0
    device_idle_seconds: float = 0.0
    step_seconds: tuple[tuple[str, float], ...] = ()
    step_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine that is ready to serve.

    Attributes:
        num_programs: programs that it may need.
        num_blocks: units of the KV pool; with one KV group, blocks.
        kv_capacity: tokens of the longest request that fits the KV pool.
        num_compiled: programs compiled or loaded at the start: all, unless it compiles lazily.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_programs: int
    weight_bytes: int
    kv_cache_bytes: int
    start_seconds: float
    eos_token_ids: tuple[int, ...] = ()
    kv_groups: tuple[KVGroup, ...] = (KVGroup(),)
    kv_capacity: int = 0
    num_host_blocks: int = 0
    attention: str = ""
    num_compiled: int = 0

    def summary(self) -> str:
        """The start-up line for the user."""
        tokens = f"{self.kv_capacity:,} tokens" if self.kv_capacity < UNBOUNDED // 2 else "requests of any length"
        groups = f" in {len(self.kv_groups)} groups" if len(self.kv_groups) > 1 else ""
        return (
            f"{self.model} ({self.architecture}) on {self.device}, {self.dtype}: "
            f"weights {self.weight_bytes / 2**20:,.0f} MiB, "
            f"{self.num_blocks:,} KV blocks of {self.block_size}{groups} hold {tokens} "
            f"({self.kv_cache_bytes / 2**20:,.0f} MiB), context {self.max_model_len:,}, "
            f"attention by {self.attention}, {self.num_programs} programs, ready in {self.start_seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class PoolState:
    """The use of every KV block at one moment.

    Attributes:
        state_codes: a character per block, the null block excluded: f free, o owned by one request, s shared by
            several, c free with cached content that a later request may share.
        swapped: number of blocks whose content is in host memory.
        group_codes: a character per block: a letter for the KV group that references it, a for the first, - for none;
            empty where there is one group.
    """

    state_codes: str
    swapped: int = 0
    group_codes: str = ""


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """One batch from the engine: new tokens of each sequence, and the state after the step.

    Attributes:
        weights_version: of the weights that made the tokens.
    """

    deltas: tuple[TokenDelta, ...]
    stats: EngineStats
    pool: PoolState | None = None
    weights_version: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # By column, in a fifth of the time: pickle writes the class of each tuple that is not a plain one.
        return _unpacked, (tuple(zip(*self.deltas, strict=True)), self.stats, self.pool, self.weights_version)


def _unpacked(columns: tuple[tuple[Any, ...], ...], *others: Any) -> EngineOutputs:
    return EngineOutputs(tuple(map(TokenDelta._make, zip(*columns, strict=True))), *others)


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The engine has failed; no more messages follow."""

    message: str
