"""The real scheduler and block pool against a naive device, which executes every chunk token by token.

The device keeps with each token a digest of all tokens before it, so that each token can be seen to attend to exactly
its own past, whoever has computed that: a wrong id, position, block or slot shows up where it happens. What a request
must return in the end is computed without any of it.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxpaged.core.kv_groups import NULL_BLOCK, KVGroup, max_tokens
from jaxpaged.core.messages import EngineRequest, TokenDelta
from jaxpaged.core.outputs import FinishReason
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.execution.step_shape import step_sizes
from jaxpaged.scheduling.block_pool import BlockPool
from jaxpaged.scheduling.families import Branch
from jaxpaged.scheduling.host_tier import HostTier
from jaxpaged.scheduling.policy import POLICIES
from jaxpaged.scheduling.request import Request, RequestStatus
from jaxpaged.scheduling.scheduler import Scheduler
from jaxpaged.scheduling.scheduler_output import (
    FAILED_TOKEN,
    REJECTED_TOKEN,
    ScheduledChunk,
    SchedulerOutput,
    Transfers,
)
from jaxpaged.scheduling.state_blocks import StateBlocks

VOCAB = 16
EOS = 3

Model = Callable[[Sequence[int]], int]


def any_token(tokens: Sequence[int]) -> int:
    """The id that follows: anything, and now and then a failure; it depends on every token so far."""
    number = zlib.crc32(bytes(tokens))
    return FAILED_TOKEN if number % 61 == 0 else number // 61 % VOCAB


def plain_token(tokens: Sequence[int]) -> int:
    """The same without failures."""
    return zlib.crc32(bytes(tokens)) // 61 % VOCAB


@dataclass
class Ending:
    """What a request returned: its tokens, why it ended, and the delta's other fields."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    scheduled_times: int = 0


def next_token(model: Model, tokens: Sequence[int], choice: int) -> int:
    """Choices of one prompt differ from their first token on."""
    token = model(tokens)
    return token if token == FAILED_TOKEN else (token + choice) % VOCAB


def expected_ending(message: EngineRequest, model: Model) -> Ending:
    """A request alone, one token after another."""
    tokens = list(message.prompt_token_ids)
    out: list[int] = []
    while True:
        token = next_token(model, tokens, message.choice)
        if token == FAILED_TOKEN:
            return Ending(out, "error")
        tokens.append(token)
        out.append(token)
        if token in message.stop_token_ids:
            return Ending(out, "stop", None if token in message.eos_token_ids else token)
        if len(out) == message.max_tokens:
            return Ending(out, "length")


@dataclass
class Search:
    """A beam search under way: the names of its requests, in the order of its beams, and what each has sampled."""

    width: int
    names: list[str]
    sampled: dict[str, int] = field(default_factory=dict)
    beams: list[list[int]] | None = None  # without their last tokens; None once one has failed


