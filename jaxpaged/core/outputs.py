"""Outputs of requests: frozen values with the fields of vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one candidate token; `rank` counts from 1 for the most probable."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds of `time.monotonic()`; None until the event happens."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding: D numbers."""

    embedding: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of a request.

    Attributes:
        cumulative_logprob: sum over all its tokens so far, if log probabilities were requested.
        logprobs: for each of `token_ids` the chosen token, first, and the requested alternatives.
        text_offsets: with log probabilities, the offset in the choice's text at which each token begins.
        weight_versions: which weights made which of the choice's tokens: the index of a token, counted from the
            choice's first, and the version (see `WeightsUpdate`) from it on.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_offsets: tuple[int, ...] = ()
    weight_versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """New weights are in use.

    Attributes:
        version: 1 for the first update since the start, then 2, and so on.
        bytes_copied: of the weights that had to be moved; the others are used where they are.
        seconds: it took.
    """

    version: int
    bytes_copied: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request with all its choices: complete, or for DELTA outputs the new part of each."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...] = field(default_factory=tuple)
    finished: bool = False
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    embedding: tuple[float, ...] | None = None
