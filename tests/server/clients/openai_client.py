"""openai: its parse, stream and tool helpers, errors, time-outs, and answers that are given up."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients.cases import KEY, MODEL, ORDER, SCRIPTS, WEATHER, WEATHER_TOOL, Order, script, wait_idle


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("chat"), temperature=0)
    assert answer.choices[0].message.content == "The sea is deep." and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len(SCRIPTS["chat"]) + 1
    assert [model.id for model in client.models.list()] == [MODEL]


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user("chat"), temperature=0,
                                        stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == "The sea is deep."
    assert [event.content for event in events if event.type == "content.done"] == ["The sea is deep."]
    assert final.choices[0].message.content == "The sea is deep."
    assert final.usage is not None and final.usage.completion_tokens == len(SCRIPTS["chat"]) + 1


def test_reasoning(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("think"), temperature=0)
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("The user asks.", "It is two.")
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    chunks: list[Any] = [chunk.choices[0].delta for chunk in client.chat.completions.create(
        model=MODEL, messages=user("think"), temperature=0, stream=True)]
    assert "".join(getattr(chunk, "reasoning_content", None) or "" for chunk in chunks) == "The user asks."
    assert "".join(chunk.content or "" for chunk in chunks) == "It is two."


def test_a_call_its_result_and_an_answer(client: openai.OpenAI) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Order, name="order"), WEATHER_TOOL]
    messages = user("call")
    answer = client.chat.completions.parse(model=MODEL, messages=messages, tools=tools, temperature=0)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
    [call] = message.tool_calls or []
    assert (call.function.name, call.function.parsed_arguments) == ("weather", WEATHER)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, tools=tools,
                                          temperature=0).choices[0].message.content == "Sun in Oslo."


def test_streamed_calls(client: openai.OpenAI) -> None:
    tools: list[Any] = [WEATHER_TOOL]
    with client.chat.completions.stream(model=MODEL, messages=user("calls"), tools=tools, temperature=0) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    cities = [WEATHER, {"city": "Rome", "days": 1}]
    assert [event.parsed_arguments for event in done] == cities and [event.index for event in done] == [0, 1]
    assert [call.function.parsed_arguments for call in final.message.tool_calls or ()] == cities
    assert final.finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "order"}}])
def test_forced_calls(client: openai.OpenAI, choice: Any) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Order, name="order"), WEATHER_TOOL]
    name = "forced" if choice == "required" else "order"
    answer = client.chat.completions.parse(model=MODEL, messages=user(name), tools=tools, tool_choice=choice,
                                           temperature=0)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == (WEATHER if choice == "required" else ORDER)
    with client.chat.completions.stream(model=MODEL, messages=user(name), tools=tools, tool_choice=choice,
                                        temperature=0) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == (WEATHER if choice == "required" else ORDER)


@pytest.mark.parametrize(("name", "reasoning"), [("order", None), ("thought", "An order it is.")])
def test_structured_output(client: openai.OpenAI, name: str, reasoning: str | None) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=user(name), response_format=Order, temperature=0)
    message: Any = answer.choices[0].message
    assert message.parsed == ORDER and getattr(message, "reasoning_content", None) == reasoning
    with client.chat.completions.stream(model=MODEL, messages=user(name), response_format=Order,
                                        temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == ORDER


def test_an_answer_that_the_limit_cuts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=user("order"), response_format=Order, max_tokens=2,
                                      temperature=0)


def test_errors(client: openai.OpenAI, url: str) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=MODEL, messages=user("chat"), temperature=-1)
    assert bad.value.param == "temperature" and "temperature" in bad.value.message
    with pytest.raises(openai.BadRequestError) as form:
        ask(model=MODEL, messages=user("chat"), response_format={"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "string", "pattern": "(?=a)b"}}})
    assert form.value.param == "response_format" and "look-ahead" in form.value.message
    with pytest.raises(openai.BadRequestError) as long:
        ask(model=MODEL, messages=user("a" * 40000))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as name:
        ask(model="other", messages=user("chat"))
    assert (name.value.param, name.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as late:
        ask(model=MODEL, messages=user("chat"), stream=True, top_p=2)
    assert late.value.param == "top_p"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger, \
            pytest.raises(openai.AuthenticationError) as key:
        stranger.chat.completions.create(model=MODEL, messages=user("chat"))
    assert key.value.code == "invalid_api_key"


def test_time_out(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).chat.completions.create(model=MODEL, messages=user("loop"), temperature=0)
    wait_idle(url)


def test_a_stream_that_is_closed(client: openai.OpenAI, url: str) -> None:
    with client.chat.completions.create(model=MODEL, messages=user("loop"), temperature=0, stream=True) as stream:
        assert next(chunk for chunk in stream if chunk.choices[0].delta.content)
    wait_idle(url)


async def test_a_task_that_is_cancelled(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        task = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=user("loop"), temperature=0))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        wait_idle(url)
        answers = await asyncio.gather(*(client.chat.completions.create(
            model=MODEL, messages=user("any"), temperature=0, extra_body=script("chat")) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {"The sea is deep."}
