"""What a step costs the host, counted in Python calls: unlike seconds, these are the same on a busy machine."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.kv_groups import KVGroup
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.execution.step_input import pad_step
from jaxpaged.scheduling.block_pool import BlockPool
from jaxpaged.scheduling.policy import POLICIES
from jaxpaged.scheduling.scheduler import Scheduler
from jaxpaged.scheduling.scheduler_output import SchedulerOutput

END = 1


def calls(work: Callable[[], object]) -> int:
    """Function calls, Python's and C's, that `work` makes."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def busy_scheduler(running: int, waiting: int, policy: str, *, slots: int) -> Scheduler:
    """All of the first decode, the others wait: for a slot, or for blocks where there are slots."""
    scheduler = Scheduler(BlockPool(2 + 3 * running), block_size=16, max_num_seqs=slots,
                          max_num_batched_tokens=20 * running, policy=POLICIES[policy]())
    for first, last, length in ((0, running, 20), (running, running + waiting, 16 * running + 32)):
        for number in range(first, last):
            scheduler.add_request(EngineRequest(f"r{number}", (number, *range(1, length)), SamplingParams(), 12))
        for _ in range(running // 64 + 1):  # not all are admitted in one step
            step = scheduler.schedule()
            scheduler.update_from_output(step, [0] * step.num_sampled)
    assert (scheduler.num_running, scheduler.num_waiting) == (running, waiting)
    return scheduler


def step_calls(scheduler: Scheduler, units: int = 1) -> int:
    """Calls of one step: schedule, build, process what it sampled; a block has `units` units in all KV groups."""
    step: list[SchedulerOutput] = []
    running = scheduler.num_running

    def work() -> None:
        step.append(scheduler.schedule())
        pad_step(step[0], size=running, num_samples=running, null_slot=running, block_size=16, units=units)
        scheduler.update_from_output(step[0], [0] * running)

    count = calls(work)
    assert step[0].num_sampled == running
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_costs_in_proportion_to_the_running(policy: str) -> None:
    some, more = (step_calls(busy_scheduler(count, 0, policy, slots=count)) for count in (64, 256))
    assert more < 4.2 * some
    assert more / 256 < 18, "more calls per running request than a step of 1 ms has room for"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [64, 80], ids=["no free slot", "no free block"])
def test_a_step_costs_the_same_with_any_number_waiting(policy: str, slots: int) -> None:
    few, many, more = (step_calls(busy_scheduler(64, waiting, policy, slots=slots)) for waiting in (128, 1024, 4096))
    assert more <= many + 20 and many <= few + 20


@pytest.mark.parametrize("policy", POLICIES)
def test_arrivals_and_aborts_cost_the_same_with_any_number_waiting(policy: str) -> None:
    def turnover(waiting: int) -> int:
        scheduler = busy_scheduler(4, waiting, policy, slots=4)
        message = EngineRequest("late", (1, 2), SamplingParams(), 5)

        def work() -> None:
            scheduler.add_request(message)
            scheduler.abort(["late", "r50"])

        return calls(work)

    assert turnover(4096) <= turnover(64) + 40


@pytest.mark.parametrize("policy", POLICIES)
def test_adding_a_request_costs_the_same_with_any_number_waiting(policy: str) -> None:
    """In calls, and in what it leaves for the garbage collector to walk through: each object once per generation."""
    def adding(waiting: int) -> tuple[int, int]:
        scheduler = busy_scheduler(4, waiting, policy, slots=4)
        messages = [EngineRequest(f"late {number}", (1, 2), SamplingParams(), 5) for number in range(100)]

        def work() -> None:
            for message in messages:
                scheduler.add_request(message)

        gc.freeze()  # what is there already is not counted, and takes no time
        try:
            before = len(gc.get_objects())
            count = calls(work)
            return count, len(gc.get_objects()) - before
        finally:
            gc.unfreeze()

    few, many, more = (adding(waiting) for waiting in (64, 1024, 4096))
    assert few[0] + 100 >= many[0] and many[0] + 100 >= more[0], "more than a call for each that is added"
    assert max(few[1], many[1], more[1]) <= 100 * 12, "objects per waiting request"


