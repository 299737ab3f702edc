"""Tools, reasoning and templates over HTTP: a model made to write calls, OpenAI's own client library to read them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.live_server import LiveServer
from tests.support.scripted_model import write_scripted_model

SCRIPTS = {
    "call": ["Let me see.\n", "<tool_call>\n", '{"name": "weather", ', '"arguments": {"city": "Par', 'is", ',
             '"days": 2}', "}\n", "</tool_call>"],
    "two": ["<tool_call>", '{"name": "weather", "arguments": {"city": "Rome"}}', "</tool_call>\n",
            "<tool_call>\n\n", '{"name": "clock"', "}", "\n</tool_call>"],
    "think": ["<think>\n", "The user greets", " me.", "\n</think>", "\n\n", "Hello", "!"],
    "both": ["<think>", "A tool helps.", "</think>", "<tool_call> ", '{"arguments": {"city": "Oslo"}',
             ', "name": "weather" }', "</tool_call> "],
    "rest": [" so 2.", "</th", "ink>", " It is", " 2."],
    "ask": ["<tool_call>\n ", '{"name": "weather", "arguments": {"city": "Oslo"}}', "\n </tool_call>"],
    "form": ['{"city": ', '"Rome"}'],
    "words": ["Just", " words", " <tool", " and <|", "tool_call>"],
}
TOOLS: list[Any] = [{"type": "function", "function": {
    "name": name, "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
    for name in ("weather", "clock")]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(folder / "model", SCRIPTS)
    with LiveServer(folder / "log", str(model), "--served-model-name", "m", "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "600", "--enable-auto-tool-choice",
                    "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enforce-eager") as live:
        yield live.wait_ready()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found


def ask(client: openai.OpenAI, script: str, **more: Any) -> Any:
    return client.chat.completions.create(**{
        "model": "m", "messages": HELLO, "tools": TOOLS, "temperature": 0, **more,
        "extra_body": {"chat_template_kwargs": {"script": script}, **more.get("extra_body", {})}})


def stream(client: openai.OpenAI, script: str, **more: Any) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """A streamed answer put together: its message, the finish reason, and the deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": None}
    reason, deltas = None, []
    for chunk in ask(client, script, stream=True, **more):
        [choice] = chunk.choices
        assert reason is None
        reason = choice.finish_reason
        delta = choice.delta.model_dump(exclude_unset=True)
        deltas.append(delta)
        assert set(delta) <= {"role", "content", "reasoning_content", "reasoning", "tool_calls"}
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message[name] or "") + delta[name]
        for call in delta.get("tool_calls") or ():
            calls = message["tool_calls"] = message["tool_calls"] or []
            if call.get("id"):
                assert call["index"] == len(calls) and call["type"] == "function" and call["function"]["name"]
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert reason is not None and deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    return message, reason, deltas


def simple(choice: Any) -> tuple[dict[str, Any], str]:
    message = choice.message
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or ()]
    return {"role": message.role, "content": message.content, "tool_calls": calls or None,
            "reasoning_content": getattr(message, "reasoning_content", None)}, choice.finish_reason


