"""Scheduling policies: the real scheduler serves one request at a time, or a few, on a clock; a plain sort says in
which order they must end."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.scheduling.block_pool import BlockPool
from jaxpaged.scheduling.policy import PRIORITY_AGEING_SECONDS, Policy, PredictedPolicy, PriorityPolicy
from jaxpaged.scheduling.scheduler import Scheduler
from jaxpaged.scheduling.scheduler_output import SchedulerOutput


@dataclass(frozen=True)
class Timed:
    """A request and its time of arrival; its answer ends after `output` tokens."""

    time: float
    output: int
    priority: int = 0
    hint: int | None = None
    prompt: int = 4


@dataclass(frozen=True)
class ServingResult:
    """When each request's answer ended, in the order of the arrivals, and the number of preemptions."""

    ends: list[float]
    preemptions: int

    @property
    def order(self) -> list[int]:
        return sorted(range(len(self.ends)), key=self.ends.__getitem__)


def serve(arrivals: Sequence[Timed], policy: Policy, *, slots: int = 1, num_blocks: int = 1000, block_size: int = 4,
          step_seconds: float = 1.0) -> ServingResult:
    """One step after another, each as long as the others."""
    scheduler = Scheduler(BlockPool(num_blocks), block_size=block_size, max_num_seqs=slots,
                          max_num_batched_tokens=256, policy=policy)
    ends = [0.0] * len(arrivals)
    pending = sorted(range(len(arrivals)), key=lambda index: arrivals[index].time)
    in_flight: SchedulerOutput | None = None
    outputs = [0] * len(arrivals)
    now = 0.0
    while pending or scheduler.has_unfinished() or in_flight:
        while pending and arrivals[pending[0]].time <= now:
            index = pending.pop(0)
            arrival = arrivals[index]
            scheduler.add_request(EngineRequest(
                str(index), (index,) * arrival.prompt, SamplingParams(expected_output_tokens=arrival.hint), 64,
                frozenset([1]), arrival_time=arrival.time, priority=arrival.priority))
        step = scheduler.schedule(now)
        if in_flight:
            sampled = [int(chunk.request_id) for chunk in in_flight.chunks if chunk.num_samples]
            ids = [int(outputs[index] + 1 >= arrivals[index].output) for index in sampled]
            for delta in scheduler.update_from_output(in_flight, ids):
                outputs[int(delta.request_id)] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    ends[int(delta.request_id)] = now
        scheduler.check_integrity()
        in_flight = step if step.chunks else None
        now += step_seconds
        assert now < 1e5, "a request starves"
    return ServingResult(ends, scheduler.num_preemptions)


arrivals = st.builds(Timed, time=st.just(0.0), output=st.integers(1, 60), priority=st.integers(-2, 2))


@settings(max_examples=40)
@given(st.lists(arrivals, min_size=1, max_size=12), st.integers(1, 3))
def test_the_higher_priority_is_admitted_first_and_equals_by_arrival(batch: list[Timed], slots: int) -> None:
    """All arrive at the start, so the next to be admitted is always the first of those left."""
    served = serve(batch, PriorityPolicy(), slots=slots)
    if slots == 1:
        assert served.order == sorted(range(len(batch)), key=lambda index: batch[index].priority)
    assert served.preemptions == 0


@settings(max_examples=40)
@given(st.lists(arrivals, min_size=1, max_size=12))
def test_the_shortest_by_hint_is_admitted_first_and_equals_by_arrival(batch: list[Timed]) -> None:
    hinted = [Timed(0.0, arrival.output, hint=arrival.output) for arrival in batch]
    assert serve(hinted, PredictedPolicy()).order == sorted(range(len(batch)), key=lambda index: batch[index].output)


