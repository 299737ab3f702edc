"""Beam search as transformers does it, over an engine that serves single tokens.

Each step of a search is one request per beam for one token and the log probabilities of its best continuations; the
beams share the blocks of what they have in common through the prefix cache. What a search gives comes at its end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxpaged.messages import EngineRequest, TokenDelta, TokenLogprobs
from jaxpaged.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Beam:
    """Generated tokens, the sum of their log probabilities, and each one's own."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()


def num_candidates(width: int, num_end_ids: int) -> int:
    """Continuations to look at, so that `width` are left if the best ones all end."""
    return max(2, 1 + num_end_ids) * width


@dataclass(slots=True)
class BeamSearch:
    """The beams of one request.

    A beam that ends among the best `width` continuations is a result, with its score divided by
    length ** length_penalty; the best `width` results are kept. The search ends once there are so many and no running
    beam can become better than the worst of them (by its present length, or by the longest possible one where
    `early_stopping` is "never"), or at once where `early_stopping` is True; or at the limit of tokens.
    """

    request: EngineRequest
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    results: list[tuple[float, Beam]] = field(default_factory=list)

    @property
    def width(self) -> int:
        return self.request.params.best_of or self.request.params.n

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Go on by one token, given the best continuations of each beam; no beam is left at the end."""
        params, limit, stop = self.request.params, self.request.max_tokens, self.request.stop_token_ids
        length = len(self.beams[0].token_ids) + 1
        continuations = [
            Beam((*beam.token_ids, token), beam.score + logprob,
                 (*beam.logprobs, TokenLogprobs(logprob, rank, logprobs.top[: params.logprobs or 0])))
            for beam, logprobs in zip(self.beams, found, strict=True)
            for rank, (token, logprob) in enumerate(logprobs.top, 1)]
        continuations.sort(key=lambda beam: -beam.score)
        del continuations[num_candidates(self.width, len(stop)) :]
        running = [beam for beam in continuations if beam.token_ids[-1] not in stop and length < limit]
        self.results += [(beam.score / length**params.length_penalty, beam) for beam in continuations[: self.width]
                         if beam.token_ids[-1] in stop or length == limit]
        self.results.sort(key=lambda result: -result[0])
        del self.results[self.width :]
        self.beams = running[: self.width]
        if self.beams and len(self.results) == self.width:
            longest = limit if params.early_stopping == "never" and params.length_penalty > 0 else length
            best = self.beams[0].score / longest**params.length_penalty
            if params.early_stopping is True or best <= self.results[-1][0]:
                self.beams = []


@dataclass(slots=True)
class _Running:
    """A search under way: the requests of its present step, and what has come for them."""

    search: BeamSearch
    choices: list[str]
    aborted: set[str] = field(default_factory=set)
    step: dict[str, TokenLogprobs | None] = field(default_factory=dict)
    first: TokenDelta | None = None


class BeamSearches:
    """All searches of an engine: their choices outside, requests for one token each inside."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}  # by the id of the first choice
        self._owners: dict[str, str] = {}  # choices and requests inside -> first choice

    def __bool__(self) -> bool:
        return bool(self._running)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._owners

    def add(self, request: EngineRequest) -> list[EngineRequest]:
        """Begin a search with its first choice; the other choices follow. Returns requests for the scheduler."""
        if request.fork_of is not None:
            running = self._running.get(request.fork_of)
            if running is not None:
                running.choices.append(request.request_id)
                self._owners[request.request_id] = request.fork_of
            return []
        self._running[request.request_id] = _Running(BeamSearch(request), [request.request_id])
        self._owners[request.request_id] = request.request_id
        return self._next_step(request.request_id)

    def abort(self, request_ids: Iterable[str]) -> tuple[list[TokenDelta], list[str]]:
        """End the choices with these ids; a search without choices ends.

        Returns:
            The last deltas of the choices, and requests for the scheduler to end.
        """
        deltas, inside = [], []
        for request_id in dict.fromkeys(request_ids):
            running = self._running.get(self._owners.get(request_id, ""))
            if running is not None and request_id in running.choices and request_id not in running.aborted:
                running.aborted.add(request_id)
                deltas.append(TokenDelta(request_id, (), "abort"))
                if len(running.aborted) == len(running.choices):
                    inside += self._forget(running)
        return deltas, inside

    def take(self, deltas: Iterable[TokenDelta]) -> tuple[list[TokenDelta], list[EngineRequest], list[str]]:
        """Sort deltas of the scheduler.

        Returns:
            Those for outside, the next requests for the scheduler, and requests for it to end.
        """
        outside: list[TokenDelta] = []
        requests: list[EngineRequest] = []
        gone: list[str] = []
        for delta in deltas:
            owner = self._owners.get(delta.request_id)
            running = self._running.get(owner or "")
            if owner is None or running is None:
                if _INSIDE not in delta.request_id:
                    outside.append(delta)
                continue
            if delta.finish_reason == "error":
                outside += [delta._replace(request_id=choice, token_ids=(), logprobs=()) for choice in running.choices
                            if choice not in running.aborted]
                gone += self._forget(running)
                continue
            running.step[delta.request_id] = delta.logprobs[0]
            running.first = running.first or delta
            if None in running.step.values():
                continue
            found = [logprobs for logprobs in running.step.values() if logprobs is not None]
            for request_id in running.step:
                del self._owners[request_id]
            running.step.clear()
            running.search.advance(found)
            if running.search.beams:
                requests += self._next_step(owner)
            else:
                outside += _results(running)
                self._forget(running)
        return outside, requests, gone

    def _next_step(self, owner: str) -> list[EngineRequest]:
        running = self._running[owner]
        search, request = running.search, running.search.request
        wanted = num_candidates(search.width, len(request.stop_token_ids))
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=wanted)
        requests = []
        for index, beam in enumerate(search.beams):
            request_id = f"{owner}{_INSIDE}{len(beam.token_ids)}.{index}"
            running.step[request_id] = None
            self._owners[request_id] = owner
            requests.append(replace(
                request, request_id=request_id, prompt_token_ids=request.prompt_token_ids + beam.token_ids,
                params=params, max_tokens=1, stop_token_ids=frozenset(), eos_token_ids=frozenset()))
        return requests

    def _forget(self, running: _Running) -> list[str]:
        inside = list(running.step)
        for request_id in (*inside, *running.choices, running.search.request.request_id):
            self._owners.pop(request_id, None)
        del self._running[running.search.request.request_id]
        return inside


_INSIDE = "\0beam "


def _results(running: _Running) -> list[TokenDelta]:
    request, first = running.search.request, running.first
    deltas = []
    assert first is not None
    for choice, (_, beam) in zip(running.choices, running.search.results, strict=False):
        if choice in running.aborted:
            continue
        last = beam.token_ids[-1]
        stopped = last in request.stop_token_ids
        deltas.append(TokenDelta(
            choice, beam.token_ids, "stop" if stopped else "length",
            last if stopped and last not in request.eos_token_ids else None, first.num_cached_tokens,
            scheduled_time=first.scheduled_time,
            logprobs=beam.logprobs if request.params.logprobs is not None else ()))
    return deltas