def next_beams(beams: Sequence[Sequence[int]], tokens: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Beams (by index) and tokens that continue: the first in some order of all sequences, three after each beam."""
    found = sorted((zlib.crc32(bytes([*beam, other])), parent, other) for parent, beam in enumerate(beams)
                   for other in [(tokens[parent] + more) % VOCAB for more in range(3)])
    return [(parent, other) for _, parent, other in found[:width]]


def expected_beams(message: EngineRequest, width: int, model: Model) -> list[list[int]] | None:
    """The beams before the last token; None where one fails."""
    beams = [list(message.prompt_token_ids)]
    for length in range(message.max_tokens):
        tokens = [model(beam) for beam in beams]
        if FAILED_TOKEN in tokens:
            return None
        if length + 1 < message.max_tokens:
            beams = [[*beams[parent], token] for parent, token in next_beams(beams, tokens, width)]
    return beams


@dataclass(frozen=True)
class Cell:
    """The content of one KV slot: the token and all tokens before it, its request, and the time of writing."""

    tokens: tuple[int, ...]
    salt: str | None
    generation: int


class NaiveDevice:
    """Runs steps in the order of their dispatch."""

    def __init__(
        self, block_size: int, num_blocks: int, num_slots: int, model: Model, groups: Sequence[KVGroup]
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.model = model
        # Of each unit of a block; that of a group of states is apart.
        self.windows = [group.window for group in groups if not group.save_every for _ in range(group.width)]
        self.has_states = any(group.save_every for group in groups)
        self.state: list[Sequence[int]] = [()] * num_slots
        self.kv: dict[tuple[int, int], Cell] = {}
        self.table: list[list[dict[int, int]]] = [[{} for _ in self.windows] for _ in range(num_slots)]
        self.last_id = [0] * num_slots
        self.owner: list[EngineRequest | None] = [None] * num_slots
        self.generation = 0  # of the prefix cache
        self.admitted = [0] * num_slots
        self.inherited: dict[str, int] = {}  # by request that is forked from another, when that one was admitted
        self.num_computed = self.num_accepted = self.num_rejected = 0
        self.host: dict[int, list[list[Cell | None]]] = {}
        self.num_saved = self.num_loaded = 0

    def run(self, step: SchedulerOutput) -> list[int]:
        sampled = []
        seen: list[int] = []
        before = step.chunks[0]  # a chunk without tokens is another choice of the one before it
        self._move(step.transfers)
        for chunk in step.chunks:
            assert chunk.num_tokens >= 0
            assert len(chunk.token_ids) in (chunk.num_tokens, max(0, chunk.num_tokens - 1))
            if chunk.new:
                assert bool(chunk.table) == (chunk.start > 0 or self.has_states)
                self.owner[chunk.slot] = chunk.new.message
                self.admitted[chunk.slot] = self.inherited.pop(chunk.request_id, self.generation) \
                    if chunk.num_tokens else self.admitted[before.slot]
            if chunk.table:
                assert len(chunk.table) == len(self.windows) + self.has_states
                self.table[chunk.slot] = [dict(enumerate(units)) for units in chunk.table[: len(self.windows)]]
                self.state[chunk.slot] = chunk.table[-1] if self.has_states else ()
            message = self._message(chunk)
            assert chunk.num_samples <= max(chunk.num_tokens, 1)
            assert len(chunk.blocks) in (0, len(self.windows))
            blocks = iter(list(zip(*chunk.blocks, strict=True)))
            for index in range(chunk.num_tokens):
                known = index < len(chunk.token_ids)
                token = chunk.token_ids[index] if known else self.last_id[chunk.slot]
                position = chunk.start + index
                if position % self.block_size == 0:
                    for table, unit in zip(self.table[chunk.slot], next(blocks), strict=True):
                        table[position // self.block_size] = unit
                seen = self._read(chunk, position)
                if index == 0 and position:
                    self._check_state(chunk, seen)
                self._write(chunk, position, token, seen)
                seen.append(token)
                self.num_computed += 1
            assert next(blocks, None) is None, "a block too many"
            for unit in self.state[chunk.slot] if chunk.num_tokens else ():
                assert 0 < unit < self.num_blocks
                self.kv[unit, 0] = Cell(tuple(seen), message.cache_salt, self.generation)
            before = chunk if chunk.num_tokens else before
            if chunk.num_samples:
                assert len(seen) == chunk.start + chunk.num_tokens, "it samples after another request's row"
                sampled += self._sample(chunk, seen, message.choice)
        return sampled

    def _sample(self, chunk: ScheduledChunk, seen: Sequence[int], choice: int) -> list[int]:
        """The tokens after the chunk's last ones; after a proposed token that is not the one before it, rejections."""
        tokens: list[int] = []
        for end in range(len(seen) - chunk.num_samples + 1, len(seen) + 1):
            if tokens and tokens[-1] != seen[end - 1]:
                break
            tokens.append(next_token(self.model, seen[:end], choice))
        self.last_id[chunk.slot] = max(tokens[-1], 0)
        rejected = chunk.num_samples - len(tokens)
        self.num_accepted += len(tokens) - 1
        self.num_rejected += rejected
        return tokens + [REJECTED_TOKEN] * rejected

    def _check_state(self, chunk: ScheduledChunk, seen: Sequence[int]) -> None:
        """Every unit of the slot's state must have seen exactly these tokens."""
        for unit in self.state[chunk.slot]:
            cell = self.kv[unit, 0]
            assert cell.tokens == tuple(seen), f"the state at position {chunk.start} has seen other tokens"
            assert cell.salt == self._message(chunk).cache_salt
            assert cell.generation >= self.admitted[chunk.slot], "a state from before the last reset was shared"

    def _message(self, chunk: ScheduledChunk) -> EngineRequest:
        message = self.owner[chunk.slot]
        assert message is not None and message.request_id == chunk.request_id, \
            "the slot holds the sampling parameters of another request"
        return message

    def _move(self, transfers: Transfers) -> None:
        for save in transfers.saves:
            assert save.segment not in self.host and NULL_BLOCK not in save.blocks
            self.host[save.segment] = [self._block(block) for block in save.blocks]
            self.num_saved += len(save.blocks)
        for source, target in transfers.copies:
            self._fill(target, self._block(source))
        for load in transfers.loads:
            segment = self.host[load.segment]
            assert len(segment) == len(load.blocks)
            for content, block in zip(segment, load.blocks, strict=True):
                if block != NULL_BLOCK:
                    self._fill(block, content)
                    self.num_loaded += 1
        for number in transfers.drops:
            del self.host[number]

    def _block(self, block: int) -> list[Cell | None]:
        return [self.kv.get((block, offset)) for offset in range(self.block_size)]

    def _fill(self, block: int, content: Sequence[Cell | None]) -> None:
        for offset, cell in enumerate(content):
            self.kv.pop((block, offset), None)
            if cell is not None:
                self.kv[block, offset] = cell

    def _write(self, chunk: ScheduledChunk, position: int, token: int, seen: Sequence[int]) -> None:
        units = [table[position // self.block_size] for table in self.table[chunk.slot]]
        assert len(set(units)) == len(units), "two groups write to one unit"
        for unit in units:
            assert unit != NULL_BLOCK and 0 < unit < self.num_blocks
            self.kv[unit, position % self.block_size] = Cell((*seen, token), self._message(chunk).cache_salt,
                                                             self.generation)

    def _read(self, chunk: ScheduledChunk, end: int) -> list[int]:
        """The tokens before position `end`, read as the layers of each group read them."""
        tokens: tuple[int, ...] = ()
        for table, window in zip(self.table[chunk.slot], self.windows, strict=True):
            for position in range(end - 1, -1 if window is None else max(-1, end - window), -1):
                cell = self.kv[table[position // self.block_size], position % self.block_size]
                tokens = tokens or cell.tokens
                assert cell.tokens == tokens[: position + 1], f"position {position} is of another sequence"
                assert cell.salt == self._message(chunk).cache_salt
                assert cell.generation >= self.admitted[chunk.slot], "content from before the last reset was shared"
        assert len(tokens) == end
        return list(tokens)


class Harness:
    """The engine's loop without an engine: schedules step n + 1 before the ids of step n are taken in."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, sizes: Sequence[int] | None = None,
        model: Model = any_token, prefix_caching: bool = True, host_blocks: int = 0, swap: bool = False,
        policy: str = "fcfs", groups: Sequence[KVGroup] = (KVGroup(),), proposed: int = 0,
    ) -> None:
        self.proposed = proposed  # at most so many tokens for each request
        self.groups = tuple(groups)
        self.host_blocks = host_blocks
        self.block_size, self.budget, self.slots, self.model = block_size, budget, max_num_seqs, model
        self.sizes = tuple(sizes) if sizes is not None else step_sizes(budget, "cpu")
        self.pool = BlockPool(num_blocks, [group.width for group in groups])
        self.policy_name, self.policy = policy, POLICIES[policy]()
        self.scheduler = Scheduler(self.pool, block_size=block_size, groups=groups, max_num_seqs=max_num_seqs,
                                   policy=self.policy, max_num_batched_tokens=budget, step_sizes=self.sizes,
                                   prefix_caching=prefix_caching, swap=swap,
                                   host=HostTier(host_blocks, (4, 2, 1)) if host_blocks else None)
        self.device = NaiveDevice(block_size, num_blocks, max_num_seqs, model, groups)
        self.in_flight: tuple[SchedulerOutput, list[int]] | None = None
        self.messages: dict[str, EngineRequest] = {}
        self.endings: dict[str, Ending] = {}
        self.requests: dict[str, Request] = {}  # those that have had a chunk, in order of arrival
        self.live: list[str] = []  # in order of arrival
        self.aborted: set[str] = set()
        self.searches: dict[str, Search] = {}  # by each of its requests
        self.steps = 0
        self.bound = 0  # steps that all requests so far may take together

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that fits."""
        return max_tokens(self.groups, self.pool.num_usable, self.block_size, self.budget)

    def add_choices(self, n: int, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[str]:
        first = self.add(prompt, max_tokens, **more)
        return [first, *(self.add(prompt, max_tokens, choice=choice, fork_of=first, **more) for choice in range(1, n))]

    def add(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), **more: Any) -> str:
        message = self._message(prompt, max_tokens, stop_token_ids=frozenset(stop), **more)
        self.bound += len(prompt) + max_tokens + 3
        self.scheduler.add_request(message)
        return message.request_id

    def add_search(self, width: int, prompt: Sequence[int], max_tokens: int, **more: Any) -> Search:
        message = self._message(prompt, max_tokens, **more)
        # Where only one of them has room, they compute everything anew in turns.
        self.bound += width * max_tokens * (len(prompt) + max_tokens + 3)
        search = Search(width, [message.request_id], beams=[list(prompt)])
        self.searches[message.request_id] = search
        self.scheduler.add_request(message, branches=width)
        return search

    def _message(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> EngineRequest:
        name = f"r{len(self.messages)}"
        message = EngineRequest(name, tuple(prompt), SamplingParams(), max_tokens, eos_token_ids=frozenset([EOS]),
                                arrival_time=float(self.steps), **more)
        self.messages[name], self.endings[name] = message, Ending()
        self.live.append(name)
        return message

    def abort(self, names: Sequence[str]) -> None:
        names = [other for name in names
                 for other in (self.searches[name].names if name in self.searches else [name])]
        live = {name for name in names if name in self.live}
        self.aborted |= live
        deltas = self.scheduler.abort(names)
        assert {delta.request_id for delta in deltas} == live and len(deltas) == len(live)
        self._process(deltas)
        self.check()

    def step(self) -> SchedulerOutput:
        if self.proposed:
            if self.steps % 4:  # tokens proposed after others that are in flight are ignored
                self.take_in()
            self.propose(self.running(), self.proposed)
        running = self.running()
        before = {name: request.num_preemptions for name, request in self.requests.items()}
        step = self.scheduler.schedule(float(self.steps))
        self.steps += bool(step.chunks or self.in_flight)
        self._check_step(step)
        self._check_preemption(running, before)
        sampled = self.device.run(step) if step.chunks else None
        assert sampled is not None or self.in_flight is not None or not self.live, "nothing runs and nothing will"
        if self.in_flight is not None:
            self._process(self.scheduler.update_from_output(*self.in_flight))
        self.in_flight = None if sampled is None else (step, sampled)
        self.check()
        return step

    def take_in(self) -> None:
        """Process what the step in flight has sampled, if there is one."""
        if self.in_flight is not None:
            self._process(self.scheduler.update_from_output(*self.in_flight))
            self.in_flight = None
            self.check()
            for name in self.running():
                self._check_blocks(name)

    def propose(self, names: Sequence[str], count: int) -> None:
        """Propose so many tokens for the next step, right ones and wrong ones."""
        for name in names:
            tokens, proposed = list(self.requests[name].token_ids), list[int]()
            for _ in range(count):
                wrong = zlib.crc32(bytes(tokens)) % 4 == 0
                proposed.append((max(0, next_token(self.model, tokens, self.messages[name].choice)) + wrong) % VOCAB)
                tokens.append(proposed[-1])
            self.scheduler.propose(name, proposed)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.device.generation += 1
        self.check()

    def drain(self) -> None:
        """Run until everything has ended, and compare all of it."""
        while self.live or self.in_flight:
            self.step()
            assert self.steps <= self.bound + len(self.messages) + 2, "too many steps"
        assert not self.scheduler.has_unfinished()
        assert self.pool.num_free == self.pool.num_usable, "blocks are lost"
        assert self.scheduler.kv_slots() == (0, 0)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for name, message in self.messages.items():
            if name not in self.searches:
                self._check_ending(self.endings[name], expected_ending(message, self.model), name in self.aborted)
            elif not self.aborted.intersection(self.searches[name].names):
                assert self.searches[name].beams == expected_beams(message, self.searches[name].width, self.model)

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert sum(map(len, self.device.host.values())) <= self.host_blocks
        held, empty = self.scheduler.kv_slots()
        assert 0 <= empty <= held == self.pool.num_used * self.block_size
        for name in self.live:
            tables = self.requests[name].block_tables if name in self.requests else []
            for group, table in zip(self.groups, tables, strict=False):
                assert sum(block != NULL_BLOCK for block in table) <= group.max_blocks(self.block_size, self.budget)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.live_ids() == self.live

    def running(self) -> list[str]:
        """Running requests that have had a chunk; the last one is preempted first."""
        names = [name for name in self.live if self._status(name) is RequestStatus.RUNNING]
        return sorted(names, key=lambda name: self.policy.running_key(self.requests[name]))

    def _status(self, name: str) -> RequestStatus:
        return self.requests[name].status if name in self.requests else RequestStatus.WAITING

    def _check_windows(self, chunk: ScheduledChunk) -> None:
        """No block is kept that none of the chunk's tokens sees."""
        groups = [group for group in self.groups if not group.save_every]
        for group, table in zip(groups, self.requests[chunk.request_id].block_tables, strict=True):
            if group.window is not None and chunk.num_tokens:
                unseen = table[: max(chunk.start - group.window + 1, 0) // self.block_size]
                assert set(unseen) <= {NULL_BLOCK}

    def _check_step(self, step: SchedulerOutput) -> None:
        chunks = step.chunks
        live = self.scheduler._queues.live
        self.requests |= {chunk.request_id: live[chunk.request_id] for chunk in chunks}
        assert step.num_tokens == sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert step.num_tokens <= max(self.sizes), "no step size holds this step"
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        names = [chunk.request_id for chunk in chunks]
        rows = [min(size, self.slots) for size in self.sizes if size >= step.num_tokens]
        assert step.num_sampled <= max(rows), "more samples than a step has rows for"
        for chunk in chunks:
            self._check_blocks(chunk.request_id)
            self._check_windows(chunk)
        running = self.running()
        if running and running[0] not in names:
            first = self.requests[running[0]]
            resumed = not first.num_proposed if first.family is None else not (first.paused or first.num_pending)
            assert not resumed or first.num_output_tokens == first.message.max_tokens, "the first request has to wait"

    def _check_blocks(self, name: str) -> None:
        request = self.requests[name]
        assert request.num_blocks <= -(-request.num_tokens // self.block_size), "more blocks than it needs"

    def _check_preemption(self, running: list[str], before: dict[str, int]) -> None:
        preempted = [name for name in self.live
                     if name in before and self.requests[name].num_preemptions > before[name]]
        gone = [name for name in running if name in preempted]  # also those that are admitted again at once
        stayed = [name for name in running if self._status(name) is RequestStatus.RUNNING and name not in gone]
        # Some may have freed their slot for another beam of their search.
        assert [*stayed, *gone] == [name for name in running if name in stayed or name in preempted], \
            "an older request was preempted before a newer one"
        if gone and self.policy_name != "priority":
            assert [name for name in running if name not in gone], "all were preempted"

    def _process(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.request_id in self.searches:
                self._process_beam(self.searches[delta.request_id], delta)
                continue
            ending = self.endings[delta.request_id]
            assert ending.finish_reason is None, "output of a request that has ended"
            ending.token_ids += delta.token_ids
            ending.finish_reason = delta.finish_reason
            ending.stop_reason, ending.error = delta.stop_reason, delta.error
            ending.scheduled_times += delta.scheduled_time is not None
            self._check_cached(delta)
            if delta.finish_reason is not None:
                self.live.remove(delta.request_id)

    def _process_beam(self, search: Search, delta: TokenDelta) -> None:
        self._check_cached(delta)
        if delta.finish_reason is not None:
            self.live.remove(delta.request_id)
            if delta.finish_reason == "error":
                search.beams = None
                self._end(search.names)
            return
        if delta.request_id not in self.live:
            return
        search.sampled[delta.request_id] = delta.token_ids[0]
        if search.beams is None or len(search.sampled) < len(search.names):
            return
        message, tokens = self.messages[delta.request_id], [search.sampled.pop(name) for name in search.names]
        if len(search.beams[0]) - len(message.prompt_token_ids) + 1 == message.max_tokens:
            self._end(search.names)
            return
        before = search.names
        branches: list[Branch] = []
        chosen = next_beams(search.beams, tokens, search.width)
        self._end([name for index, name in enumerate(before) if index not in [parent for parent, _ in chosen]])
        for parent, token in chosen:
            child = before[parent]
            if child in [branch.child for branch in branches]:
                child = self._message(message.prompt_token_ids, message.max_tokens).request_id
                self.searches[child] = search
                request = self.requests[before[parent]]
                if request.slot >= 0:
                    self.device.inherited[child] = self.device.admitted[request.slot]
            branches.append(Branch(before[parent], child, token))
        search.beams = [[*search.beams[parent], token] for parent, token in chosen]
        search.names = [branch.child for branch in branches]
        self.scheduler.resume(branches)

    def _end(self, names: Sequence[str]) -> None:
        for delta in self.scheduler.abort(names):
            self.live.remove(delta.request_id)

    def _check_cached(self, delta: TokenDelta) -> None:
        cached, message = delta.num_cached_tokens, self.messages[delta.request_id]
        assert cached % self.block_size == 0 and 0 <= cached < len(message.prompt_token_ids)
        assert not cached or not message.skip_prefix_read

    def _check_ending(self, found: Ending, wanted: Ending, aborted: bool) -> None:
        if aborted:
            assert found.finish_reason == "abort"
            assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
            return
        assert (found.token_ids, found.finish_reason, found.stop_reason) == (
            wanted.token_ids, wanted.finish_reason, wanted.stop_reason)
        assert (found.error is not None) == (wanted.finish_reason == "error")
        assert found.scheduled_times == (len(found.token_ids) > 0), "scheduled_time is set once, with the first token"


# One to three groups, of all tokens or of windows, with blocks of one unit or several; and perhaps one of states.
TOKEN_GROUPS = st.one_of(
    st.just((KVGroup(),)),
    st.builds(lambda window: (KVGroup(window),), st.integers(2, 40)),
    st.builds(lambda full, windows: (*full, *(KVGroup(window, width) for window, width in sorted(windows))),
              st.sampled_from([(), (KVGroup(),), (KVGroup(None, 2),)]),
              st.lists(st.tuples(st.integers(2, 40), st.integers(1, 3)), min_size=1, max_size=2,
                       unique_by=lambda item: item[0])),
)
STATES = st.one_of(st.just(()), st.builds(lambda width, every: (KVGroup(width=width, save_every=every),),
                                          st.integers(1, 5), st.integers(1, 4)))
KV_GROUPS = st.builds(lambda tokens, states: tokens + states, TOKEN_GROUPS, STATES)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts and steps at random over pools, slots and budgets of every size down to the minimum."""

    @initialize(
        num_blocks=st.integers(2, 14), block_size=st.sampled_from([1, 2, 4, 16]), max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 3, 7, 16, 33, 80]), ladder=st.sampled_from(["cpu", "cuda", "sparse", "none"]),
        prefix_caching=st.sampled_from([True, True, False]), host_blocks=st.sampled_from([0, 0, 1, 5, 40]),
        swap=st.booleans(), policy=st.sampled_from(["fcfs", "fcfs", "priority", "predicted"]), groups=KV_GROUPS,
        proposed=st.sampled_from([0, 0, 1, 3, 9]),
    )
    def begin(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, ladder: str,
              prefix_caching: bool, host_blocks: int, swap: bool, policy: str, groups: Sequence[KVGroup],
              proposed: int) -> None:
        if len(groups) > 1:  # room for a request of some blocks
            num_blocks *= sum(group.width for group in groups)
        sizes = {"sparse": tuple(sorted({1, max(1, budget // 3), budget})), "none": (budget,)}
        self.harness = Harness(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, budget=budget,
                               sizes=sizes.get(ladder) or step_sizes(budget, ladder), prefix_caching=prefix_caching,
                               host_blocks=host_blocks, swap=swap, policy=policy, groups=groups,
                               proposed=0 if groups[-1].save_every else proposed)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        """New tokens, often after a prefix of an earlier text."""
        harness = self.harness
        room = min(harness.capacity, 160)
        if room < 2:
            return
        length = data.draw(st.integers(1, room - 1), "prompt length")
        max_tokens = data.draw(st.integers(1, min(room - length, 20)), "max_tokens")
        texts = [[*message.prompt_token_ids, *harness.endings[name].token_ids]
                 for name, message in harness.messages.items()]
        prompt = data.draw(st.sampled_from([[], *texts[-4:]]), "text")[: data.draw(st.integers(0, length), "shared")]
        rest = length - len(prompt)
        prompt += [token % VOCAB for token in data.draw(st.binary(min_size=rest, max_size=rest), "prompt")]
        stop = data.draw(st.sampled_from([(), (EOS,), (EOS, 5)]), "stop")
        salt = data.draw(st.sampled_from([None, None, "a", "b"]), "salt")
        more: dict[str, Any] = {"cache_salt": salt, "skip_prefix_read": data.draw(st.integers(0, 9)) == 9,
                                "priority": data.draw(st.integers(0, 2), "priority")}
        n = data.draw(st.sampled_from([1, 1, 2, 4]), "n")
        if data.draw(st.integers(0, 3), "search") == 3:
            harness.add_search(n, prompt, min(max_tokens, 6), **more)
        else:
            harness.add_choices(n, prompt, max_tokens, stop=stop, **more)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.reset_prefix_cache()

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.messages)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = st.sampled_from([*self.harness.messages, "unknown"])
        self.harness.abort(data.draw(st.lists(names, min_size=1, max_size=3), "aborted"))

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=25)


@pytest.mark.slow
def test_long_random_runs() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=600, stateful_step_count=60))


def prompts(count: int, length: int) -> Iterator[list[int]]:
    for number in range(count):
        yield [(number + position) % VOCAB for position in range(length)]


def test_proposed_tokens_save_steps_and_rejected_ones_cost_none() -> None:
    plain, proposing = (Harness(num_blocks=256, block_size=1, max_num_seqs=8, budget=32, model=plain_token,
                                proposed=proposed) for proposed in (0, 3))
    for harness in (plain, proposing):
        for prompt in prompts(2, 10):
            harness.add(prompt, 40)
        harness.drain()
    assert proposing.device.num_accepted > 10 and proposing.device.num_rejected > 10
    assert proposing.steps < 0.8 * plain.steps


def test_no_token_is_proposed_to_a_prompt_that_forks_wait_for() -> None:
    """The leader's second chunk has one token, as a decode has, and its forks continue after that chunk's last row."""
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=8, budget=8, model=plain_token, proposed=3)
    harness.add_choices(2, list(range(9)), 10)
    harness.drain()
    assert harness.device.num_accepted > 0


@pytest.mark.parametrize("num_blocks", [23, 29])
def test_a_request_preempted_while_its_proposed_tokens_are_computed_loses_nothing(num_blocks: int) -> None:
    """The older request takes its blocks for the next token, in a step that is planned before their rows are read."""
    harness = Harness(num_blocks=num_blocks, block_size=1, max_num_seqs=8, budget=32, model=plain_token)
    _, newer = (harness.add(prompt, 14) for prompt in prompts(2, 6))
    preempted = False
    while harness.live:
        harness.take_in()
        if newer in harness.running():
            harness.propose([newer], 3)
        harness.step()
        proposed, before = harness.requests[newer].num_proposed, harness.requests[newer].num_preemptions
        harness.step()
        preempted |= proposed > 0 and harness.requests[newer].num_preemptions > before
    assert preempted
    harness.drain()


def test_a_beam_is_preempted_for_a_block_that_a_paused_one_of_its_search_holds() -> None:
    """No other request runs: the paused beam frees its blocks in the same call, or nobody would run ever after."""
    harness = Harness(num_blocks=6, block_size=4, max_num_seqs=2, budget=1, model=plain_token, proposed=1)
    harness.add_search(2, [0] * 11, 3)
    harness.drain()
    assert harness.scheduler.num_preemptions > 0


@pytest.mark.parametrize("budget", [1, 7, 33, 64])
def test_many_requests_in_the_smallest_pool(budget: int) -> None:
    """Eight requests that each need the whole pool: one after another, all in full."""
    harness = Harness(num_blocks=5, block_size=4, max_num_seqs=4, budget=budget, model=plain_token)
    for prompt in prompts(8, 10):
        harness.add(prompt, 6)
    harness.drain()


def test_half_done_prefills_do_not_block_one_another() -> None:
    """Two prompts of three blocks each in a pool of four: both would be stuck halfway if both were admitted."""
    harness = Harness(num_blocks=5, block_size=4, max_num_seqs=4, budget=4, model=plain_token)
    first, second = (harness.add(prompt, 2) for prompt in prompts(2, 12))
    harness.step()
    assert harness.scheduler.num_running == 1
    harness.drain()
    assert harness.scheduler.num_preemptions == 0
    assert harness.endings[first].finish_reason == harness.endings[second].finish_reason == "length"


def test_no_request_is_admitted_only_to_be_preempted_for_the_next_block_of_an_older_one() -> None:
    harness = Harness(num_blocks=5, block_size=4, max_num_seqs=2, budget=32, model=plain_token)
    for length in (4, 12):
        harness.add([length] * length, 4)
    harness.drain()
    assert harness.scheduler.num_preemptions == 0


def test_the_newest_is_preempted_first_and_runs_again() -> None:
    harness = Harness(num_blocks=10, block_size=2, max_num_seqs=4, budget=16, model=plain_token)
    names = [harness.add(prompt, 9) for prompt in prompts(3, 3)]
    harness.drain()
    preemptions = [harness.requests[name].num_preemptions for name in names]
    assert preemptions[0] == 0 < preemptions[2] and preemptions == sorted(preemptions)
    assert sum(preemptions) == harness.scheduler.num_preemptions


def test_a_request_in_mid_decode_that_is_preempted_waits_for_its_last_id() -> None:
    """Its sampled token is in flight when it loses its blocks: it must not run again before that id is known."""
    harness = Harness(num_blocks=6, block_size=2, max_num_seqs=2, budget=8, model=plain_token)
    old, new = (harness.add(prompt, 6) for prompt in prompts(2, 2))
    while not harness.requests.get(new) or not harness.requests[new].num_preemptions:
        harness.step()
        assert harness.live, "no request was preempted"
    harness.drain()
    assert harness.endings[new].token_ids == expected_ending(harness.messages[new], plain_token).token_ids
    assert harness.requests[old].num_preemptions == 0


def test_a_step_is_one_ahead_and_its_row_of_a_stopped_request_is_ignored() -> None:
    """The device has computed a token more than the request wanted; it is not returned."""
    harness = Harness(num_blocks=9, block_size=4, max_num_seqs=2, budget=8, model=plain_token)
    prompt = [1, 2, 3]
    first = plain_token(prompt)
    name = harness.add(prompt, 10, stop=[first])
    steps = []
    while harness.live:
        steps.append(harness.step())
    assert [step.num_sampled for step in steps] == [1, 1]
    assert harness.endings[name].token_ids == [first]
    assert harness.pool.num_used == 0, "blocks are free as soon as the next step is on its way"
    harness.drain()


def test_the_last_token_by_length_is_not_computed_on() -> None:
    """Lengths are known ahead: no step has a row too many."""
    harness = Harness(num_blocks=9, block_size=4, max_num_seqs=2, budget=8, model=plain_token)
    harness.add([1, 2, 3], 4)
    tokens = 0
    while harness.live:
        tokens += harness.step().num_tokens
    assert tokens == 3 + 4 - 1


def test_an_end_id_at_the_limit_is_a_stop() -> None:
    harness = Harness(num_blocks=9, block_size=4, max_num_seqs=2, budget=8, model=lambda tokens: EOS)
    stopped = harness.add([1], 1, stop=[EOS])
    ignored = harness.add([1], 1)
    harness.drain()
    assert harness.endings[stopped] == Ending([EOS], "stop", None, None, 1)
    assert harness.endings[ignored] == Ending([EOS], "length", None, None, 1)


def test_a_stop_id_of_the_users_is_the_stop_reason() -> None:
    harness = Harness(num_blocks=9, block_size=4, max_num_seqs=2, budget=8, model=lambda tokens: 7)
    name = harness.add([1], 5, stop=[EOS, 7])
    harness.drain()
    assert harness.endings[name] == Ending([7], "stop", 7, None, 1)


def test_a_failed_row_ends_only_its_own_request() -> None:
    harness = Harness(num_blocks=9, block_size=4, max_num_seqs=3, budget=16,
                      model=lambda tokens: FAILED_TOKEN if tokens[0] == 9 and len(tokens) == 4 else 1)
    good, bad, other = harness.add([1, 2], 6), harness.add([9, 2], 6), harness.add([3], 6)
    harness.drain()
    assert harness.endings[bad].token_ids == [1, 1]
    assert "not finite" in str(harness.endings[bad].error)
    assert harness.endings[good].token_ids == harness.endings[other].token_ids == [1] * 6


def test_an_id_passed_twice_is_aborted_once() -> None:
    harness = Harness(num_blocks=9, block_size=4, max_num_seqs=1, budget=8)
    running, waiting = harness.add([1, 2], 4), harness.add([3], 4)
    harness.step()
    harness.abort([running, waiting, running, "unknown", waiting])
    harness.abort([running])
    assert not harness.live
    harness.drain()


def test_an_id_can_be_used_again_while_a_step_of_the_old_one_runs() -> None:
    pool = BlockPool(9)
    scheduler = Scheduler(pool, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    message = EngineRequest("same", (1, 2), SamplingParams(), 3)
    scheduler.add_request(message)
    running = scheduler.schedule()
    scheduler.abort(["same"])
    scheduler.add_request(message)
    again = scheduler.schedule()
    assert scheduler.update_from_output(running, [5]) == []
    [delta] = scheduler.update_from_output(again, [6])
    assert delta.token_ids == (6,) and delta.finish_reason is None
    scheduler.check_integrity()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("decodes", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("length", [2, 3, 10, 40])
def test_padding_never_keeps_a_prompt_waiting(platform: str, decodes: int, length: int) -> None:
    """Even where the running requests fill a step size exactly, and a few tokens more mean a much larger step."""
    harness = Harness(num_blocks=512, block_size=16, max_num_seqs=160, budget=256, model=plain_token,
                      sizes=step_sizes(256, platform))
    for prompt in prompts(decodes, 1):
        harness.add(prompt, 60)
    harness.step()
    name = harness.add([1] * length, 5)
    for _ in range(length + 1):
        harness.step()
    assert harness.endings[name].token_ids, f"no token after {length + 1} steps"


def test_prefill_is_cut_where_padding_would_cost_more() -> None:
    """130 tokens in a step of 256 take longer than 128 in a step of 128 and the rest later."""
    harness = Harness(num_blocks=64, block_size=16, max_num_seqs=4, budget=256, model=plain_token)
    harness.add([1] * 130, 1)
    assert [harness.step().num_tokens for _ in range(2)] == [128, 2]
    harness.drain()


def test_running_requests_are_served_before_a_long_prompt() -> None:
    """Streams receive token after token while a prompt is processed in chunks, and the chunks fill the budget."""
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=4, budget=16, model=plain_token)
    streams = [harness.add(prompt, 20) for prompt in prompts(2, 2)]
    for _ in range(2):
        harness.step()
    long = harness.add([1] * 100, 2)
    for _ in range(7):
        step = harness.step()
        by_name = {chunk.request_id: chunk.num_tokens for chunk in step.chunks}
        assert [by_name[name] for name in streams] == [1, 1]
        assert by_name[long] == 14
        assert step.kind == "mixed"
    harness.drain()


def test_kinds_of_steps() -> None:
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=4, budget=16, model=plain_token)
    harness.add([1, 2, 3], 3)
    assert [harness.step().kind for _ in range(2)] == ["prefill", "decode"]
    harness.add([1, 2], 3)
    assert harness.step().kind == "mixed"


def test_held_but_empty_slots_are_those_past_the_computed_tokens() -> None:
    harness = Harness(num_blocks=64, block_size=16, max_num_seqs=4, budget=64, model=plain_token)
    harness.add([1] * 18, 20)
    harness.add([2] * 14, 20)
    harness.step()
    assert harness.scheduler.kv_slots() == (48, 48 - 18 - 14)
    for _ in range(3):  # three more tokens each; the second request begins a block for the third
        harness.step()
    assert harness.scheduler.kv_slots() == (64, 64 - 21 - 17)


def test_a_request_that_can_never_fit_is_refused() -> None:
    harness = Harness(num_blocks=3, block_size=4, max_num_seqs=2, budget=8)
    harness.add([1] * 4, 4)
    with pytest.raises(AssertionError, match="more than the pool has"):
        harness.scheduler.add_request(EngineRequest("large", (1,) * 5, SamplingParams(), 4))
    harness.drain()


class SlidesTooFar(KVGroup):
    """Frees the first block that the next token still sees."""

    def first_needed(self, position: int, block_size: int) -> int:
        return KVGroup.first_needed(self, position, block_size) + (position > block_size)

    def prefix_blocks(self, num_blocks: int, block_size: int) -> int:
        return num_blocks - KVGroup.first_needed(self, num_blocks * block_size, block_size)


class TakesPrefixesWithoutWindow(KVGroup):
    """Takes prefixes that the other groups have, with one block of its own too few."""

    def prefix_blocks(self, num_blocks: int, block_size: int) -> int:
        return max(0, KVGroup.prefix_blocks(self, num_blocks, block_size) - 1)


@pytest.mark.parametrize(("fault", "groups"), [
    (SlidesTooFar, 1), (SlidesTooFar, 2), (TakesPrefixesWithoutWindow, 1), (TakesPrefixesWithoutWindow, 2)])
def test_faults_in_the_use_of_windows_are_caught(fault: type[KVGroup], groups: int) -> None:
    """Without them the same requests pass; with one, the naive device reads slots that were not written."""
    def serve(group: KVGroup) -> None:
        harness = Harness(num_blocks=60, block_size=4, max_num_seqs=2, budget=8, model=plain_token,
                          groups=(KVGroup(), group)[2 - groups:])
        prompt = [number % 7 for number in range(30)]
        for _ in range(2):
            harness.add(prompt, 12)
            harness.drain()

    serve(KVGroup(9))
    with pytest.raises((AssertionError, KeyError)):
        serve(fault(9))


@pytest.mark.parametrize("length", [300, 3000])
def test_a_long_prompt_holds_no_more_than_its_window_and_a_chunk(length: int) -> None:
    harness = Harness(num_blocks=40, block_size=4, max_num_seqs=1, budget=16, model=plain_token, groups=(KVGroup(32),))
    harness.add([number % 11 for number in range(length)], 20)
    most = 0
    while harness.live or harness.in_flight:
        harness.step()
        most = max(most, harness.pool.num_used)
    assert most == -(-(32 - 1 + 16) // 4)


def test_a_prefix_is_found_although_its_first_blocks_have_left_the_window() -> None:
    """The second request computes its last tokens alone."""
    harness = Harness(num_blocks=100, block_size=4, max_num_seqs=1, budget=16, model=plain_token,
                      groups=(KVGroup(), KVGroup(8, 2)))
    prompt = [number % 5 for number in range(100)]
    harness.add(prompt, 4)
    harness.drain()
    computed = harness.device.num_computed
    harness.add([*prompt, 1, 2, 3], 4)
    harness.drain()
    assert harness.device.num_computed - computed == 3 + 4 - 1


@pytest.mark.parametrize("evicted", [False, True])
def test_a_prefix_whose_window_is_gone_is_computed_again(evicted: bool) -> None:
    """The group that keeps everything still has all of it: the blocks that a window has left are evicted first."""
    harness = Harness(num_blocks=100, block_size=4, max_num_seqs=1, budget=16, model=plain_token,
                      groups=(KVGroup(), KVGroup(8, 2)))
    prompt = [number % 5 for number in range(100)]
    first = harness.add(prompt, 4)
    harness.drain()
    if evicted:
        harness.add([number % 7 + 6 for number in range(84)], 4)
        harness.drain()
    last_hash = harness.requests[first].block_hashes[47 // 4]
    assert harness.pool.get_cached_block(last_hash, 0) is not None
    assert (harness.pool.get_cached_block(last_hash, 1) is None) == evicted
    computed = harness.device.num_computed
    harness.add([*prompt[:48], 9, 9, 9], 4)
    harness.drain()
    assert harness.device.num_computed - computed == (0 if evicted else -48) + 48 + 3 + 4 - 1


STATE = KVGroup(width=3, save_every=2)


def serve_states(**more: Any) -> Harness:
    """Requests that share prefixes, choices, beams, and too few blocks."""
    harness = Harness(num_blocks=60, block_size=4, max_num_seqs=4, budget=16, model=plain_token,
                      groups=(KVGroup(), STATE), **more)
    prompt = [number % 7 for number in range(30)]
    for _ in range(2):
        harness.add([*prompt, 1, 2], 9)
        harness.add_choices(3, prompt, 9)
        harness.drain()
        harness.add_search(3, prompt[:17], 5)
        harness.add([*prompt, 1, 2, 9, 9, 9, 9], 9)
        harness.drain()
    return harness


def keeps_one_late(self: StateBlocks, request: Request) -> bool:
    """Keeps the state after one more token under the hash of the border."""
    computed = request.num_computed_tokens - 1
    if computed == request.state_kept_at or not self._is_border(request, computed) or computed < 1:
        return False
    request.state_kept_at = computed
    self._pool.cache_block(request.state_block, self._hash_block(request, computed // self._block_size - 1), self.group)
    return True


def shares_live_state(self: StateBlocks, request: Request) -> list[tuple[int, int]]:
    """Writes a state that a fork, or a later request, has as well."""
    return [] if request.state_block else own_state(self, request)


def copies_nothing(self: StateBlocks, request: Request) -> list[tuple[int, int]]:
    """Takes a block of its own, and leaves in it what was there."""
    own_state(self, request)
    return []


own_state = StateBlocks.own


@pytest.mark.parametrize("fault", [
    None, ("keep", keeps_one_late), ("own", shares_live_state), ("own", copies_nothing),
    ("chunk_limit", lambda self, request, count: count), ("keep", lambda self, request: False)],
    ids=["none", "kept one late", "shared while live", "not copied", "chunks not cut", "nothing kept"])
def test_faults_in_the_use_of_states_are_caught(fault: tuple[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the naive device, by the bookkeeping, or because nothing is shared any more."""
    def serve() -> int:
        return serve_states().device.num_computed

    wanted = serve()
    if fault is None:
        return
    with monkeypatch.context() as patch:
        patch.setattr(StateBlocks, *fault)
        try:
            found = serve()
        except (AssertionError, KeyError):
            return
    assert found > wanted, "the fault is not noticed"


def test_a_prefix_is_found_where_a_state_was_kept() -> None:
    """At the last regular border, and at the last full block of a prompt; not between."""
    harness = Harness(num_blocks=200, block_size=4, max_num_seqs=2, budget=64, model=plain_token,
                      groups=(KVGroup(), KVGroup(width=7, save_every=5)))
    prompt = [number % 11 for number in range(50)]
    for request, cached in (
            (prompt, 0), ([*prompt, 3], 48), ([*prompt[:47], 15, 15], 40), ([*prompt[:39], 15, 15, 15], 20),
            ([*prompt[:19], 15, 15], 0), (prompt, 48)):
        name = harness.add(request, 3)
        harness.drain()
        assert harness.requests[name].num_cached_tokens == cached


def test_a_model_with_states_refuses_proposed_tokens() -> None:
    harness = Harness(num_blocks=60, block_size=4, max_num_seqs=2, budget=8, groups=(KVGroup(), STATE))
    with pytest.raises(ValueError, match="recurrent state: it could not take back"):
        harness.scheduler.propose("any", [1])
