"""Beam search as in transformers, over requests that fork.

Each beam is a scheduler request (`jaxpaged.scheduling.families`). It returns the log probabilities of its best
continuations and is paused until the search has chosen among those of all beams. Results are returned at the end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxpaged.core.messages import EngineRequest, TokenDelta, TokenLogprobs
from jaxpaged.core.sampling_params import SamplingParams, num_beam_candidates
from jaxpaged.scheduling.families import Branch

_BEAM = "\0beam "  # in the ids of beams, and in no id of a user's


@dataclass(frozen=True, slots=True)
class Beam:
    """Generated tokens, the sum of their log probabilities, each one's own, and the index of the beam it continues."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    parent: int = 0


@dataclass(slots=True)
class BeamSearch:
    """The beams of one request.

    A beam that ends among the best `width` continuations is a result, with its score divided by
    length ** length_penalty; the best `width` results are kept. The search ends at max_tokens, or once there are
    `width` results and no beam can still beat the worst of them: judged by its present length, or by the maximum
    length if `early_stopping` is "never". If `early_stopping` is True, it ends with that many results.
    """

    request: EngineRequest
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    results: list[tuple[float, Beam]] = field(default_factory=list)

    @property
    def width(self) -> int:
        return self.request.params.best_of or self.request.params.n

    def advance(self, candidates: Sequence[TokenLogprobs]) -> None:
        """Advance by one token, given the best continuations of each beam; no beam is left at the end."""
        params, limit, stop = self.request.params, self.request.max_tokens, self.request.stop_token_ids
        length = len(self.beams[0].token_ids) + 1
        continuations = [
            Beam((*beam.token_ids, token), beam.score + logprob,
                 (*beam.logprobs, TokenLogprobs(logprob, rank, logprobs.top[: params.logprobs or 0])), parent)
            for parent, (beam, logprobs) in enumerate(zip(self.beams, candidates, strict=True))
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
class _ActiveSearch:
    """A search with the ids of its choices and of its beams' requests, and the candidates of the next step so far."""

    search: BeamSearch
    choices: list[str]
    aborted: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    num_requests: int = 0
    candidates: dict[str, TokenLogprobs] = field(default_factory=dict)
    first: TokenDelta | None = None


class BeamSearches:
    """All searches of an engine. Users see a request for each choice, the scheduler one for each beam."""

    def __init__(self) -> None:
        self._searches: dict[str, _ActiveSearch] = {}  # by the id of the first choice
        self._first_choices: dict[str, str] = {}  # by the ids of choices and beams

    def __bool__(self) -> bool:
        return bool(self._searches)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._first_choices

    def add_request(self, request: EngineRequest) -> tuple[EngineRequest, int] | None:
        """Begin a search with its first choice, or add another choice to it.

        Returns:
            For a new search, the request of the first beam and the maximum number of beams, for the scheduler.
        """
        if request.fork_of is not None:
            active = self._searches.get(request.fork_of)
            if active is not None:
                active.choices.append(request.request_id)
                self._first_choices[request.request_id] = request.fork_of
            return None
        active = _ActiveSearch(BeamSearch(request), [request.request_id])
        self._searches[request.request_id] = active
        self._first_choices[request.request_id] = request.request_id
        width = active.search.width
        params = SamplingParams(temperature=0, logprobs=num_beam_candidates(width, len(request.stop_token_ids)))
        active.requests.append(self._new_request(active))
        return replace(request, request_id=active.requests[0], params=params, seed=0, stop_token_ids=frozenset(),
                       eos_token_ids=frozenset()), width

    def abort(self, request_ids: Iterable[str]) -> tuple[list[TokenDelta], list[str]]:
        """End the choices with these ids; a search without choices ends.

        Returns:
            The last deltas of the choices, and the beams for the scheduler to abort.
        """
        deltas, beams = [], []
        for request_id in dict.fromkeys(request_ids):
            active = self._searches.get(self._first_choices.get(request_id, ""))
            if active is not None and request_id in active.choices and request_id not in active.aborted:
                active.aborted.add(request_id)
                deltas.append(TokenDelta(request_id, (), "abort"))
                if len(active.aborted) == len(active.choices):
                    beams += self._end_search(active)
        return deltas, beams

    def process_deltas(self, deltas: Iterable[TokenDelta]) -> tuple[list[TokenDelta], list[str], list[Branch]]:
        """Advance the searches by the scheduler's deltas.

        Returns:
            Deltas for users, beams for the scheduler to abort, and then the branches to resume with.
        """
        outputs: list[TokenDelta] = []
        ended: list[str] = []
        branches: list[Branch] = []
        for delta in deltas:
            active = self._searches.get(self._first_choices.get(delta.request_id, ""))
            if active is None:
                if _BEAM not in delta.request_id:
                    outputs.append(delta)
            elif delta.finish_reason == "error":
                outputs += [delta._replace(request_id=choice, token_ids=(), logprobs=()) for choice in active.choices
                            if choice not in active.aborted]
                ended += self._end_search(active)
            else:
                active.candidates[delta.request_id] = delta.logprobs[0]
                active.first = active.first or delta
                if len(active.candidates) < len(active.requests):
                    continue
                active.search.advance([active.candidates.pop(request_id) for request_id in active.requests])
                if active.search.beams:
                    branches += self._branch(active, ended)
                else:
                    outputs += _results(active)
                    ended += self._end_search(active)
        return outputs, ended, branches

    def _branch(self, active: _ActiveSearch, ended: list[str]) -> list[Branch]:
        """The branches that continue the search's beams; requests without a beam are added to `ended`."""
        before, unused = active.requests, set(active.requests)
        branches = []
        for beam in active.search.beams:
            parent = before[beam.parent]
            child = parent if parent in unused else self._new_request(active)
            unused.discard(parent)
            branches.append(Branch(parent, child, beam.token_ids[-1]))
        active.requests = [branch.child for branch in branches]
        for request_id in before:
            if request_id in unused:
                del self._first_choices[request_id]
                ended.append(request_id)
        return branches

    def _new_request(self, active: _ActiveSearch) -> str:
        request_id = f"{active.choices[0]}{_BEAM}{active.num_requests}"
        active.num_requests += 1
        self._first_choices[request_id] = active.choices[0]
        return request_id

    def _end_search(self, active: _ActiveSearch) -> list[str]:
        for request_id in (*active.requests, *active.choices):
            self._first_choices.pop(request_id, None)
        del self._searches[active.choices[0]]
        return active.requests


def _results(active: _ActiveSearch) -> list[TokenDelta]:
    request, first = active.search.request, active.first
    deltas = []
    assert first is not None
    for choice, (_, beam) in zip(active.choices, active.search.results, strict=False):
        if choice in active.aborted:
            continue
        last = beam.token_ids[-1]
        stopped = last in request.stop_token_ids
        deltas.append(TokenDelta(
            choice, beam.token_ids, "stop" if stopped else "length",
            last if stopped and last not in request.eos_token_ids else None, first.num_cached_tokens,
            scheduled_time=first.scheduled_time,
            logprobs=beam.logprobs if request.params.logprobs is not None else ()))
    return deltas
