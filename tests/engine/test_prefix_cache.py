"""Shared prefixes: which tokens are not computed again, and that nothing else changes by it."""

from collections.abc import Sequence
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.scheduling.block_hash import BlockHasher
from jaxpaged.scheduling.request import Request
from tests.scheduling.test_scheduler import Harness, plain_token
from tests.support.tiny_engine import MakeEngine
from tests.support.tiny_llama import CONFIG, Reference, random_prompt, random_weights

REFERENCE = Reference(CONFIG, random_weights())
GREEDY = SamplingParams(temperature=0)
BLOCK = 16


def request(name: str, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), GREEDY, max_tokens, **more)


class ServedRequests:
    """What requests returned, the cached tokens of each prompt, and the number of tokens computed for all of them."""

    def __init__(self, engine: Engine, requests: Sequence[EngineRequest]) -> None:
        self.ids: dict[str, list[int]] = {item.request_id: [] for item in requests}
        self.cached: dict[str, int] = {}
        self.num_computed = 0
        for item in requests:
            engine.add_request(item)
        while engine.has_work():
            outputs = engine.step()
            engine.check_integrity()
            self.num_computed += sum(outputs.stats.step_tokens)
            for delta in outputs.deltas:
                self.ids[delta.request_id] += delta.token_ids
                assert self.cached.setdefault(delta.request_id, delta.num_cached_tokens) == delta.num_cached_tokens
        for item in requests:
            assert REFERENCE.error(item.prompt_token_ids, self.ids[item.request_id], item.max_tokens) is None


@pytest.fixture(scope="module")
def shared_engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.reset_prefix_cache()
    return shared_engine


# Hashes


def chained(tokens: Sequence[int], block_size: int, salt: str | None = None) -> list[bytes]:
    hasher = BlockHasher(block_size)
    item = Request(EngineRequest("r", tuple(tokens), GREEDY, 1, cache_salt=salt), 0)
    return [hasher.hash_block(item, index) for index in range(len(tokens) // block_size)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=12),
       st.integers(1, 4), st.sampled_from([None, "", "a", "plain"]), st.sampled_from([None, "", "a", "plain"]))
def test_hashes_are_equal_where_all_tokens_so_far_and_the_salts_are(
    first: list[int], second: list[int], block_size: int, salt: str | None, other: str | None
) -> None:
    pairs = zip(chained(first, block_size, salt), chained(second, block_size, other), strict=False)
    for index, (one, two) in enumerate(pairs):
        end = (index + 1) * block_size
        assert (one == two) == (first[:end] == second[:end] and salt == other)


# The engine


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 49])
def test_a_cached_prompt_generates_the_same_tokens(engine: Engine, length: int) -> None:
    """At and around block borders; its last token is always computed again."""
    prompt = random_prompt(length, length)
    first, second = (ServedRequests(engine, [request("r", prompt)]) for _ in range(2))
    assert first.cached["r"] == 0 and first.num_computed == length + 7
    assert second.cached["r"] == (length - 1) // BLOCK * BLOCK
    assert second.num_computed == first.num_computed - second.cached["r"]
    assert first.ids == second.ids


def test_requests_that_arrive_together_compute_their_common_prefix_once(engine: Engine) -> None:
    """Though it takes several steps to compute it."""
    common = random_prompt(64, 1)
    requests = [request(f"r{number}", common + random_prompt(5, 10 + number)) for number in range(6)]
    served = ServedRequests(engine, requests)
    assert served.cached == {"r0": 0} | {f"r{number}": 64 for number in range(1, 6)}
    assert served.num_computed == 64 + 6 * (5 + 7)


def test_generated_tokens_are_shared_as_well(engine: Engine) -> None:
    prompt = random_prompt(20, 2)
    answer = ServedRequests(engine, [request("first", prompt, 30)]).ids["first"]
    again = ServedRequests(engine, [request("next turn", [*prompt, *answer, 1, 2, 3])])
    assert again.cached["next turn"] == (20 + 30 - 1) // BLOCK * BLOCK


def test_nothing_is_shared_between_different_salts(engine: Engine) -> None:
    prompt = random_prompt(40, 3)
    for salt in (None, "a", "b"):
        assert ServedRequests(engine, [request("r", prompt, cache_salt=salt)]).cached["r"] == 0
        assert ServedRequests(engine, [request("r", prompt, cache_salt=salt)]).cached["r"] == 32
    together = [request(str(salt), random_prompt(40, 4), cache_salt=salt) for salt in (None, "a", "b")]
    assert set(ServedRequests(engine, together).cached.values()) == {0}