@pytest.mark.parametrize(("script", "content", "reasoning", "calls"), [
    ("call", "Let me see.\n", None, [("weather", {"city": "Paris", "days": 2})]),
    ("two", None, None, [("weather", {"city": "Rome"}), ("clock", {})]),
    ("think", "Hello!", "The user greets me.", []),
    ("both", None, "A tool helps.", [("weather", {"city": "Oslo"})]),
    ("words", "Just words <tool and <|tool_call>", None, []),
])
def test_calls_and_reasoning_streamed_and_whole(client: openai.OpenAI, script: str, content: str | None,
                                                reasoning: str | None, calls: list[Any]) -> None:
    answer = ask(client, script)
    message, reason = simple(answer.choices[0])
    assert (message["content"], message["reasoning_content"]) == (content, reasoning)
    assert [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"] or ()] == calls
    assert reason == ("tool_calls" if calls else "stop")
    streamed, streamed_reason, _ = stream(client, script)
    assert (streamed, streamed_reason) == (message, reason)
    assert answer.usage.completion_tokens == len(SCRIPTS[script]) + 1
    expected = {"think": 4, "both": 1}.get(script, 0)
    assert answer.usage.completion_tokens_details.reasoning_tokens == expected
    usages = [chunk.usage for chunk in ask(client, script, stream=True, stream_options={
        "include_usage": True, "continuous_usage_stats": True})]
    assert usages[-1].completion_tokens_details == answer.usage.completion_tokens_details
    counts = [(usage.completion_tokens_details.reasoning_tokens, usage.completion_tokens) for usage in usages]
    assert counts == sorted(counts) and all(reasoning <= tokens for reasoning, tokens in counts)


def test_a_call_cut_by_the_limit(client: openai.OpenAI) -> None:
    for limit in range(1, 10):
        whole = ask(client, "call", max_tokens=limit).choices[0]
        assert whole.finish_reason == ("length" if limit < 9 else "tool_calls")
        assert stream(client, "call", max_tokens=limit)[:2] == simple(whole)


def test_choices_are_read_apart(client: openai.OpenAI) -> None:
    answer = ask(client, "two", n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 3
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 6 and all(len(name) == 9 and name.isalnum() for name in ids)


def test_what_a_client_may_choose(client: openai.OpenAI) -> None:
    raw = "".join(SCRIPTS["call"])
    assert simple(ask(client, "call", tool_choice="none").choices[0]) == (
        {"role": "assistant", "content": raw, "tool_calls": None, "reasoning_content": None}, "stop")
    assert ask(client, "call", tools=None).choices[0].message.content == raw
    answer = ask(client, "two", parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
    message, _, _ = stream(client, "two", parallel_tool_calls=False)
    assert [call["name"] for call in message["tool_calls"]] == ["weather"]
    message, _, _ = stream(client, "think", extra_body={"include_reasoning": False})
    assert message["reasoning_content"] is None and message["content"] == "Hello!"


def test_the_prompt_has_the_tools_and_earlier_calls(client: openai.OpenAI) -> None:
    def prompt(**more: Any) -> str:
        answer = ask(client, "words", **more, extra_body={"return_token_ids": True}, max_tokens=1)
        return "".join(chr(number) if number < 128 else "#" for number in _texts(answer.prompt_token_ids))

    assert "[tool]weather[tool]clock" in prompt() and "[tool]" not in prompt(tool_choice="none")
    history = [*HELLO, {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": arguments}}
        for arguments in ('{"a": [1]}', "", "null", "{}")]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon <|end|>"}]
    text = prompt(messages=history)
    assert '[assistant](thought: hm)[call]clock{"a": [1]}' + "[call]clock{}" * 3 + "#[tool]noon <|end|>#" in text


def _texts(ids: list[int]) -> list[int]:
    """Character codes of a prompt of single bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = {index: (" " if char == "Ġ" else char) for index, char in enumerate(alphabet)}
    return [ord(found.get(number, "\u0100")) for number in ids]


CITY: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"city": {"enum": [city]}}, "required": ["city"], "additionalProperties": False}}}
    for name, city in (("weather", "Oslo"), ("clock", "Rome"))]


@pytest.mark.parametrize(("choice", "expected"), [
    ("required", [("weather", "Oslo"), ("clock", "Rome")]),
    ({"type": "function", "function": {"name": "clock"}}, [("clock", "Rome")]),
])
def test_calls_that_are_demanded(client: openai.OpenAI, choice: Any, expected: list[Any]) -> None:
    """The model would say something else: it is held to the calls' form."""
    more: dict[str, Any] = {"tools": CITY, "tool_choice": choice, "max_tokens": 300, "parallel_tool_calls": False}
    answer = ask(client, "words", **more).choices[0]
    message, reason = simple(answer)
    assert message["content"] is None and reason == ("tool_calls" if choice == "required" else "stop")
    [call] = message["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])["city"]) in expected
    assert stream(client, "words", **more)[:2] == (message, reason)


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [{}]}, "tools"), ({"tools": [{"type": "retrieval"}]}, "tools"), ({"tools": "x"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
    ({"tools": [TOOLS[0]] * 2}, "tools"),
    *(({"tools": [tool(parameters)], "tool_choice": choice}, "tools")
      for choice in ("required", {"type": "function", "function": {"name": "f"}})
      for parameters in ({"$defs": [1]}, {"definitions": "x"}, {"type": "wizard"}, {"$defs": {}, "$ref": "#/$defs/a"})),
    ({"tools": [{**TOOLS[0], "function": {"name": f"f{n}"}} for n in range(129)]}, "tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"), ({"tool_choice": "never"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"), ({"tool_choice": 3}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "messages"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_refused(server: LiveServer, fields: dict[str, Any], param: str, streamed: bool) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "stream": streamed, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and len(answer.json()["error"]["message"]) < 300


NAMED: Any = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}], ids=str)
def test_a_function_without_parameters_is_called_with_none(client: openai.OpenAI, parameters: Any) -> None:
    for choice in ("required", NAMED):
        answer = ask(client, "words", tools=[tool(parameters)], tool_choice=choice, max_tokens=60,
                     parallel_tool_calls=False)
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "f" and json.loads(call.function.arguments) == {}


UNIQUE = {"type": "object", "additionalProperties": False, "required": ["a/b"], "properties": {"a/b": {
    "type": "array", "items": {"const": 1}, "uniqueItems": True, "maxItems": 2}}}


def test_what_cannot_be_met_is_dropped_with_one_line_or_refused_where_strict(
        client: openai.OpenAI, server: LiveServer) -> None:
    for _ in range(2):
        answer = ask(client, "words", tools=[tool(UNIQUE)], tool_choice=NAMED, max_tokens=60)
        assert set(json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["a/b"]) <= {1}
    assert server.log.count("ignoring uniqueItems") == 1
    strict = {"type": "function", "function": {"name": "g", "parameters": UNIQUE, "strict": True}}
    for body, param, place in (
            ({"tools": [tool(UNIQUE), strict], "tool_choice": "required"}, "tools",
             "tools[1].function.parameters#/properties/a~1b"),
            ({"response_format": {"type": "json_object", "schema": UNIQUE}}, "response_format", "#/properties/a~1b"),
            ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs", "#/properties/a~1b")):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO, **body})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param
        assert error["message"].startswith(f"uniqueItems at {place} ")


def test_tools_that_share_names_of_definitions(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {
        "$defs": {"Kind": {"const": name}}, "type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}},
        "required": ["kind"], "additionalProperties": False}}} for name in ("f", "g")]
    for name in ("f", "g"):
        answer = ask(client, "words", tools=tools, max_tokens=60, tool_choice={
            "type": "function", "function": {"name": name}})
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"kind": name}
    answer = ask(client, "words", tools=tools, max_tokens=120, tool_choice="required", parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"kind": call.function.name}


def test_a_form_that_other_parameters_exclude_is_an_error(server: LiveServer) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={
        "prompt": "a", "allowed_token_ids": [0], "structured_outputs": {"regex": "[0-9]{3}"}})
    assert answer.status_code == 500 and "allowed_token_ids" in answer.json()["error"]["message"]


def test_continuing_the_last_message(client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Just"}]  # as text it is the script's first token
    answer = client.chat.completions.create(model="m", messages=messages, temperature=0,
                                            extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == " words <tool and <|tool_call>"


CITY_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"],
               "additionalProperties": False}


@pytest.mark.parametrize(("field", "value", "pattern"), [
    ("response_format", {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY_SCHEMA}},
     r'\{\s*"city"\s*:\s*"Rome"\s*\}'),
    ("response_format", {"type": "json_object"}, r"\{.*"), ("guided_json", CITY_SCHEMA, r'\{\s*"city".*\}'),
    ("structured_outputs", {"regex": "[0-9]{3} ?x"}, "[0-9]{3} ?x"),
    ("structured_outputs", {"choice": [" b", "c"]}, " b|c"),
    ("structured_outputs", {"grammar": 'start: "é" /[a-c]{2}/'}, "é[a-c]{2}"),
    ("guided_grammar", 'root ::= "yes" | "no"', "yes|no"),
])
def test_a_form_begins_behind_the_reasoning(client: openai.OpenAI, field: str, value: Any, pattern: str) -> None:
    for script, reasoning, opening in (("think", "The user greets me.", ""), ("rest", " so 2.", "<think>1 and 1,"),
                                       ("words", None, ""), ("words", None, "<think>\n\n</think>\n\n")):
        more: dict[str, Any] = {"tools": None, "max_tokens": 60, "extra_body": {
            field: value, "chat_template_kwargs": {"script": script, "opening": opening}}}
        whole = ask(client, script, **more).choices[0]
        message, reason = simple(whole)
        assert message["reasoning_content"] == reasoning
        assert re.fullmatch(pattern, message["content"], re.DOTALL), message["content"]
        assert reason == ("length" if value == {"type": "json_object"} else "stop")
        assert stream(client, script, **more)[:2] == (message, reason)


def test_the_limit_may_end_the_reasoning(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"tools": None, "max_tokens": 3, "extra_body": {"structured_outputs": {"choice": ["a"]}}}
    answer = ask(client, "think", **more)
    message, reason = simple(answer.choices[0])
    assert (message["content"], message["reasoning_content"], reason) == (None, "The user greets me.", "length")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    assert stream(client, "think", **more)[:2] == (message, reason)


def test_calls_that_are_demanded_follow_the_reasoning(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"tools": CITY, "tool_choice": "required", "max_tokens": 300, "parallel_tool_calls": False}
    message, reason = simple(ask(client, "think", **more).choices[0])
    assert message["reasoning_content"] == "The user greets me." and reason == "tool_calls"
    assert message["content"] is None and len(message["tool_calls"]) == 1
    assert stream(client, "think", **more)[:2] == (message, reason)


def test_continuing_open_reasoning(client: openai.OpenAI) -> None:
    for content, expected in (("<think>1 and 1 so 2.", ("It is 2.", None)), ("<think>So", ("", None)),
                              ("Just", (" words <tool and <|tool_call>", None)),
                              ("<think>x</think>Just", (" words <tool and <|tool_call>", None)),
                              ("<think>Just", (None, " words <tool and <|tool_call>"))):
        messages = [*HELLO, {"role": "assistant", "content": content}]
        for streamed in (False, True):
            body: dict[str, Any] = {"model": "m", "messages": messages, "temperature": 0, "stream": streamed,
                                    "extra_body": {"continue_final_message": True}}
            answer = client.chat.completions.create(**body)
            parts = [chunk.choices[0].delta for chunk in answer] if streamed else [answer.choices[0].message]
            found = tuple("".join(getattr(part, name, None) or "" for part in parts)
                          for name in ("content", "reasoning_content"))
            assert found == tuple(text or "" for text in expected), content


ROME = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY_SCHEMA}}


