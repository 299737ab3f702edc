"""Which waiting requests are admitted first, and what a long prompt leaves to the requests beside it."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.scheduling.block_pool import BlockPool
from jaxpaged.scheduling.scheduler import Scheduler


class Server:
    """A scheduler whose steps all sample token 0, and the requests that have had a chunk, in order."""

    def __init__(self, *, blocks: int, slots: int, budget: int, block_size: int = 4) -> None:
        self.scheduler = Scheduler(BlockPool(blocks + 1), block_size=block_size, max_num_seqs=slots,
                                   max_num_batched_tokens=budget)
        self.served: list[str] = []

    def add(self, name: str, prompt: int, max_tokens: int) -> None:
        text = (len(name) + sum(map(ord, name)), *range(1, prompt))
        self.scheduler.add_request(EngineRequest(name, text, SamplingParams(), max_tokens))

    def step(self) -> dict[str, int]:
        """Tokens of each request's chunk."""
        step = self.scheduler.schedule()
        chunks = {chunk.request_id: chunk.num_tokens for chunk in step.chunks}
        self.served += [name for name in chunks if name not in self.served]
        self.scheduler.update_from_output(step, [0] * step.num_sampled)
        self.scheduler.check_integrity()
        return chunks


# Passing a request that does not fit


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=16, max_size=40).filter(lambda bursts: sum(bursts) > 24),
       st.integers(2, 12))
def test_a_request_that_does_not_fit_is_passed_sixteen_times_and_no_more(bursts: Sequence[int], slots: int) -> None:
    """With any number of arrivals: from then on no request is admitted until it fits."""
    server = Server(blocks=37, slots=slots, budget=64)
    server.add("holder", 4, 100)
    server.step()
    server.add("large", 36 * 4, 4)  # does not fit beside the holder, which has to end first
    small = 0
    for burst in bursts:
        for _ in range(burst):
            server.add(f"small {small}", 2, 1)
            small += 1
        server.step()
    for _ in range(30):
        server.step()
    assert server.scheduler.is_live("holder") and "large" not in server.served
    assert sum(name.startswith("small") for name in server.served) == 16
    for _ in range(200):
        server.step()
    assert not server.scheduler.has_unfinished(), "all get what they asked for"
    assert server.served.index("large") == 17, "it is admitted before all that waited with it"


def test_a_request_that_fits_is_not_passed() -> None:
    server = Server(blocks=40, slots=1, budget=64)
    for name in "abcd":
        server.add(name, 8, 2)
    for _ in range(12):
        server.step()
    assert server.served == list("abcd") and not server.scheduler.has_unfinished()


# Long prompts


@pytest.mark.parametrize("short", [3, 8, 60])
def test_a_prompt_that_would_take_a_whole_step_leaves_half_to_shorter_ones(short: int) -> None:
    """And takes what they leave of it."""
    server = Server(blocks=400, slots=4, budget=64)
    server.add("long", 500, 2)
    server.add("short", short, 2)
    chunks = server.step()
    assert chunks["short"] == min(short, 32)
    assert chunks["long"] == 64 - chunks["short"] and server.served == ["long", "short"]


def test_it_leaves_half_to_later_arrivals_too() -> None:
    server = Server(blocks=400, slots=4, budget=64)
    server.add("long", 500, 2)
    assert server.step() == {"long": 64}, "alone it takes all"
    server.add("late", 20, 2)
    assert server.step() == {"long": 44, "late": 20}
    assert server.step() == {"late": 1, "long": 63}


def test_a_longer_prompt_behind_it_gets_nothing_of_the_half() -> None:
    """The first runs as fast as it can: otherwise both would only end later."""
    server = Server(blocks=800, slots=4, budget=64)
    server.add("long", 200, 1)
    server.add("longer", 500, 1)
    assert server.step() == {"long": 64}


@pytest.mark.parametrize("streams, chunk", [(0, 512), (2, 128), (150, 214)])
def test_a_very_long_prompt_takes_no_more_of_a_step_than_those_beside_it(streams: int, chunk: int) -> None:
    """Beyond 2,048 tokens: as many as they have and 64 more, or 128; so gaps in their streams stay small."""
    server = Server(blocks=4000, slots=200, budget=512)
    for number in range(streams):
        server.add(f"stream {number}", 2, 100)
    while server.scheduler.num_waiting:
        server.step()
    server.step()
    server.add("very long", 5000, 2)
    for _ in range(3):
        assert server.step()["very long"] == chunk
