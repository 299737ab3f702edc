"""langchain-openai: chat, streaming, tools and structured output by each of its methods."""

from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.server.clients.cases import KEY, MODEL, ORDER, SCRIPTS, WEATHER, Order, script, wait_idle


@tool
def weather(city: str, days: int) -> str:
    """The weather of some days."""
    assert {"city": city, "days": days} == WEATHER
    return "sunny"


@pytest.fixture
def chat(url: str) -> Any:
    return make_chat(url)


def make_chat(url: str, **more: Any) -> Any:
    return ChatOpenAI(**{"model": MODEL, "base_url": f"{url}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0,
                         "timeout": 60, **more})


def test_chat(chat: Any) -> None:
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("chat")])
    assert answer.content == "The sea is deep." and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == len(SCRIPTS["chat"]) + 1
    assert [answer.content for answer in chat.batch(["chat", "sunny"])] == ["The sea is deep.", "Sun in Oslo."]


async def test_streams(chat: Any) -> None:
    assert "".join(chunk.content for chunk in chat.stream("chat")) == "The sea is deep."
    whole: Any = None
    async for chunk in chat.astream("chat", stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessageChunk) and whole.content == "The sea is deep."
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == len(SCRIPTS["chat"]) + 1


def test_reasoning_is_counted_and_kept_out_of_the_answer(chat: Any) -> None:
    """This client reads the reasoning's text from no server, and its number of tokens from all."""
    answer = chat.invoke("think")
    assert answer.content == "It is two." and answer.usage_metadata["output_token_details"]["reasoning"] == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_its_result_and_an_answer(chat: Any, streamed: bool) -> None:
    able = chat.bind_tools([weather])
    messages: list[Any] = [HumanMessage("call")]
    answer = sum_of(able.stream(messages)) if streamed else able.invoke(messages)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", WEATHER) and not answer.invalid_tool_calls
    messages += [answer, weather.invoke(call)]
    assert messages[-1].content == "sunny"
    assert (sum_of(able.stream(messages)) if streamed else able.invoke(messages)).content == "Sun in Oslo."


def sum_of(chunks: Any) -> Any:
    first = next(chunks)
    return sum(chunks, first)


@pytest.mark.parametrize(("choice", "name"), [("weather", "weather"), ("any", "forced"), ("required", "forced")])
def test_forced_calls(chat: Any, choice: str, name: str) -> None:
    able = chat.bind_tools([weather], tool_choice=choice, strict=True)
    if name == "weather":
        name = "arguments"
    [call] = able.invoke(name).tool_calls
    assert (call["name"], call["args"]) == ("weather", WEATHER)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat: Any, method: Literal["json_schema", "function_calling", "json_mode"]) -> None:
    able = chat.with_structured_output(Order, method=method, include_raw=True)
    found = able.invoke("order")
    assert found["parsed"] == ORDER and found["parsing_error"] is None
    assert list(chat.with_structured_output(Order, method=method).stream("order"))[-1] == ORDER


def test_structured_output_behind_reasoning(chat: Any) -> None:
    assert chat.with_structured_output(Order, method="json_schema").invoke("thought") == ORDER


def test_errors(url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        make_chat(url, top_p=2).invoke("chat")
    assert bad.value.param == "top_p"
    with pytest.raises(ContextOverflowError):  # for those who shorten the prompt and try again
        make_chat(url).invoke("a" * 40000)
    with pytest.raises(openai.NotFoundError):
        make_chat(url, model="other").invoke("chat")
    with pytest.raises(openai.AuthenticationError):
        make_chat(url, api_key="wrong").invoke("chat")
    with pytest.raises(openai.APITimeoutError):
        make_chat(url, timeout=1).invoke("loop")
    wait_idle(url)


def test_extra_parameters_and_a_stream_that_is_closed(url: str) -> None:
    stream = make_chat(url, extra_body=script("loop")).stream("any")
    assert next(chunk for chunk in stream if chunk.content).content.startswith("la")
    stream.close()
    wait_idle(url)
