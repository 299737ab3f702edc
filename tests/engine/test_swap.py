"""Preemption by swapping, and evicted prefixes that are loaded back: less is computed, and nothing else changes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.execution.host_blocks import HostBlocks
from tests.scheduling.test_scheduler import Harness, plain_token, prompts
from tests.support.tiny_engine import FEW_BLOCKS, MakeEngine, run
from tests.support.tiny_llama import ENGINE_ARGS, random_prompt

SAMPLED = SamplingParams()


def request(name: str, prompt: Sequence[int], max_tokens: int = 60, **more: Any) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), SAMPLED, max_tokens, seed=5, **more)


REQUESTS = [
    *(request(f"own {seed}", random_prompt(20 + seed, seed)) for seed in range(4)),
    *(request(f"shared {seed}", [*random_prompt(33, 9), seed]) for seed in range(3)),
    *(request(f"choice {choice}", random_prompt(21, 8), 40, choice=choice, fork_of="choice 0" if choice else None)
      for choice in range(3)),
]


@pytest.fixture(scope="module")
def undisturbed(make_engine: MakeEngine) -> tuple[dict[str, list[int]], int]:
    """What the requests give where there is room for all of them."""
    engine = make_engine(num_gpu_blocks_override=65, enable_prefix_caching=False)
    found = run(engine, REQUESTS)
    assert engine.stats().num_preemptions == 0
    return found


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_small_pool_generates_the_same_tokens(
    make_engine: MakeEngine, undisturbed: tuple[dict[str, list[int]], int], mode: str, caching: bool
) -> None:
    space = {"swap_space": "0.01G"} if mode == "swap" else {}
    engine = make_engine(**FEW_BLOCKS, preemption_mode=mode, enable_prefix_caching=caching, enforce_eager=False,
                         **space)
    ids, computed = run(engine, REQUESTS)
    stats = engine.stats()
    assert ids == undisturbed[0]
    assert stats.num_preemptions > 0
    assert (stats.blocks_swapped_in > 0) == (mode == "swap")
    if mode == "swap" and not caching:
        # A preemption costs what was in a block that was not full, and the token in flight.
        assert computed <= undisturbed[1] + stats.num_preemptions * 17
    assert engine.stats().compilations == engine.info.num_programs


def test_blocks_in_pinned_memory(make_engine: MakeEngine, undisturbed: tuple[dict[str, list[int]], int]) -> None:
    """Where a GPU's blocks go; a CPU has such memory too, though no use for it."""
    engine = make_engine(**FEW_BLOCKS, preemption_mode="swap", swap_space="0.01G")
    host = engine._runner._host = HostBlocks(engine._runner._programs, "pinned_host")
    assert run(engine, REQUESTS)[0] == undisturbed[0]
    assert engine.stats().blocks_swapped_in > 0
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(host._segments)} == {"pinned_host"}


WISHES = [replace(params, max_tokens=60, ignore_eos=True) for params in (
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(n=2, seed=1, logprobs=0),
    SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.5, logprobs=1),
    SamplingParams(seed=2, repetition_penalty=1.5, min_tokens=50, max_tokens=60,
                   stop_token_ids=list(range(40))),
    SamplingParams(seed=3, structured_outputs=StructuredOutputsParams(regex="([a-f]|[0-9]x){50,90}")),
    SamplingParams(temperature=0, logit_bias={7: 6.0}, bad_words=["a", "bc"], prompt_logprobs=2),
)]


def outputs_of(path: Path, kind: RequestOutputKind, *, preempted: bool, **changes: Any) -> list[list[RequestOutput]]:
    """All outputs for each of WISHES, which comes when an older request has begun to fill the pool.

    Args:
        preempted: ask again where the older one was gone before blocks ran out, as on a stalled machine.
    """
    async def one(llm: AsyncLLM, seed: int, params: SamplingParams) -> list[RequestOutput]:
        older = llm.generate(random_prompt(20, 9), SamplingParams(max_tokens=105, ignore_eos=True))
        await anext(older)
        rest = asyncio.create_task(_outputs(older))
        found = await _outputs(llm.generate(random_prompt(20 + seed, seed), replace(params, output_kind=kind)))
        await rest
        return found

    async def main() -> list[list[RequestOutput]]:
        async with AsyncLLM(str(path), **ENGINE_ARGS | changes) as llm, asyncio.timeout(120):
            outputs = []
            for seed, params in enumerate(WISHES):
                outputs.append(await one(llm, seed, params))
                while preempted and not was_preempted(outputs[-1][-1]):
                    await llm.reset_prefix_cache()  # or the second time would report cached tokens
                    outputs[-1] = await one(llm, seed, params)
            return outputs

    return asyncio.run(main())


