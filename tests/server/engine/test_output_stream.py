"""Outputs on their way from the engine to a client that reads at any speed."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.errors import EngineDeadError
from jaxpaged.core.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.server.engine.output_stream import OutputStream, merge_outputs


def delta(request: str, choice: int, text: str, ids: tuple[int, ...], finish: Any = None) -> RequestOutput:
    logprobs = tuple({number: Logprob(-float(number), 1)} for number in ids)
    output = CompletionOutput(choice, text, ids, finish_reason=finish, logprobs=logprobs, text_offsets=ids)
    return RequestOutput(request, None, (1,), (output,), finish is not None)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9)),
                          st.booleans()), max_size=200))
def test_a_reader_of_any_speed_gets_everything_once_and_in_order(steps: list[Any]) -> None:
    async def run() -> None:
        stream = OutputStream(6)
        sent: dict[Any, list[Any]] = {}
        got: dict[Any, list[Any]] = {}
        waiting = False

        async def take() -> None:
            for output in await stream.get():
                for choice in output.outputs:
                    key = output.request_id, choice.index
                    before = got.get(key, ["", (), (), ()])
                    added = choice.text, choice.token_ids, choice.logprobs, choice.text_offsets
                    got[key] = [old + new for old, new in zip(before, added, strict=True)]

        for request, choice, text, ids, reads in steps:
            stream.put(delta(request, choice, text, tuple(ids)))
            before = sent.get((request, choice), ["", (), (), ()])
            added = text, tuple(ids), tuple({number: Logprob(-float(number), 1)} for number in ids), tuple(ids)
            sent[request, choice] = [old + new for old, new in zip(before, added, strict=True)]
            waiting = True
            if reads:
                await take()
                waiting = False
        if waiting:
            await take()
        assert got == sent

    asyncio.run(run())


def test_a_reader_that_does_not_read_costs_little() -> None:
    async def run() -> None:
        stream = OutputStream(1)
        stream.running["a"] = 1
        for number in range(10_000):
            stream.put(delta("a", 0, "x", (number,)))
        assert sum(map(len, stream._new_outputs.values())) < 100
        stream.put(delta("a", 0, "end", (), "stop"))
        stream.end("a")
        [output] = await stream.get_all()
        assert output.outputs[0].text == "x" * 10_000 + "end" and output.finished
        assert output.outputs[0].token_ids == tuple(range(10_000)) and stream.admitted == 0

    asyncio.run(run())


def test_a_failed_stream_raises_for_every_reader() -> None:
    async def run() -> None:
        stream = OutputStream(1)
        readers = [asyncio.create_task(stream.get()), asyncio.create_task(stream.get_all())]
        await asyncio.sleep(0)
        stream.fail(EngineDeadError("gone"))
        stream.fail(ValueError("later"))
        for reader in readers:
            with pytest.raises(EngineDeadError):
                await reader

    asyncio.run(run())


def test_merging_keeps_the_newest_state() -> None:
    merged = merge_outputs([delta("a", 1, "x", (1,)), delta("a", 0, "y", (2,)), delta("a", 1, "z", (3,), "stop")])
    assert merged.finished
    assert [(choice.index, choice.text, choice.token_ids, choice.finish_reason) for choice in merged.outputs] == [
        (0, "y", (2,), None), (1, "xz", (1, 3), "stop")]
