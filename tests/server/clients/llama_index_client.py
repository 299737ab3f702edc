"""llama-index: chat, streams, functions and structured output of its class for servers of OpenAI's protocol."""

import asyncio
from typing import Any

import openai
import pytest
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.server.clients.cases import KEY, MODEL, ORDER, WEATHER, Order, script, wait_idle


def make(url: str, *, name: str = "", **more: Any) -> OpenAILike:
    body = {"extra_body": script(name)} if name else {}
    return OpenAILike(**{"model": MODEL, "api_base": f"{url}/v1", "api_key": KEY, "is_chat_model": True,
                         "is_function_calling_model": True, "context_window": 32768, "max_tokens": 512,
                         "temperature": 0, "max_retries": 0, "timeout": 60, "additional_kwargs": body, **more})


def weather(city: str, days: int) -> str:
    """The weather of some days."""
    assert {"city": city, "days": days} == WEATHER
    return "sunny"


TOOL = FunctionTool.from_defaults(weather)


async def test_chat_and_streams(url: str) -> None:
    client = make(url)
    assert client.chat([ChatMessage("Be brief.", role="system"), ChatMessage("chat")]).message.content == (
        "The sea is deep.")
    assert client.complete("chat").text == "The sea is deep."
    parts = list(client.stream_chat([ChatMessage("chat")]))
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content == "The sea is deep."
    stream = await client.astream_chat([ChatMessage("chat")])
    assert "".join([part.delta or "" async for part in stream]) == "The sea is deep."


def test_reasoning(url: str) -> None:
    client = make(url)
    answers = client.chat([ChatMessage("think")]), [*client.stream_chat([ChatMessage("think")])][-1]
    for answer in answers:
        assert answer.message.content == "It is two."
        assert [block.content for block in answer.message.blocks if isinstance(block, ThinkingBlock)] == [
            "The user asks."]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_its_result_and_an_answer(url: str, streamed: bool) -> None:
    client, history = make(url), [ChatMessage("call")]
    answer: Any = [*client.stream_chat_with_tools([TOOL], chat_history=history)][-1] if streamed else \
        client.chat_with_tools([TOOL], chat_history=history)
    [call] = client.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("weather", WEATHER)
    result = TOOL(**call.tool_kwargs)
    history += [answer.message, ChatMessage(result.content, role="tool", additional_kwargs={
        "tool_call_id": call.tool_id})]
    assert client.chat_with_tools([TOOL], chat_history=history).message.content == "Sun in Oslo."


def test_forced_calls(url: str) -> None:
    client = make(url)
    [call] = client.get_tool_calls_from_response(client.chat_with_tools([TOOL], "forced", tool_required=True))
    assert (call.tool_name, call.tool_kwargs) == ("weather", WEATHER)
    assert client.predict_and_call([TOOL], "call").response == "sunny"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", [False, True], ids=["tool", "response_format"])
def test_structured_output(url: str, form: bool, strict: bool) -> None:
    """A required call of one tool, or the form of the answer."""
    client = make(url, name="order" if form else "tool", should_use_structured_outputs=form, strict=strict)
    prompt = PromptTemplate("An order of {what}.")
    assert client.structured_predict(Order, prompt, what="pens") == ORDER
    assert client.as_structured_llm(Order).chat([ChatMessage("An order.")]).raw == ORDER
    if not form:  # its streams do not require the call
        client = make(url, name="own")
    parts = [*client.stream_structured_predict(Order, prompt, what="pens")]
    assert parts[-1].model_dump() == ORDER.model_dump()


async def test_errors(url: str) -> None:
    for more, kind, param in (({"top_p": 2}, openai.BadRequestError, "top_p"),
                              ({"model": "other"}, openai.NotFoundError, "model")):
        with pytest.raises(kind) as failed:
            make(url, additional_kwargs=more).chat([ChatMessage("chat")])
        assert failed.value.param == param
    with pytest.raises(openai.AuthenticationError):
        make(url, api_key="wrong").chat([ChatMessage("chat")])
    with pytest.raises(openai.APITimeoutError):
        make(url, timeout=1, max_tokens=20000).chat([ChatMessage("loop")])
    await asyncio.to_thread(wait_idle, url)


async def test_a_task_that_is_cancelled(url: str) -> None:
    client = make(url, max_tokens=20000)
    task = asyncio.create_task(client.achat([ChatMessage("loop")]))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_idle, url)
