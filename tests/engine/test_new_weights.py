"""Weights that change between rollouts: what is moved, which weights made which tokens, and a pool that sleeps."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest

from jaxpaged import LLM, AsyncLLM, RequestOutput, SamplingParams
from jaxpaged.errors import ConfigError, RequestError
from tests.support.tiny_llama import (
    CONFIG,
    ENGINE_ARGS,
    Reference,
    load_with_windows,
    random_prompt,
    random_weights,
    write_model,
)
from tests.support.tiny_llm import GREEDY

PROMPT = random_prompt(12, 5)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
REFERENCES = [Reference(CONFIG, random_weights(seed=seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The module, and the weights of the two references."""
    folders = [write_model(tmp_path_factory.mktemp("models") / f"seed{seed}", seed=seed) for seed in (0, 1)]
    loaded = [load_with_windows(folder, [None, None]) for folder in folders]
    return [loaded[0][0], loaded[0][1], loaded[1][1]]


@pytest.fixture(scope="module")
def shared(weights: list[Any]) -> Iterator[LLM]:
    with LLM(model=(weights[0], weights[1]), **ENGINE_ARGS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM, weights: list[Any]) -> Iterator[LLM]:
    """With the first weights, and nothing cached."""
    shared.wake_up()
    shared.update_weights(weights[1])
    yield shared


def greedy(llm: LLM) -> RequestOutput:
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return output


def check(output: RequestOutput, seed: int) -> None:
    assert REFERENCES[seed].error(PROMPT, output.outputs[0].token_ids, 8) is None


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_an_update_says_its_version_and_what_it_moved(llm: LLM, weights: list[Any]) -> None:
    before = llm.update_weights(weights[2])
    assert before.bytes_copied == 0 and before.seconds > 0
    first = greedy(llm)
    check(first, 1)
    assert first.outputs[0].weight_versions == ((0, before.version),)
    update = llm.update_weights(jax.tree.map(np.asarray, weights[1]))
    assert update.version == before.version + 1 and update.bytes_copied == nbytes(weights[1])
    check(greedy(llm), 0)
    assert greedy(llm).outputs[0].weight_versions == ((0, update.version),)


def test_an_update_compiles_nothing(llm: LLM, weights: list[Any]) -> None:
    greedy(llm)
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for params in (weights[2], jax.tree.map(np.asarray, weights[1]), weights[2]):
            llm.update_weights(params)
            greedy(llm)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled


def test_a_part_of_the_weights(llm: LLM, weights: list[Any]) -> None:
    layer = {"layers": {1: weights[2]["layers"][1]}}
    assert llm.update_weights(layer, partial=True).bytes_copied == 0
    mixed = {name: (REFERENCES[1] if ".layers.1." in name else REFERENCES[0]).weights[name]
             for name in REFERENCES[0].weights}
    output = greedy(llm)
    assert Reference(CONFIG, mixed).error(PROMPT, output.outputs[0].token_ids, 8) is None
    for wrong, text in (({"layers": {7: layer["layers"][1]}}, r"layers\.7\.\S+ is not a weight"),
                        ({"norm": {"scale": weights[1]["norm"]["scale"][:-1]}}, r"norm\.scale has the shape")):
        with pytest.raises(ConfigError, match=text):
            llm.update_weights(wrong, partial=True)
    with pytest.raises(ConfigError, match="is missing"):
        llm.update_weights(layer)
    assert greedy(llm).outputs[0].token_ids == output.outputs[0].token_ids


def test_a_pool_that_sleeps_gives_its_memory_back(llm: LLM, weights: list[Any]) -> None:
    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    check(greedy(llm), 0)
    before, pool = live(), llm.info.kv_cache_bytes
    with llm.asleep():
        assert before - live() >= pool > 0
        with pytest.raises(RequestError, match="asleep"):
            greedy(llm)
        llm.sleep()  # a second time
        llm.update_weights(weights[2])
    check(greedy(llm), 1)
    assert abs(live() - before) < pool // 2


# While requests run


def run(work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], weights: list[Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), AsyncLLM(model=(weights[0], weights[1]), **ENGINE_ARGS) as llm:
            await work(llm)

    asyncio.run(main())


async def last(llm: AsyncLLM, params: SamplingParams, begun: asyncio.Event | None = None) -> RequestOutput:
    async for output in llm.generate(PROMPT, params):
        if begun is not None and len(output.outputs[0].token_ids) > 4:
            begun.set()
    return output


def test_running_requests_continue_with_the_new_weights(weights: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        begun = asyncio.Event()
        running = asyncio.create_task(last(llm, LONG, begun))
        await begun.wait()
        update = await llm.update_weights(weights[2])
        [choice] = (await running).outputs
        (start, old), (change, new) = choice.weight_versions
        assert (start, old, new) == (0, 0, update.version) and 4 < change < 60
        assert choice.finish_reason == "length"
        # Up to there they are those of the old weights; whatever follows was made on their keys and values.
        assert REFERENCES[0].error(PROMPT, choice.token_ids[:change], change) is None
        check(await last(llm, GREEDY), 1)

    run(work, weights)


def test_running_requests_finish_with_the_old_weights_while_new_ones_wait(weights: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        begun = asyncio.Event()
        running = asyncio.create_task(last(llm, LONG, begun))
        await begun.wait()
        updates = [asyncio.create_task(llm.update_weights(params, running="finish"))
                   for params in (weights[1], weights[2])]
        await asyncio.sleep(0)
        late = asyncio.create_task(last(llm, GREEDY))
        [choice] = (await running).outputs
        assert choice.weight_versions == ((0, 0),) and len(choice.token_ids) == 60
        assert REFERENCES[0].error(PROMPT, choice.token_ids, 60) is None
        assert [(await update).version for update in updates] == [1, 2]
        output = await late
        assert output.outputs[0].weight_versions[0][1] in (1, 2)
        check(await last(llm, GREEDY), 1)

    run(work, weights)


def test_running_requests_are_aborted(weights: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        begun = asyncio.Event()
        running = asyncio.create_task(last(llm, LONG, begun))
        await begun.wait()
        with pytest.raises(ConfigError, match="running must be"):
            await llm.update_weights(weights[2], running="stop")  # type: ignore[arg-type]
        await llm.update_weights(weights[2], running="abort")
        [choice] = (await running).outputs
        assert choice.finish_reason == "abort" and choice.weight_versions == ((0, 0),)
        check(await last(llm, GREEDY), 1)

    run(work, weights)


def test_an_async_engine_sleeps_only_without_requests(weights: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        begun = asyncio.Event()
        running = asyncio.create_task(last(llm, LONG, begun))
        await begun.wait()
        with pytest.raises(RequestError, match="requests are running"):
            await llm.sleep()
        await running
        async with llm.asleep():
            assert (await last(llm, GREEDY)).outputs[0].finish_reason == "error"
            await llm.update_weights(weights[2])
        check(await last(llm, GREEDY), 1)

    run(work, weights)
