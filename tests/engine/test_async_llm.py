"""AsyncLLM as users type it, on a tiny model."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpaged import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.core.errors import ConfigError, ContextLengthError, EngineDeadError, OverloadedError, RequestError
from jaxpaged.core.messages import Shutdown
from jaxpaged.engine.loop import EngineCall
from jaxpaged.execution.model_runner import ModelRunner
from tests.support.tiny_llama import ENGINE_ARGS, random_prompt
from tests.support.tiny_llm import GAUGES, GREEDY, REFERENCE, check_greedy, large_arrays

Use = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture(scope="module")
def use(model_path: Path) -> Callable[[Use], None]:
    """Runs a coroutine function on a fresh AsyncLLM, within a time limit, and ends the AsyncLLM."""

    def run(work: Use) -> None:
        async def main() -> None:
            async with AsyncLLM(model=str(model_path), **ENGINE_ARGS) as llm, asyncio.timeout(60):
                await work(llm)

        asyncio.run(main())

    return run


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def until_idle(llm: AsyncLLM) -> None:
    """Wait until the engine has nothing to do and has given all blocks back."""
    while llm._streams or llm._num_live or any(llm.get_metrics()[name] for name in GAUGES):
        await asyncio.sleep(0.01)


LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def test_concurrent_streams(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        prompts = [random_prompt(3 + 5 * number, number) for number in range(8)]
        streams = [llm.generate({"prompt_token_ids": prompt}, GREEDY) for prompt in prompts]
        results = await asyncio.gather(*map(collect, streams))
        for prompt, outputs in zip(prompts, results, strict=True):
            assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))
            assert [output.finished for output in outputs] == [False] * 7 + [True]
            assert list(outputs[-1].prompt_token_ids) == prompt
            check_greedy(outputs[-1:])
        assert len({outputs[0].request_id for outputs in results}) == 8
        await until_idle(llm)
        assert llm.get_metrics()["vllm:request_success"] == 8

    use(work)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_a_stream_holds(use: Callable[[Use], None], kind: RequestOutputKind) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True, output_kind=kind)
        outputs = await collect(llm.generate("hello", params, "mine"))
        assert {output.request_id for output in outputs} == {"mine"} and outputs[-1].finished
        whole = await collect(llm.generate("hello", SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True)))
        wanted = whole[-1].outputs
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        if kind is not RequestOutputKind.DELTA:
            assert outputs[-1].outputs == wanted
            return
        for index in range(2):
            parts = [choice for output in outputs for choice in output.outputs if choice.index == index]
            assert "".join(part.text for part in parts) == wanted[index].text
            assert sum((part.token_ids for part in parts), ()) == wanted[index].token_ids
            assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]

    use(work)


def test_abort_ends_a_stream_with_what_it_has(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        other = asyncio.create_task(collect(llm.generate([9, 9], GREEDY)))
        outputs = []
        async for output in llm.generate([1, 2], LONG, "mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("mine")
                await llm.abort("mine")
                await llm.abort("unknown")
        [choice] = outputs[-1].outputs
        assert outputs[-1].finished and choice.finish_reason == "abort" and 3 <= len(choice.token_ids) < 100
        assert REFERENCE.error([1, 2], choice.token_ids) is None
        check_greedy((await other)[-1:])
        await until_idle(llm)
        await llm.abort("mine")
        check_greedy((await collect(llm.generate([1, 2], GREEDY, "mine")))[-1:])

    use(work)


def test_abort_reaches_a_request_whose_prompt_is_still_being_read(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm.generate([1, 2], LONG, "mine")))
        await asyncio.sleep(0)  # it has begun and waits for its prompt to be processed
        await llm.abort("mine")
        outputs = await task
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await until_idle(llm)

    use(work)


def test_leaving_a_stream_early_stops_the_request(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        async for _ in llm.generate([1, 2], LONG):
            break
        await until_idle(llm)
        task = asyncio.create_task(collect(llm.generate([3], LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)
        assert llm.get_metrics()["vllm:generation_tokens"] < 200
        check_greedy((await collect(llm.generate([3], GREEDY)))[-1:])

    use(work)


def test_bad_requests_disturb_nobody(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate([1, 2], LONG, "mine")))
        await asyncio.sleep(0.01)
        for prompt, params, error in (
            ("", GREEDY, RequestError), ([1] * 125, GREEDY, ContextLengthError),
            ([1], SamplingParams(logprobs=21), RequestError),
        ):
            with pytest.raises(error):
                await collect(llm.generate(prompt, params))
        with pytest.raises(RequestError, match="request_id"):
            await collect(llm.generate([5], LONG, "mine"))
        check_greedy((await running)[-1:], 100)

    use(work)


def test_a_full_queue_refuses(model_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(model=str(model_path), **ENGINE_ARGS, max_waiting_requests=2) as llm, asyncio.timeout(60):
            tasks = [asyncio.create_task(collect(llm.generate([1, 2], LONG))) for _ in range(5)]
            while llm._num_live < 5:
                await asyncio.sleep(0)
            with pytest.raises(OverloadedError):  # each choice counts
                await collect(llm.generate([1, 2], SamplingParams(n=2, max_tokens=8)))
            tasks.append(asyncio.create_task(collect(llm.generate([1, 2], LONG))))
            while llm._num_live < 6:
                await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await collect(llm.generate([1, 2], GREEDY))
            for task in tasks:
                check_greedy((await task)[-1:], 100)
            check_greedy((await collect(llm.generate([1, 2], GREEDY)))[-1:])

    asyncio.run(main())


def test_a_priority_is_refused_unless_the_policy_looks_at_it(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="priority"):
            await collect(llm.generate([1, 2], GREEDY, priority=3))

    use(work)


def test_shutdown_ends_what_is_running(model_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(model=str(model_path), **ENGINE_ARGS)
        tasks = [asyncio.create_task(collect(llm.generate([number], LONG))) for number in range(6)]
        while not llm._streams:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(30):
            await asyncio.to_thread(llm.shutdown)
            for task in tasks:
                with pytest.raises(EngineDeadError, match="shut down"):
                    await task
            with pytest.raises(EngineDeadError, match="shut down"):
                await collect(llm.generate([1], GREEDY))
            await asyncio.to_thread(llm.shutdown)

    asyncio.run(main())


def test_shutting_down_an_asyncllm_frees_the_model(model_path: Path) -> None:
    async def main() -> None:
        before = large_arrays()
        llm = AsyncLLM(model=str(model_path), **ENGINE_ARGS)
        check_greedy((await collect(llm.generate([1, 2], GREEDY)))[-1:])
        assert len(large_arrays(before)) > 10
        await asyncio.to_thread(llm.shutdown)
        assert not large_arrays(before)

    asyncio.run(main())


def test_a_name_can_be_used_again_at_once(use: Callable[[Use], None]) -> None:
    """Even while the engine still delivers the end of the request that had it before."""
    async def work(llm: AsyncLLM) -> None:
        for number in range(5):
            async with contextlib.aclosing(llm.generate([number, 2], LONG, "mine")) as stream:
                async for output in stream:
                    if len(output.outputs[0].token_ids) == number + 1:
                        break
            outputs = await collect(llm.generate([number, 3], GREEDY, "mine"))
            assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))
            check_greedy(outputs[-1:])

    use(work)


def test_shutdown_reaches_a_request_whose_prompt_is_still_being_read(model_path: Path) -> None:
    """It must get an answer, not wait for an engine that is gone."""
    async def main() -> None:
        llm = AsyncLLM(model=str(model_path), **ENGINE_ARGS)
        await collect(llm.generate([1], GREEDY))
        task = asyncio.create_task(collect(llm.generate([1], GREEDY)))
        await asyncio.sleep(0)  # it has begun and waits for its prompt to be processed
        llm.shutdown()
        async with asyncio.timeout(10):
            with pytest.raises(EngineDeadError, match="shut down"):
                await task

    asyncio.run(main())


def test_an_engine_that_fails_says_so_to_everyone(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm = AsyncLLM(model=str(model_path), **ENGINE_ARGS)

        def broken(self: ModelRunner, step: Any) -> Any:
            raise ValueError("the device is on fire")

        monkeypatch.setattr(ModelRunner, "dispatch", broken)
        async with asyncio.timeout(30):
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="ValueError: the device is on fire"):
                    await collect(llm.generate([1], GREEDY))
            await asyncio.to_thread(llm.shutdown)

    asyncio.run(main())


def test_asyncllm_takes_new_weights_between_steps(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        async def greedy() -> tuple[int, ...]:
            return (await collect(llm.generate([5, 6, 7], GREEDY)))[-1].outputs[0].token_ids

        old = await llm.get_params()
        first = await greedy()
        running = asyncio.create_task(collect(llm.generate([1, 2], LONG)))
        await llm.update_weights(jax.tree.map(lambda leaf: leaf * 0 + 1, old))
        changed = await greedy()
        assert changed != first
        with pytest.raises(ConfigError):
            await llm.update_weights({"embed": old["embed"]})
        await llm.update_weights(old)
        assert await greedy() == first
        assert len((await running)[-1].outputs[0].token_ids) == 100
        await until_idle(llm)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError):
            await llm.update_weights(old)

    use(work)


def test_another_event_loop_may_continue(model_path: Path) -> None:
    llm = AsyncLLM(model_path, **ENGINE_ARGS)

    async def one() -> None:
        async with asyncio.timeout(30):
            check_greedy((await collect(llm.generate([1, 2], GREEDY)))[-1:])

    async def beside_another() -> None:
        running = asyncio.create_task(collect(llm.generate([1, 2], LONG)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, one())
        check_greedy((await running)[-1:], 100)

    for _ in range(2):
        asyncio.run(one())
    asyncio.run(beside_another())
    asyncio.run(one())
    llm.shutdown()


def test_what_comes_after_shutdown_in_one_batch_is_answered(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        llm._inbox.put(Shutdown())
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.get_params()

    use(work)


def test_a_call_that_nobody_waits_for_any_more_does_no_harm(use: Callable[[Use], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        release = threading.Event()
        llm._inbox.put(EngineCall(lambda engine: release.wait(30)))
        call = asyncio.create_task(llm.get_params())
        await asyncio.sleep(0)  # it has asked, and the engine has not answered
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        release.set()
        check_greedy((await collect(llm.generate([1, 2], GREEDY)))[-1:])

    use(work)
