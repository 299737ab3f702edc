"""instructor: an object in each of its modes, whole, in parts and as a list, and what it makes of failures."""

from collections.abc import Iterable, Iterator
from typing import Any

import instructor
import openai
import pytest
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, field_validator

from tests.server.clients.cases import KEY, MODEL, ORDER, SCRIPTS, WEATHER, Order, script, wait_idle

MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON]


class weather(BaseModel):  # the name of the function
    """The weather of some days."""

    city: str
    days: int


@pytest.fixture
def plain(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


def asking(name: str, **more: Any) -> dict[str, Any]:
    """The library adds to the last message, so that the script is named beside it."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "An order."}], "temperature": 0, "max_retries": 0,
            "extra_body": script(name), **more}


def same(found: Any) -> bool:
    """Whether it is the order; the library's objects know their answer, too, so that they differ."""
    return isinstance(found, BaseModel) and found.model_dump() == ORDER.model_dump()


@pytest.mark.parametrize("mode", MODES)
def test_structured_output(plain: openai.OpenAI, mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain, mode=mode)
    order, answer = client.create_with_completion(response_model=Order, **asking("order"))
    assert same(order) and answer.usage.completion_tokens >= len(SCRIPTS["order"])


@pytest.mark.parametrize("mode", MODES)
def test_streamed_parts(plain: openai.OpenAI, mode: instructor.Mode) -> None:
    parts = list(instructor.from_openai(plain, mode=mode).create_partial(
        response_model=Order, strict=False, **asking("order")))  # strict ones take no dates from JSON
    assert same(parts[-1])


def test_chat(plain: openai.OpenAI) -> None:
    client = instructor.from_openai(plain)
    assert client.create(response_model=None, **asking("chat")).choices[0].message.content == "The sea is deep."
    assert client.create(response_model=str, **asking("text")) == "Hello"


def test_structured_output_behind_reasoning(plain: openai.OpenAI) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    order, answer = client.create_with_completion(response_model=Order, **asking("thought"))
    assert same(order) and answer.choices[0].message.reasoning_content == "An order it is."


def test_calls(plain: openai.OpenAI) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
    calls = list(client.create(response_model=Iterable[weather], **asking("calls")))
    assert [call.model_dump() for call in calls] == [WEATHER, {"city": "Rome", "days": 1}]


def test_a_list(plain: openai.OpenAI) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        items = instructor.from_openai(plain, mode=mode).create_iterable(response_model=weather, **asking("list"))
        assert [item.model_dump() for item in items] == [WEATHER, {"city": "Rome", "days": 1}]


@pytest.mark.parametrize("mode", MODES)
def test_a_second_try(plain: openai.OpenAI, mode: instructor.Mode) -> None:
    """The first answer goes back with what is wrong with it, and the server takes both."""
    tries = []

    class Checked(Order):
        @field_validator("code")
        @classmethod
        def check(cls, value: object) -> object:
            tries.append(value)
            if len(tries) == 1:
                raise ValueError("not yet")
            return value

    order = instructor.from_openai(plain, mode=mode).create(response_model=Checked, **asking("order", max_retries=1))
    assert same(order) and tries == ["A7"] * 2


def test_errors(plain: openai.OpenAI, url: str) -> None:
    client = instructor.from_openai(plain)
    for more, kind, param in (({"top_p": 2}, openai.BadRequestError, "top_p"),
                              ({"model": "other"}, openai.NotFoundError, "model")):
        assert getattr(cause(client, **more), "param", None) == param and isinstance(cause(client, **more), kind)
    assert isinstance(cause(instructor.from_openai(plain.with_options(api_key="wrong"))), openai.AuthenticationError)
    with pytest.raises(IncompleteOutputException):
        client.create(response_model=Order, **asking("order", max_tokens=2))
    with pytest.raises(openai.APITimeoutError):
        client.create(response_model=None, **asking("loop", timeout=1))
    wait_idle(url)


def cause(client: instructor.Instructor, **more: Any) -> BaseException | None:
    """The error of openai behind that of the library."""
    with pytest.raises(InstructorRetryException) as failed:
        client.create(response_model=Order, **asking("order", **more))
    error: BaseException | None = failed.value
    while error is not None and not isinstance(error, openai.APIError):
        error = error.__cause__ or error.__context__
    return error
