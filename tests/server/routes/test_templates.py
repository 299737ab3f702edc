"""A server with a chat template in the style of DeepSeek-R1's distilled models, which opens the reasoning."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.chat_templates import R1_DISTILL
from tests.support.live_server import LiveServer
from tests.support.scripted_model import write_scripted_model

USER = {"role": "user", "content": "What does <think> mean?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {
    "name": "clock", "arguments": '{"zone": "UTC"}'}}]}
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
SCRIPTS = {"reason": ["A tag", ".</", "think>", "\n\n", "It is", " a tag."], "plain": ["Oh"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("distilled")
    model = write_scripted_model(folder / "model", SCRIPTS)
    template = folder / "template.jinja"
    template.write_text(R1_DISTILL + "{% if script %}{{ '<|' + script + '|>' }}{% endif %}")
    with LiveServer(folder / "log", str(model), "--max-num-seqs", "4", "--max-num-batched-tokens", "16",
                    "--num-gpu-blocks-override", "600", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
                    "--reasoning-parser", "deepseek_r1", "--chat-template", str(template), "--enforce-eager") as live:
        yield live.wait_ready()


def ask(server: LiveServer, messages: list[Any], **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", timeout=60, json={
        "messages": messages, "temperature": 0, "chat_template_kwargs": {"script": "reason"}, **more})


def prompt(server: LiveServer, messages: list[Any], **more: Any) -> str:
    ids = httpx.post(f"{server.url}/tokenize", json={"messages": messages, **more}).json()["tokens"]
    text: str = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


def test_the_prompt_opens_the_reasoning(server: LiveServer) -> None:
    """Whatever tags the user has written."""
    for messages in ([USER], [{"role": "user", "content": "</think>"}]):
        answer = ask(server, messages).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("It is a tag.", "A tag.")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    for content, expected in (("A tag", (".</think>\n\nIt is a tag.", None)), ("<think>A tag", ("It is a tag.", "."))):
        message = ask(server, [USER, {"role": "assistant", "content": content}], continue_final_message=True,
                      chat_template_kwargs={"script": ""}).json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == expected


def test_calls_are_rendered_with_their_arguments_as_text(server: LiveServer) -> None:
    text = prompt(server, [USER, CALL, {"role": "tool", "tool_call_id": "1", "content": "noon"}])
    assert "clock\n```json\n" + '{"zone": "UTC"}\n```' in text and "<|output|>noon" in text


def test_tools_that_the_template_does_not_show(server: LiveServer) -> None:
    text = prompt(server, [USER], tools=TOOLS)
    assert '{"name": "clock"' in text and "<tool_call>" in text and text.index("clock") < text.index("What does")
    assert "it does not show tools: they are described in the system message" in server.log


@pytest.mark.parametrize("streamed", [False, True])
def test_a_system_message_that_the_template_leaves_out(server: LiveServer, streamed: bool) -> None:
    systems = [{"role": "system", "content": text} for text in ("Be brief.", "Be long.")]
    answer = ask(server, [systems[0], USER, systems[1], USER], stream=streamed)
    assert answer.status_code == 400
    assert "leaves out messages[0].content, of role system" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"
    assert ask(server, [systems[0], USER], stream=streamed).status_code == 200