def was_preempted(output: RequestOutput) -> bool:
    return output.metrics is not None and output.metrics.num_preemptions > 0


async def _outputs(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


@pytest.fixture(scope="module")
def undisturbed_outputs(model_path: Path) -> list[RequestOutput]:
    found = [output for [output] in outputs_of(model_path, RequestOutputKind.FINAL_ONLY, preempted=False,
                                         num_gpu_blocks_override=65, enable_prefix_caching=False)]
    assert not any(map(was_preempted, found))
    return found


@pytest.mark.parametrize("more", [{}, {"preemption_mode": "swap", "swap_space": "0.01"}], ids=["recompute", "swap"])
def test_a_preempted_request_returns_what_an_undisturbed_one_does(
    model_path: Path, undisturbed_outputs: list[RequestOutput], more: dict[str, str]
) -> None:
    """Texts, ids, log probabilities, penalties, constraints, ends and usage; in deltas, none of them twice."""
    found = outputs_of(model_path, RequestOutputKind.DELTA, preempted=True, **FEW_BLOCKS, **more)
    for deltas, wanted in zip(found, undisturbed_outputs, strict=True):
        last = deltas[-1]
        assert last.prompt_token_ids == wanted.prompt_token_ids and last.num_cached_tokens == wanted.num_cached_tokens
        prompt_rows = [rows for delta in deltas if (rows := delta.prompt_logprobs) is not None]
        assert bool(prompt_rows) == (wanted.prompt_logprobs is not None)  # each delta repeats them
        for rows in prompt_rows:
            check_logprobs(rows[1:], (wanted.prompt_logprobs or ())[1:])
        for choice in wanted.outputs:
            parts = [part for delta in deltas for part in delta.outputs if part.index == choice.index]
            check_joined(parts, choice)


def check_joined(parts: Sequence[CompletionOutput], wanted: CompletionOutput) -> None:
    assert "".join(part.text for part in parts) == wanted.text
    assert sum((part.token_ids for part in parts), ()) == wanted.token_ids
    assert [part.finish_reason for part in parts if part.finish_reason] == [wanted.finish_reason]
    assert parts[-1].stop_reason == wanted.stop_reason
    check_logprobs([entry for part in parts for entry in part.logprobs or ()], wanted.logprobs or ())


def check_logprobs(found: Sequence[dict[int, Logprob] | None], wanted: Sequence[dict[int, Logprob] | None]) -> None:
    for entry, other in zip(found, wanted, strict=True):
        assert entry is not None and other is not None and entry.keys() == other.keys()
        assert all(entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4) for token in entry)


def test_host_memory_of_one_block(make_engine: MakeEngine, undisturbed: tuple[dict[str, list[int]], int]) -> None:
    """What does not fit is computed again."""
    block_bytes = 16 * 512
    engine = make_engine(**FEW_BLOCKS, preemption_mode="swap", swap_space=str(1.5 * block_bytes / 2**30))
    assert engine.info.num_host_blocks == 1
    assert run(engine, REQUESTS)[0] == undisturbed[0]
    assert engine.stats().blocks_swapped_out > 0


def test_an_evicted_prefix_is_loaded_from_host_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(**FEW_BLOCKS, swap_space="0.01")
    prompt = random_prompt(60, 1)
    first, _ = run(engine, [request("r", prompt, 8)])
    for seed in range(2, 6):
        run(engine, [request("other", random_prompt(100, seed), 8)])
    again, computed = run(engine, [request("r", prompt, 8)])
    assert again == first
    assert computed == 60 - 48 + 7 and engine.stats().blocks_swapped_in >= 3
    for seed in range(2, 6):
        run(engine, [request("other", random_prompt(100, seed), 8)])
    engine.reset_prefix_cache()
    again, computed = run(engine, [request("r", prompt, 8)])
    assert again == first and computed == 60 + 7


