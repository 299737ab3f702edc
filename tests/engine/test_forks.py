"""Choices of one prompt: it is computed once, its blocks are shared, and each choice is what it would be alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.execution.kv_cache import copy_blocks
from tests.support.tiny_engine import MakeEngine, run
from tests.support.tiny_llama import random_prompt

SAMPLED = SamplingParams()


def choices(prompt: Sequence[int], n: int, max_tokens: int = 20, params: SamplingParams = SAMPLED,
            name: str = "r") -> list[EngineRequest]:
    return [EngineRequest(f"{name}#{choice}", tuple(prompt), params, max_tokens, seed=5, choice=choice,
                          fork_of=f"{name}#0" if choice else None) for choice in range(n)]


def run_alone(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    return {item.request_id: run(engine, [replace(item, fork_of=None)])[0][item.request_id] for item in requests}


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 40])
def test_choices_compute_their_prompt_once_and_are_what_they_are_alone(engine: Engine, length: int) -> None:
    requests = choices(random_prompt(length, length), 4)
    engine.reset_prefix_cache()
    ids, computed = run(engine, requests)
    assert computed == length + 4 * 19
    assert len(set(map(tuple, ids.values()))) == 4
    assert ids == run_alone(engine, requests)


def test_more_choices_than_slots(engine: Engine) -> None:
    requests = choices(random_prompt(21, 1), 7)
    assert run(engine, requests)[0] == run_alone(engine, requests)


@pytest.mark.parametrize("caching", [True, False])
def test_choices_in_a_small_pool(make_engine: MakeEngine, engine: Engine, caching: bool) -> None:
    small = make_engine(max_num_batched_tokens=7, num_gpu_blocks_override=10, enable_prefix_caching=caching)
    requests = [item for seed in range(3) for item in choices(random_prompt(10 + seed, seed), 3, 60, name=f"{seed}")]
    assert run(small, requests)[0] == run_alone(engine, requests)
    assert small.stats().num_preemptions > 0


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("gone", [["r#0"], ["r#2"], ["r#0", "r#1", "r#3"]], ids=" ".join)
def test_choices_whose_siblings_are_aborted(engine: Engine, steps: int, gone: list[str]) -> None:
    """Also the one that computes the prompt for all."""
    requests = choices(random_prompt(40, 2), 4)
    wanted = run_alone(engine, requests)
    engine.reset_prefix_cache()
    for item in requests:
        engine.add_request(item)
    ids: dict[str, list[int]] = {item.request_id: [] for item in requests}
    while engine.has_work():
        if steps == 0:
            engine.abort(gone)
        steps -= 1
        for delta in engine.step().deltas:
            ids[delta.request_id] += delta.token_ids
        engine.check_integrity()
    for name, found in ids.items():
        assert found == (wanted[name][: len(found)] if name in gone else wanted[name])


def test_shared_blocks_are_held_once(engine: Engine) -> None:
    """Four choices after 40 tokens: two full blocks in common, and a third that each has for itself once it writes."""
    for item in choices(random_prompt(40, 3), 4, 5):
        engine.add_request(item)
    used = []
    while engine.has_work():
        stats = engine.step().stats
        used.append(stats.blocks_used)
        assert 0 <= stats.kv_slots_empty <= stats.kv_slots_held
    assert max(used) == 2 + 4
    assert 3 in used, "before any of them writes"


def test_beams_share_their_blocks_without_a_prefix_cache(make_engine: MakeEngine) -> None:
    """Nothing is computed twice; a block that is not full has several references until a beam writes to it."""
    engine = make_engine(enable_prefix_caching=False, num_gpu_blocks_override=65)
    params = replace(SAMPLED, n=3, use_beam_search=True)
    item = EngineRequest("r", tuple(random_prompt(40, 3)), params, 8)
    plain = EngineRequest("beside", tuple(random_prompt(5, 4)), SAMPLED, 30, seed=5)
    engine.add_request(item)
    engine.add_request(plain)
    computed, max_used, partial = 0, 0, False
    steps = 0
    ended: dict[str, int] = {}
    while engine.has_work():
        steps += 1
        outputs = engine.step()
        engine.check_integrity()
        computed += sum(outputs.stats.step_tokens)
        ended |= {delta.request_id: steps for delta in outputs.deltas if delta.finish_reason}
        max_used = max(max_used, outputs.stats.blocks_used)
        partial |= any(engine._pool.ref_count(block) > 1 for request in engine._scheduler._queues.running
                       for block in request.block_tables[0][-1:] if request.num_computed_tokens % 16)
    assert computed == 40 + 7 * 3 + 5 + 29
    assert max_used <= 2 + 3 + 3 and partial
    assert ended["beside"] <= 32, "it waits for the search"


@pytest.mark.parametrize("by_slices", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_copied_blocks(dtype: Any, by_slices: bool) -> None:
    """All layers, reads before writes, in place."""
    rng = np.random.default_rng(0)
    pools = tuple(jnp.asarray(rng.integers(-9, 9, (120, 4, 2, 3)), dtype) for _ in range(4))
    source, target = np.array([3, 5, 0, 0], np.int32), np.array([5, 7, 0, 0], np.int32)
    wanted = [np.array(pool) for pool in pools]
    for pool in wanted:
        pool[[5, 7]] = pool[[3, 5]]
    copy = jax.jit(partial(copy_blocks, by_slices=by_slices), donate_argnums=0)
    program = copy.lower(pools, source, target).compile()
    analysis = program.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == sum(pool.nbytes for pool in pools)
    if by_slices or dtype != jnp.bfloat16:  # narrow floats in scatters: see block_programs
        assert analysis.temp_size_in_bytes < pools[0].nbytes, "a pool is copied"
    for found, expected in zip(program(pools, source, target), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
