"""pydantic-ai: agents whose answer is text, a form, or a call of an output tool; tools, streams, errors."""

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelHTTPError, ModelTimeoutError
from pydantic_ai.messages import ModelResponse, ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.server.clients.cases import KEY, MODEL, ORDER, SCRIPTS, WEATHER, Order, script, wait_idle


def agent(url: str, *, model: str = MODEL, key: str = KEY, **more: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    settings = {"temperature": 0, "timeout": 60, **more.pop("model_settings", {})}
    return Agent(OpenAIChatModel(model, provider=provider), model_settings=settings, retries=0, **more)


async def weather(city: str, days: int) -> str:
    """The weather of some days."""
    assert {"city": city, "days": days} == WEATHER
    return "sunny"


async def test_chat(url: str) -> None:
    done = await agent(url, instructions="Be brief.").run("chat")
    assert done.output == "The sea is deep." and done.usage.output_tokens == len(SCRIPTS["chat"]) + 1


async def test_stream(url: str) -> None:
    async with agent(url).run_stream("chat") as run:
        assert "".join([delta async for delta in run.stream_text(delta=True, debounce_by=None)]) == "The sea is deep."
        assert run.usage.output_tokens == len(SCRIPTS["chat"]) + 1


async def test_reasoning(url: str) -> None:
    """It is read from whole answers and from streams, and sent back with the next turn."""
    talker = agent(url)
    done = await talker.run("think")
    assert done.output == "It is two." and thoughts(done) == ["The user asks."]
    async with talker.run_stream("think", message_history=done.all_messages()) as run:
        assert await run.get_output() == "It is two."
        assert thoughts(run) == ["The user asks."] * 2


def thoughts(run: Any) -> list[str]:
    return [part.content for message in run.all_messages() if isinstance(message, ModelResponse)
            for part in message.parts if isinstance(part, ThinkingPart)]


async def test_a_call_its_result_and_an_answer(url: str) -> None:
    able = agent(url, tools=[weather])
    assert (await able.run("call")).output == "Sun in Oslo."
    async with able.run_stream("call") as run:
        assert await run.get_output() == "Sun in Oslo."


@pytest.mark.parametrize(("output", "name"), [
    (NativeOutput(Order, strict=True), "order"), (NativeOutput(Order), "thought"), (PromptedOutput(Order), "order"),
    (ToolOutput(Order), "final"), (ToolOutput(Order, strict=True), "final")])
@pytest.mark.parametrize("tools", [[], [weather]], ids=["alone", "beside a tool"])
async def test_structured_output(url: str, output: Any, name: str, tools: list[Any]) -> None:
    able = agent(url, output_type=output, tools=tools)
    assert (await able.run(name)).output == ORDER
    async with able.run_stream(name) as run:
        assert [found async for found in run.stream_output()][-1] == ORDER


@pytest.mark.parametrize(("output", "call", "then"), [
    (NativeOutput(Order), "call", "order"), (ToolOutput(Order), "forced", "final")])
async def test_a_call_before_the_structured_output(url: str, output: Any, call: str, then: str) -> None:
    """Each turn has both the tools and the form of the answer."""
    async def lookup(city: str, days: int) -> str:
        return then

    lookup.__name__ = "weather"
    done = await agent(url, output_type=output, tools=[lookup]).run(call)
    assert done.output == ORDER and done.usage.tool_calls == 1


async def test_errors(url: str) -> None:
    for more, status, field in (({"model_settings": {"top_p": 2}}, 400, "top_p"), ({"model": "other"}, 404, "model"),
                                ({"key": "wrong"}, 401, None)):
        with pytest.raises(ModelHTTPError) as failed:
            await agent(url, **more).run("chat")
        body: Any = failed.value.body
        assert failed.value.status_code == status and body["param"] == field, body
    with pytest.raises(ModelContextWindowExceededError):
        await agent(url).run("a" * 40000)
    with pytest.raises(ModelTimeoutError):
        await agent(url, model_settings={"timeout": 1}).run("loop")
    await asyncio.to_thread(wait_idle, url)


async def test_a_run_that_is_cancelled(url: str) -> None:
    talker = agent(url, model_settings={"extra_body": script("loop")})
    task = asyncio.create_task(talker.run("any"))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_idle, url)
    async with talker.run_stream("any") as run:
        async for _ in run.stream_text(delta=True, debounce_by=None):
            break
    await asyncio.to_thread(wait_idle, url)
