"""Beam search as transformers does it, over requests that fork.

Each beam is a request of the scheduler's (`jaxpaged.scheduling.families`), which gives the log probabilities of its
best continuations and is paused until the search has chosen among those of all beams. Results come at the search's end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxpaged.core.messages import EngineRequest, TokenDelta, TokenLogprobs
from jaxpaged.core.sampling_params import SamplingParams, num_beam_candidates
from jaxpaged.scheduling.families import Branch


@dataclass(frozen=True, slots=True)
class Beam:
    """Generated tokens, the sum of their log probabilities, each one's own, and the beam before that it continues."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    parent: int = 0


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
                 (*beam.logprobs, TokenLogprobs(logprob, rank, logprobs.top[: params.logprobs or 0])), parent)
            for parent, (beam, logprobs) in enumerate(zip(self.beams, found, strict=True))
            for rank, (token, logprob) in enumerate(logprobs.top, 1)]
        continuations.sort(key=lambda beam: -beam.score)
        del continuations[num_beam_candidates(self.width, len(stop)) :]
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
    """A search under way: its choices, the requests of its beams and what has come for the next step."""

    search: BeamSearch
    choices: list[str]
    aborted: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    num_requests: int = 0
    found: dict[str, TokenLogprobs] = field(default_factory=dict)
    first: TokenDelta | None = None


class BeamSearches:
    """All searches of an engine: their choices outside, a request for each beam inside."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}  # by the id of the first choice
        self._owners: dict[str, str] = {}  # choices and requests inside -> first choice

    def __bool__(self) -> bool:
        return bool(self._running)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._owners

    def add(self, request: EngineRequest) -> tuple[EngineRequest, int] | None:
        """Begin a search with its first choice; the other choices follow.

        Returns:
            The request of the first beam and the number of beams that it can become, for the scheduler.
        """
        if request.fork_of is not None:
            running = self._running.get(request.fork_of)
            if running is not None:
                running.choices.append(request.request_id)
                self._owners[request.request_id] = request.fork_of
            return None
        running = _Running(BeamSearch(request), [request.request_id])
        self._running[request.request_id] = running
        self._owners[request.request_id] = request.request_id
        width = running.search.width
        params = SamplingParams(temperature=0, logprobs=num_beam_candidates(width, len(request.stop_token_ids)))
        running.requests.append(self._new_request(running))
        return replace(request, request_id=running.requests[0], params=params, seed=0, stop_token_ids=frozenset(),
                       eos_token_ids=frozenset()), width

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

    def take(self, deltas: Iterable[TokenDelta]) -> tuple[list[TokenDelta], list[str], list[Branch]]:
        """Sort deltas of the scheduler.

        Returns:
            Those for outside, requests for the scheduler to end, and then tokens with which others go on.
        """
        outside: list[TokenDelta] = []
        gone: list[str] = []
        branches: list[Branch] = []
        for delta in deltas:
            running = self._running.get(self._owners.get(delta.request_id, ""))
            if running is None:
                if _INSIDE not in delta.request_id:
                    outside.append(delta)
            elif delta.finish_reason == "error":
                outside += [delta._replace(request_id=choice, token_ids=(), logprobs=()) for choice in running.choices
                            if choice not in running.aborted]
                gone += self._forget(running)
            else:
                running.found[delta.request_id] = delta.logprobs[0]
                running.first = running.first or delta
                if len(running.found) < len(running.requests):
                    continue
                running.search.advance([running.found.pop(request_id) for request_id in running.requests])
                if running.search.beams:
                    branches += self._branch(running, gone)
                else:
                    outside += _results(running)
                    gone += self._forget(running)
        return outside, gone, branches

    def _branch(self, running: _Running, gone: list[str]) -> list[Branch]:
        """How the requests go on as the search's beams; those without a beam are added to `gone`."""
        before, unused = running.requests, set(running.requests)
        branches = []
        for beam in running.search.beams:
            parent = before[beam.parent]
            child = parent if parent in unused else self._new_request(running)
            unused.discard(parent)
            branches.append(Branch(parent, child, beam.token_ids[-1]))
        running.requests = [branch.child for branch in branches]
        for request_id in before:
            if request_id in unused:
                del self._owners[request_id]
                gone.append(request_id)
        return branches

    def _new_request(self, running: _Running) -> str:
        request_id = f"{running.choices[0]}{_INSIDE}{running.num_requests}"
        running.num_requests += 1
        self._owners[request_id] = running.choices[0]
        return request_id

    def _forget(self, running: _Running) -> list[str]:
        for request_id in (*running.requests, *running.choices):
            self._owners.pop(request_id, None)
        del self._running[running.choices[0]]
        return running.requests


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