def test_a_request_that_does_not_read_the_cache_still_fills_it(engine: Engine) -> None:
    prompt = random_prompt(40, 5)
    for _ in range(2):
        served = ServedRequests(engine, [request("r", prompt, skip_prefix_read=True)])
        assert served.cached["r"] == 0 and served.num_computed == 40 + 7
    assert ServedRequests(engine, [request("r", prompt)]).cached["r"] == 32


def test_after_a_reset_nothing_is_cached(engine: Engine) -> None:
    prompt = random_prompt(40, 6)
    ServedRequests(engine, [request("r", prompt)])
    assert "c" in engine.pool_state().state_codes
    engine.reset_prefix_cache()
    assert "c" not in engine.pool_state().state_codes
    assert ServedRequests(engine, [request("r", prompt)]).cached["r"] == 0


def test_a_reset_does_not_disturb_running_requests(engine: Engine) -> None:
    prompt = random_prompt(40, 7)
    engine.add_request(request("running", prompt, 20))
    engine.add_request(request("waiting", prompt, 20))
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    ids: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step().deltas:
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_integrity()
    assert ids["running"] == ids["waiting"]
    assert ServedRequests(engine, [request("again", prompt)]).ids["again"] == ids["running"][:8]


def test_new_weights_share_nothing_with_old_ones(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_prompt(40, 8)
    ServedRequests(engine, [request("r", prompt)])
    engine.update_weights(jax.tree.map(lambda leaf: leaf, engine.params))
    assert ServedRequests(engine, [request("r", prompt)]).cached["r"] == 0


def test_a_pool_too_small_for_all_prefixes(make_engine: MakeEngine) -> None:
    """Ten prompts of four blocks each, in turn, in a pool of nine: evictions all the time, and the same results."""
    engine = make_engine(num_gpu_blocks_override=10, max_num_batched_tokens=7)
    for number in (*range(10), *range(10)):
        ServedRequests(engine, [request("r", random_prompt(60, number), 4), request("s", random_prompt(60, number), 4)])
    ServedRequests(engine, [request(f"r{number}", random_prompt(20, number // 2), 60) for number in range(8)])
    assert engine.stats().num_preemptions > 0


def test_without_prefix_caching_nothing_is_cached(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=False)
    prompt = random_prompt(40, 9)
    for _ in range(2):
        served = ServedRequests(engine, [request("r", prompt), request("s", prompt)])
        assert set(served.cached.values()) == {0} and served.num_computed == 2 * (40 + 7)
        assert "c" not in engine.pool_state().state_codes


# Requests that wait for one another


def harness(**changes: Any) -> Harness:
    usual: dict[str, Any] = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "budget": 16, "model": plain_token}
    return Harness(**usual | changes)


def test_a_follower_waits_for_the_leader_and_blocks_no_other_request() -> None:
    run = harness(budget=64)
    common = [token % 16 for token in range(7, 307)]
    leader, follower = run.add(common, 2), run.add([*common[:296], 1, 2], 2)
    other = run.add([5, 4, 3], 2)
    by_step = []
    while run.live:
        by_step.append({chunk.request_id for chunk in run.step().chunks})
    assert by_step[0] == {leader, other}
    assert [follower in names for names in by_step].index(True) == 4, "when the leader has got far enough"
    assert run.requests[follower].num_cached_tokens >= 296 - 64
    run.drain()


def test_a_follower_runs_alone_if_its_leader_is_aborted() -> None:
    run = harness(budget=64)
    common = [token % 16 for token in range(7, 307)]
    leader, follower = run.add(common, 2), run.add(common, 2)
    run.step()
    run.abort([leader])
    run.step()
    assert run.requests[follower].num_cached_tokens == 64, "what the leader has computed is there"
    run.drain()


def test_a_short_common_prefix_is_not_waited_for() -> None:
    """It is shared within one step."""
    run = harness(budget=64)
    names = [run.add([1, 2, 3, 4, 5, 6, 7, 8, number, 9, 10], 2) for number in range(5)]
    step = run.step()
    assert [chunk.request_id for chunk in step.chunks] == names
    assert [chunk.start for chunk in step.chunks] == [0, 8, 8, 8, 8]
    run.drain()


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    run = harness(num_blocks=16)
    texts = [[number] * 17 for number in range(3)]  # four full blocks each; three of fifteen stay empty
    for text in (*texts, texts[0]):
        run.add(text, 1)
        run.drain()
    run.add([9] * 22, 1)  # takes the empty ones and three more
    run.drain()
    left = [run.scheduler._kv.find_prefix(Request(EngineRequest("", tuple(text), GREEDY, 1), 0)) for text in texts]
    assert [prefix.num_blocks for prefix in left] == [4, 1, 4]