def test_a_token_costs_the_same_after_a_short_context_and_a_long_one() -> None:
    """Blocks reach the device as they are taken, one by one: nothing walks along a request's blocks in each step."""
    def decode_calls(length: int) -> int:
        scheduler = Scheduler(BlockPool(8 * (length // 16 + 3)), block_size=16, max_num_seqs=8,
                              max_num_batched_tokens=8 * length)
        for number in range(8):
            scheduler.add_request(EngineRequest(f"r{number}", (number, *range(1, length)), SamplingParams(), 20))
        for _ in range(2):
            step = scheduler.schedule()
            scheduler.update_from_output(step, [0] * step.num_sampled)
        assert all(len(request.token_ids) == length + 2 for request in scheduler._queues.running)
        return step_calls(scheduler)

    assert decode_calls(128) == decode_calls(2048) == decode_calls(32_768)


@pytest.mark.parametrize(("groups", "most"), [
    ((KVGroup(24),), 1.15), ((KVGroup(), KVGroup(24)), 1.2), ((KVGroup(), KVGroup(24, 6)), 1.25),
    ((KVGroup(), KVGroup(24, 2), KVGroup(40)), 1.3)])
def test_more_kv_groups_cost_little(groups: tuple[KVGroup, ...], most: float) -> None:
    """Over steps in which every request takes a block of each group, and frees one of each window."""
    def decode_calls(groups: tuple[KVGroup, ...]) -> int:
        widths = [group.width for group in groups]
        pool = BlockPool(2 + 64 * 5 * sum(widths), widths)
        scheduler = Scheduler(pool, block_size=16, groups=groups, max_num_seqs=64, max_num_batched_tokens=64 * 60)
        for number in range(64):
            scheduler.add_request(EngineRequest(f"r{number}", (number, *range(1, 60)), SamplingParams(), 30))
        for _ in range(4):
            step = scheduler.schedule()
            scheduler.update_from_output(step, [0] * step.num_sampled)
        before = pool.num_used_of_groups
        count = sum(step_calls(scheduler, sum(widths)) for _ in range(16))
        assert [after - used for after, used in zip(pool.num_used_of_groups, before, strict=True)] == [
            64 * group.width * (group.window is None) for group in groups]
        return count

    assert decode_calls(groups) <= most * decode_calls((KVGroup(),))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12),
       st.integers(1, 4), st.sampled_from([4, 16, 64]))
def test_a_finished_request_costs_at_most_one_ignored_row(
    requests: list[tuple[int, int, int]], slots: int, budget: int
) -> None:
    """One row where an end id was a surprise, none where the length was known ahead."""
    scheduler = Scheduler(BlockPool(200), block_size=4, max_num_seqs=slots, max_num_batched_tokens=budget)
    for number, (prompt, _, max_tokens) in enumerate(requests):
        scheduler.add_request(
            EngineRequest(str(number), (number,) * prompt, SamplingParams(), max_tokens, frozenset([END])))
    rows = dict.fromkeys(range(len(requests)), 0)
    outputs = dict.fromkeys(range(len(requests)), 0)
    in_flight: SchedulerOutput | None = None
    while scheduler.has_unfinished() or in_flight:
        step = scheduler.schedule()
        for chunk in step.chunks:
            rows[int(chunk.request_id)] += chunk.num_samples
        if in_flight:
            sampled = [int(chunk.request_id) for chunk in in_flight.chunks if chunk.num_samples]
            ids = [END if outputs[number] + 1 >= requests[number][1] else 0 for number in sampled]
            for delta in scheduler.update_from_output(in_flight, ids):
                outputs[int(delta.request_id)] += len(delta.token_ids)
        in_flight = step if step.chunks else None
    for number, (_, output, max_tokens) in enumerate(requests):
        assert rows[number] == min(output, max_tokens) + (output < max_tokens)
