"""litellm: as its providers `openai`, for any server of that protocol, and `hosted_vllm`."""

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.server.clients.cases import KEY, MODEL, ORDER, SCRIPTS, WEATHER, WEATHER_TOOL, Order, script, wait_idle

PROVIDERS = ["openai", "hosted_vllm"]


@pytest.fixture(params=PROVIDERS)
def options(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"model": f"{request.param}/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0,
            "max_retries": 0, "timeout": 60}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def whole(chunks: Any) -> Any:
    return litellm.stream_chunk_builder(list(chunks))


async def test_chat_and_streams(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=user("chat"), **options)
    assert answer.choices[0].message.content == "The sea is deep."
    assert answer.usage.completion_tokens == len(SCRIPTS["chat"]) + 1
    built = whole(litellm.completion(messages=user("chat"), stream=True, stream_options={"include_usage": True},
                                     **options))
    assert built.choices[0].message.content == "The sea is deep." and built.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == len(SCRIPTS["chat"]) + 1
    stream: Any = await litellm.acompletion(messages=user("chat"), stream=True, **options)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "The sea is deep."


def test_reasoning(options: dict[str, Any]) -> None:
    for streamed in (False, True):
        answer: Any = litellm.completion(messages=user("think"), stream=streamed, **options)
        message = (whole(answer) if streamed else answer).choices[0].message
        assert (message.reasoning_content, message.content) == ("The user asks.", "It is two.")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_its_result_and_an_answer(options: dict[str, Any], streamed: bool) -> None:
    messages = user("call")
    answer: Any = litellm.completion(messages=messages, tools=[WEATHER_TOOL], stream=streamed, **options)
    answer = whole(answer) if streamed else answer
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == WEATHER
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = litellm.completion(messages=messages, tools=[WEATHER_TOOL], **options)
    assert answer.choices[0].message.content == "Sun in Oslo."


@pytest.mark.parametrize(("choice", "name"), [
    ("required", "forced"), ({"type": "function", "function": {"name": "weather"}}, "arguments")])
def test_forced_calls(options: dict[str, Any], choice: Any, name: str) -> None:
    answer: Any = litellm.completion(messages=user(name), tools=[WEATHER_TOOL], tool_choice=choice, **options)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == WEATHER


@pytest.mark.parametrize("name", ["order", "thought"])
def test_structured_output(options: dict[str, Any], name: str) -> None:
    for streamed in (False, True):
        answer: Any = litellm.completion(messages=user(name), response_format=Order, stream=streamed, **options)
        text = (whole(answer) if streamed else answer).choices[0].message.content
        assert Order.model_validate_json(text) == ORDER


def test_parameters_of_the_server(options: dict[str, Any]) -> None:
    """Those that OpenAI does not have."""
    answer: Any = litellm.completion(messages=user("any"), extra_body={
        **script("chat"), "structured_outputs": {"choice": ["The sea is deep.", "No."]}}, **options)
    assert answer.choices[0].message.content == "The sea is deep."


async def test_errors(options: dict[str, Any], url: str) -> None:
    for more, kind, text in (
            ({"top_p": 2}, litellm.BadRequestError, "top_p"),
            ({"messages": user("a" * 40000)}, litellm.ContextWindowExceededError, "maximum context length"),
            ({"model": options["model"][:-1] + "other"}, litellm.NotFoundError, "no such model"),
            ({"api_key": "wrong"}, litellm.AuthenticationError, "key"),
            ({"messages": user("loop"), "timeout": 1}, litellm.Timeout, "imed? ?out")):
        with pytest.raises(kind, match=text):
            litellm.completion(**{"messages": user("chat"), **options, **more})
        with pytest.raises(kind, match=text):
            await litellm.acompletion(**{"messages": user("chat"), **options, **more})
    await asyncio.to_thread(wait_idle, url)


async def test_a_task_that_is_cancelled(options: dict[str, Any], url: str) -> None:
    task = asyncio.create_task(litellm.acompletion(messages=user("loop"), **options))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_idle, url)