@settings(max_examples=40)
@given(st.integers(0, 50), st.integers(1, 64), st.integers(1, 64), st.sampled_from([0.5, 3.0]))
def test_waiting_makes_up_for_predicted_work(gap: int, first: int, second: int, rate: float) -> None:
    """Both wait behind a third that holds the only slot; a second of waiting outweighs `rate` tokens."""
    batch = [Timed(0.0, 60, hint=60), Timed(1.0, first, hint=first), Timed(1.0 + gap, second, hint=second)]
    served = serve(batch, PredictedPolicy(ageing_rate=rate))
    assert (served.ends[1] < served.ends[2]) == (first <= second + gap * rate)


def test_lengths_are_learned_from_those_that_finished() -> None:
    """Long prompts get short answers here, and short prompts long ones; there are no hints."""
    kinds = [Timed(0.0, 40, prompt=4), Timed(0.0, 3, prompt=64)]
    policy = PredictedPolicy(ageing_rate=0.01)
    serve(kinds * 10, policy)
    served = serve([Timed(0.0, 20, prompt=30), *kinds * 2], policy)
    assert served.order == [0, 2, 4, 1, 3]


def test_a_request_preempts_one_of_lower_priority() -> None:
    """The victim is the newest of the lowest priority; it runs again before its equal that arrived later."""
    batch = [Timed(0.0, 50, 1), Timed(1.0, 50, 2), Timed(2.0, 50, 2), Timed(3.0, 5, 2), Timed(10.0, 5, 0)]
    served = serve(batch, PriorityPolicy(), slots=3)
    assert served.preemptions == 1
    assert served.ends[4] <= 10 + 5 + 2
    assert served.ends[2] <= 52 + (17 - 10) + 2 < served.ends[0] + 50
    assert served.ends[0] < served.ends[3], "it got the slot that became free first"


def test_requests_of_equal_priority_do_not_preempt_one_another() -> None:
    batch = [Timed(0.0, 50, 1), Timed(1.0, 5, 1), Timed(2.0, 5, 1)]
    assert serve(batch, PriorityPolicy()) == ServingResult(serve(batch, PriorityPolicy()).ends, 0)
    assert serve(batch, PriorityPolicy()).order == [0, 1, 2]


@pytest.mark.parametrize("policy", [PriorityPolicy(), PredictedPolicy()])
def test_no_request_starves(policy: Policy) -> None:
    """A stream of short and important requests that never leaves the slot free, and one that is neither."""
    stream = [Timed(float(5 * number), 6, 0, hint=6) for number in range(200)]
    served = serve([Timed(1.0, 20, 3, hint=20), *stream], policy, step_seconds=1.0)
    assert served.ends[0] < 3 * PRIORITY_AGEING_SECONDS + 100
    assert served.ends[0] < max(served.ends)


def test_room_for_predicted_growth_prevents_preemptions() -> None:
    """Answers of 40 tokens each in a pool for three and a half: with one block of room each, too many are admitted."""
    batch = [Timed(0.0, 40, hint=40) for _ in range(12)]
    pool = {"slots": 12, "num_blocks": 1 + 3 * 11 + 6}
    assert serve(batch, PriorityPolicy(), **pool).preemptions > 0
    assert serve(batch, PredictedPolicy(horizon=40), **pool).preemptions == 0


def test_a_request_does_not_preempt_another_whose_chunk_fills_its_prefix() -> None:
    """Both prompts have a prefix in common, which the one of lower priority computes in the same step."""
    pool = BlockPool(30)
    scheduler = Scheduler(pool, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, policy=PriorityPolicy())
    prompt = tuple(range(16))
    scheduler.add_request(EngineRequest("less", prompt, SamplingParams(), 8, priority=1))
    scheduler.update_from_output(step := scheduler.schedule(), [0] * step.num_sampled)
    scheduler.add_request(EngineRequest("more", (*prompt, 5, 6), SamplingParams(), 8, priority=0))
    chunks = []
    for _ in range(2):
        step = scheduler.schedule()
        chunks += [(chunk.request_id, chunk.start) for chunk in step.chunks]
        scheduler.update_from_output(step, [0] * step.num_sampled)
        scheduler.check_integrity()
    assert chunks == [("less", 8), ("more", 16)]