def test_the_engine_does_not_wait_for_blocks_to_move(make_engine: MakeEngine) -> None:
    """Behind seconds of work on the device, it schedules and dispatches at once what saves and loads blocks."""
    engine = make_engine(**FEW_BLOCKS, swap_space="0.01")
    prompt = random_prompt(60, 1)
    wanted, _ = run(engine, [request("r", prompt, 8)])
    for seed in range(2, 6):
        run(engine, [request("other", random_prompt(100, seed), 8)])
    before = engine.stats()
    engine._runner._pools = jax.jit(_slowly).lower(engine._runner._pools).compile()(engine._runner._pools)
    engine.add_request(request("r", prompt, 8))
    engine.step()
    last: Any = engine._runner._pools[0][0]
    assert not last.is_ready(), "the engine has waited for the device"
    after = engine.stats()
    assert after.blocks_swapped_in >= before.blocks_swapped_in + 3
    assert after.blocks_swapped_out > before.blocks_swapped_out
    while engine.has_work():
        engine.step()
    assert run(engine, [request("r", prompt, 8)])[0] == wanted


def _slowly(pools: Any) -> Any:
    product = jax.lax.fori_loop(0, 200, lambda _, x: x @ x * 1e-3, jnp.ones((700, 700)) + pools[0].k[0, 0, 0, 0])
    return jax.tree.map(lambda pool: pool.at[0, 0, 0, 0].add((0 * product[0, 0]).astype(pool.dtype)), pools)


@pytest.mark.parametrize(("arguments", "match"), [
    ({"swap_space": "many"}, "number of GiB"), ({"swap_space": "-1"}, "number of GiB"),
    ({"swap_space": "nan"}, "number of GiB"), ({"preemption_mode": "swap"}, "--swap-space"),
    ({"preemption_mode": "swap", "swap_space": "0"}, "--swap-space"),
])
def test_swap_space_that_cannot_work(make_engine: MakeEngine, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_engine(**arguments)


@pytest.mark.parametrize(("text", "size"), [("16", 16 * 2**30), ("16G", 16 * 2**30), ("0.5GiB", 2**29), ("0", 0)])
def test_swap_space_in_gib(text: str, size: int) -> None:
    assert EngineConfig(swap_space=text).swap_bytes("cuda") == size


# The scheduler's part


@pytest.mark.parametrize("caching", [True, False])
def test_swapped_tokens_are_not_computed_again(caching: bool) -> None:
    """Six requests that want three times the pool; all they compute twice is what was in blocks not full."""
    run = Harness(num_blocks=17, block_size=2, max_num_seqs=6, budget=16, model=plain_token, host_blocks=200,
                  swap=True, prefix_caching=caching)
    for prompt in prompts(6, 5):
        run.add(prompt, 11)
    run.drain()
    assert run.scheduler.num_preemptions >= 3
    assert run.device.num_loaded > 0
    assert run.device.num_computed <= 6 * (5 + 11 - 1) + run.scheduler.num_preemptions * 3


def test_pinned_blocks_of_a_preempted_request_stay_in_host_memory() -> None:
    harness = Harness(num_blocks=9, block_size=2, max_num_seqs=2, budget=64, model=plain_token, host_blocks=8,
                      swap=True)
    old, new = harness.add([1, 2], 14), harness.add([3] * 8, 8)
    while not harness.requests or not harness.scheduler.num_preemptions:
        harness.step()
    computed = harness.requests[new].num_preemptions and len(harness.requests[new].token_ids)
    harness.abort([old])
    for text in prompts(8, 12):  # others evict what is left, twice the host memory
        name = harness.add(text, 1)
        harness.abort([name])
    before = harness.device.num_computed
    harness.drain()
    assert computed and harness.device.num_computed - before <= 16 - computed + 2