def test_tools_and_a_form_for_the_answer(client: openai.OpenAI) -> None:
    """As agents send both in each turn: a call, or an answer in the form."""
    more: dict[str, Any] = {"tools": CITY, "extra_body": {"response_format": ROME}, "max_tokens": 300}
    for script in ("ask", "form", "words", "call", "think"):
        for opening in ("", "<think>"):
            more["extra_body"]["chat_template_kwargs"] = {"script": script, "opening": opening}
            if opening and script != "think":
                more["extra_body"]["chat_template_kwargs"]["opening"] += "Hm.</think>"
            message, reason = simple(ask(client, script, **more).choices[0])
            assert stream(client, script, **more)[:2] == (message, reason)
            if script == "ask":
                assert reason == "tool_calls" and message["content"] is None
                assert message["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Oslo"}'}]
            else:
                assert reason == "stop" and json.loads(message["content"]) == {"city": "Rome"}
            assert (message["reasoning_content"] is not None) == (script == "think")
    more |= {"parallel_tool_calls": False}
    more["extra_body"]["chat_template_kwargs"] = {}
    for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
        [call] = simple(ask(client, "form", **more, tool_choice=choice).choices[0])[0]["tool_calls"]
        assert call["name"] in ("clock", "weather") and json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
    message, reason = simple(ask(client, "ask", **more, tool_choice="none").choices[0])
    assert json.loads(message["content"]) == {"city": "Rome"} and message["tool_calls"] is None


def test_neither_the_log_nor_the_processes_show_trouble(server: LiveServer) -> None:
    assert "Traceback" not in server.log
    assert server.stop() == 0
