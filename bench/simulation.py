"""The real scheduler, block pool and policies on a modeled device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.common import spread
from bench.traffic import Arrival
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.scheduling.block_pool import BlockPool
from jaxpaged.scheduling.policy import POLICIES, FcfsPolicy, Policy
from jaxpaged.scheduling.request import Request
from jaxpaged.scheduling.scheduler import Scheduler
from jaxpaged.scheduling.scheduler_output import SchedulerOutput

_END = 1  # the id that ends an answer; all others are 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: `base` for reading the weights, more for each token, more for each token of context read."""

    base: float
    per_token: float
    per_context: float

    def of(self, step: SchedulerOutput) -> float:
        context = sum([chunk.start + chunk.num_tokens for chunk in step.chunks])
        return self.base + self.per_token * step.num_tokens + self.per_context * context


def fit_step_time(samples: Sequence[tuple[int, int, float]]) -> StepTime:
    """Least squares of the relative error over measured (tokens, context, seconds); no coefficient is negative."""
    tokens, context, seconds = np.array(samples, np.float64).T
    columns = np.stack([np.ones_like(tokens), tokens, context], axis=1) / seconds[:, None]
    used = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(columns[:, used], np.ones_like(seconds), rcond=None)[0]
        if (found >= 0).all():
            return StepTime(*(float(found[used.index(index)]) if index in used else 0.0 for index in range(3)))
        used.pop(int(found.argmin()))


@dataclass(frozen=True, slots=True)
class Device:
    """What the engine is configured with, and how quick it is.

    Attributes:
        kv_tokens: tokens that the KV pool holds.
        context: longest prompt and answer together.
    """

    step_time: StepTime
    kv_tokens: int
    context: int = 2048
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request got, in seconds from its arrival."""

    arrival: Arrival
    first_token: float
    end: float

    @property
    def normalized(self) -> float:
        """Seconds per token of the answer, from arrival to end (as in Orca and vLLM's papers)."""
        return self.end / self.arrival.output_tokens


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One simulated run.

    Attributes:
        mean_running: requests that ran at once, mean over the steps.
        mean_filled: share of the KV pool that held tokens, mean over the steps.
    """

    outcomes: tuple[Outcome, ...]
    steps: int
    preemptions: int
    seconds: float
    mean_running: float
    mean_filled: float

    def normalized_latency(self, priority: int | None = None) -> dict[str, float]:
        """Mean, median and P99 of seconds per token, of all requests or of one priority."""
        return spread([item.normalized for item in self.outcomes
                       if priority is None or item.arrival.priority == priority])

    def first_token(self) -> dict[str, float]:
        """Mean, median and P99 of the seconds to the first token."""
        return spread([item.first_token for item in self.outcomes])


class _Reserved(FcfsPolicy):
    """Reserves a request's maximum length for as long as it runs, so that no request is ever preempted.

    Where the reserved slots lie does not matter here; the papers' systems need them side by side, and lose more.
    """

    def __init__(self, tokens: Callable[[EngineRequest], int]) -> None:
        self._tokens = tokens

    def growth_blocks(self, request: Request, block_size: int) -> int:
        reserved = -(-self._tokens(request.message) // block_size)
        return max(0, reserved - max(request.num_blocks, -(-request.num_tokens // block_size)))


def _maximum(message: EngineRequest) -> int:
    return len(message.prompt_token_ids) + message.max_tokens


def _power_of_two(message: EngineRequest) -> int:
    hint = message.params.expected_output_tokens
    assert hint is not None, "reservations by the answer's length need to know it"
    return min(_maximum(message), len(message.prompt_token_ids) + (1 << (hint - 1).bit_length()))


RESERVATIONS = {"reserve": _maximum, "reserve-pow2": _power_of_two}


def simulate(traffic: Sequence[Arrival], device: Device, policy: str = "fcfs") -> SimulatedRun:
    """Serve the traffic until all of it is done.

    Args:
        policy: one of `POLICIES`, or first come, first served with room set aside as in Orca: for the maximum length
            ("reserve"), or for the prompt and the power of two above the answer's length ("reserve-pow2"), which the
            traffic's hints report.
    """
    pool = BlockPool(device.kv_tokens // device.block_size + 1)
    chosen: Policy = _Reserved(RESERVATIONS[policy]) if policy in RESERVATIONS else POLICIES[policy]()
    scheduler = Scheduler(pool, block_size=device.block_size, max_num_seqs=device.max_num_seqs,
                          max_num_batched_tokens=device.max_num_batched_tokens, policy=chosen)
    first: list[float | None] = [None] * len(traffic)
    end = [0.0] * len(traffic)
    outputs = [0] * len(traffic)
    in_flight: SchedulerOutput | None = None
    now, arrived, steps, running, filled = 0.0, 0, 0, 0, 0
    while arrived < len(traffic) or scheduler.has_unfinished() or in_flight is not None:
        if not scheduler.has_unfinished() and in_flight is None:
            now = max(now, traffic[arrived].time)
        while arrived < len(traffic) and traffic[arrived].time <= now:
            scheduler.add_request(_message(arrived, traffic[arrived], device.context))
            arrived += 1
        # As in the engine: a step is planned before the ids of the one before it are known.
        step = scheduler.schedule(now)
        if in_flight is not None:
            now += device.step_time.of(in_flight)
            steps += 1
            running += scheduler.num_running
            held, empty = scheduler.kv_slots()
            filled += held - empty
            for delta in scheduler.update_from_output(in_flight, _sampled(in_flight, traffic, outputs)):
                index = int(delta.request_id)
                outputs[index] += len(delta.token_ids)
                if delta.token_ids and first[index] is None:
                    first[index] = now
                if delta.finish_reason is not None:
                    end[index] = now
        in_flight = step if step.chunks else None
    outcomes = tuple(Outcome(item, (first[index] or 0.0) - item.time, end[index] - item.time)
                     for index, item in enumerate(traffic))
    return SimulatedRun(outcomes, steps, scheduler.num_preemptions, now, running / steps,
                        filled / steps / device.kv_tokens)


def _message(index: int, arrival: Arrival, context: int) -> EngineRequest:
    prompt = (index + 2, *(0,) * (arrival.prompt_tokens - 1))  # no two share a prefix
    params = SamplingParams(expected_output_tokens=arrival.hint)
    return EngineRequest(str(index), prompt, params, context - arrival.prompt_tokens, frozenset([_END]),
                         arrival_time=arrival.time, priority=arrival.priority)


def _sampled(step: SchedulerOutput, traffic: Sequence[Arrival], outputs: Sequence[int]) -> list[int]:
    """Ids of the sampled rows; `outputs` has the number of tokens that each request has returned."""
    sampled = [int(chunk.request_id) for chunk in step.chunks if chunk.num_samples]
    return [_END if outputs[index] + 1 >= traffic[index].output_tokens else 0 for index in sampled]
