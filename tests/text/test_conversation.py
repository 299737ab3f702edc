"""Which messages are taken, and what chat templates get of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.errors import RequestError
from jaxpaged.text.conversation import normalize_messages


def test_good_messages() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Bo"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": [1]}"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": None}},
            {"id": "3", "type": "function", "function": {"name": "h", "arguments": ""}},
            {"id": "4", "type": "function", "function": {"name": "i", "arguments": {"y": 2}}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "reasoning_content": "hm", "unknown": 1, "refusal": "", "function_call": None},
        {"role": "user", "content": ""},
    ]
    found = normalize_messages(messages)
    assert found == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Bo"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
            {"id": "3", "type": "function", "function": {"name": "h", "arguments": {}}},
            {"id": "4", "type": "function", "function": {"name": "i", "arguments": {"y": 2}}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"}, {"role": "user", "content": ""}]
    assert normalize_messages(found) == found


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize("message", [
    5, "text", None, [], {}, {"content": "a"}, {"role": None, "content": "a"}, {"role": 5, "content": "a"},
    {"role": ["user"], "content": "a"}, {"role": "wizard", "content": "a"}, {"role": "User", "content": "a"},
    {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": 5},
    {"role": "user", "content": {"type": "text", "text": "a"}}, {"role": "user", "content": ["a"]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
    {"role": "user", "content": [{"text": "a"}]}, {"role": "user", "content": [{"type": "text", "text": None}]},
    {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": "a", "name": 5},
    {"role": "tool", "content": "a", "tool_call_id": 5}, {"role": "user", "content": "a", "tool_calls": [{}]},
    {"role": "assistant", "tool_calls": "f"}, {"role": "assistant", "tool_calls": [5]},
    {"role": "assistant", "tool_calls": [{"id": "1"}]}, call(name=5, arguments="{}"), call(name="f", arguments="{"),
    call(name="f", arguments="[1]"), call(name="f", arguments="5"), call(name="f", arguments="\"text\""),
    {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "", "audio": {"id": "1"}},
    call(name="f", arguments='{"a": NaN}'), call(name="f", arguments=[1]), call(name="f", arguments=5),
    call(name="f", arguments="[" * 100_000),
])
def test_bad_messages(message: object) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages([{"role": "user", "content": "fine"}, message])
    assert caught.value.param == "messages" and "messages[1]" in str(caught.value)
    assert "http" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("messages", [None, [], {}, "text", {"role": "user", "content": "a"}, 5])
def test_bad_conversations(messages: object) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages(messages)
    assert caught.value.param == "messages"


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                               st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"])
                               | st.text(max_size=2), inner, max_size=4), max_leaves=8)


@given(messages=json_values)
def test_any_json_gives_messages_or_a_request_error(messages: Any) -> None:
    try:
        found = normalize_messages(messages)
    except RequestError:
        return
    for message in found:
        parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        assert all(isinstance(part["text"], str) for part in parts)
