"""Chat templates of several families: messages are brought into the form that each reads, and nothing is left out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from jaxpaged.core.errors import RequestError
from jaxpaged.core.tool_formats import PLAIN_CALLS, TOOL_CALL_FORMATS, ToolCallFormat
from jaxpaged.text.chat_template import ChatTemplate, TemplateJob
from jaxpaged.text.conversation import normalize_messages
from jaxpaged.text.gguf_tokenizer import read_gguf_tokenizer
from jaxpaged.text.template_traits import ROLES
from jaxpaged.text.tokenizer_files import load_tokenizer
from tests.support import chat_templates as families
from tests.support.live_server import write_tiny_model
from tests.support.tiny_tokenizers import sentencepiece_metadata, wrap

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "é <&>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
TEMPLATES = {name: source for name, source in vars(families).items() if name.isupper()}
FAMILIES = {name: ChatTemplate(
    {"default": families.CHATML, "tool_use": source} if name == "HERMES_TOOL_USE" else source, TOKENS)
    for name, source in TEMPLATES.items()}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it warm in Oslo?"}
RESULT = {"role": "tool", "content": "It is 3 degrees.", "tool_call_id": "abcdefghi"}
ANSWER = {"role": "assistant", "content": "No."}


def called(content: Any = "", arguments: Any = '{"city": "Oslo"}') -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}]}


def render(name: str, messages: list[Any], tools: Any = None, calls: ToolCallFormat = PLAIN_CALLS, **more: Any) -> str:
    template = FAMILIES[name]
    return template.render(TemplateJob(normalize_messages(messages), tools, traits=template.traits, calls=calls,
                                       **more)).text


def reference(name: str, messages: list[Any], tools: Any = None) -> str:
    [text], _ = render_jinja_template([messages], tools=tools, chat_template=TEMPLATES[name],
                                      add_generation_prompt=True, **TOKENS)
    return text


@pytest.mark.parametrize(("name", "lacks", "text_roles", "part_roles"), [
    ("CHATML", {"tools", "calls", "calls beside text"}, ROLES, ()),
    ("LLAMA3", set(), ROLES, ()), ("MISTRAL", set(), ROLES, ()), ("QWEN3", set(), ROLES, ()),
    ("GEMMA", {"system", "tool", "tools", "calls", "calls beside text"}, ROLES, ()),
    ("R1_DISTILL", {"tools", "calls beside text"}, ROLES, ()),
    ("PARTS", {"tools", "calls", "calls beside text"}, (), ROLES),
    ("EITHER", {"tools", "calls", "calls beside text"}, ROLES, ("user", "assistant", "tool")),
])
def test_what_a_template_reads_and_shows(name: str, lacks: set[str], text_roles: Any, part_roles: Any) -> None:
    traits = FAMILIES[name].traits["default"]
    assert {"system", "tool", "tools", "calls", "calls beside text"} - traits.shows == lacks
    assert (set(traits.text_roles), set(traits.part_roles)) == (set(text_roles), set(part_roles))
    assert traits.text_arguments == (name == "R1_DISTILL") and traits.null_content == ("calls" not in lacks)
    assert ("tools" in traits.describe()) == ("tools" in lacks)
    assert ("refused" in traits.describe()) == (not lacks.isdisjoint({"system", "tool"}))


@pytest.mark.parametrize(("name", "content", "arguments"), [
    ("LLAMA3", "", {"city": "Oslo"}), ("QWEN3", "", {"city": "Oslo"}), ("HERMES_TOOL_USE", "", {"city": "Oslo"}),
    ("R1_DISTILL", None, '{"city": "Oslo"}'), ("MISTRAL", "", {"city": "Oslo"}), ("JOINED", "", {"city": "Oslo"}),
])
def test_calls_and_results_as_the_template_wants_them(name: str, content: Any, arguments: Any) -> None:
    """Whatever form the client has sent them in; compared with transformers' rendering of the wanted form."""
    tools = None if name == "R1_DISTILL" else TOOLS
    expected = reference(name, [USER, called(content, arguments), RESULT], tools)
    assert "weather" in expected and '{"city": "Oslo"}' in expected and "3 degrees" in expected
    for given_content in ("", None):
        for given_arguments in ('{"city": "Oslo"}', {"city": "Oslo"}):
            assert render(name, [USER, called(given_content, given_arguments), RESULT], tools) == expected


def test_content_in_the_form_that_the_template_reads() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert render("PARTS", [SYSTEM, ANSWER]) == "<|system|>Be brief.<|end|><|assistant|>No.<|end|><|assistant|>"
    assert render("PARTS", [parts]) == "<|user|>onetwo<|end|><|assistant|>"
    assert render("CHATML", [parts]) == reference("CHATML", [{"role": "user", "content": "one\ntwo"}])
    assert render("EITHER", [{**parts, "role": "system"}, parts, USER]) == (
        "<|system|>one\ntwo<|user|> one two<|user|>Is it warm in Oslo?")


def test_the_operator_may_say_which_form_it_reads() -> None:
    for form, expected in (("string", "<|user|>one\ntwo"), ("openai", "<|user|> one two")):
        template = ChatTemplate(families.EITHER, TOKENS, form)  # type: ignore[arg-type]
        message = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
        assert template.render(TemplateJob([message], traits=template.traits)).text == expected


@pytest.mark.parametrize(("name", "messages", "what", "param"), [
    ("MISTRAL", [SYSTEM, USER, called(), RESULT], "messages[0].content, of role system", "messages"),
    ("R1_DISTILL", [SYSTEM, USER, ANSWER, {"role": "system", "content": "Be long."}, USER], "messages[0].content, of "
     "role system", "messages"),
    ("HERMES_TOOL_USE", [USER, called(), {**RESULT, "role": "user"}], "", ""),
])
def test_words_that_are_left_out(name: str, messages: list[Any], what: str, param: str) -> None:
    if not what:
        assert "3 degrees" in render(name, messages, TOOLS)
        return
    with pytest.raises(RequestError, match=re.escape(f"leaves out {what};")) as caught:
        render(name, messages)
    assert caught.value.param == param


@pytest.mark.parametrize(("source", "messages", "tools", "what"), [
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [SYSTEM, USER], None, "messages[0]"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [USER, RESULT], None, "messages[1]"),
    ("{{ messages[-1].content }}", [USER, ANSWER, USER], None, "messages[0]"),
    ("{{ messages[0].content }}", [{"role": "user", "content": "a"}, {"role": "user", "content": "e"}], None,
     "messages[1]"),
    ("messages and user{% if tools %}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].function.name }}"
     "{% endif %}", [{"role": "user", "content": "user"}], None, "messages[0]"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].function.name if tools }}", [USER],
     [*TOOLS, {"type": "function", "function": {"name": "clock"}}], "tools"),
    ("{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
     "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}",
     [USER, {**called(), "tool_calls": called()["tool_calls"] * 2}], None, "messages[1].tool_calls"),
])
def test_templates_that_leave_out_words(source: str, messages: list[Any], tools: Any, what: str) -> None:
    template = ChatTemplate(source, {})
    for _ in range(2):
        with pytest.raises(RequestError, match=re.escape(f"leaves out {what}")):
            template.render(TemplateJob(normalize_messages(messages), tools, traits=template.traits))


def test_a_template_that_refuses_says_why() -> None:
    for messages, reason in (([SYSTEM, USER], "System role not supported"), ([USER, USER], "roles must alternate")):
        with pytest.raises(RequestError, match=reason):
            render("GEMMA", messages)


@pytest.mark.parametrize(("name", "calls"), [
    ("CHATML", TOOL_CALL_FORMATS["hermes"]), ("PARTS", TOOL_CALL_FORMATS["llama3_json"]), ("GEMMA", PLAIN_CALLS),
    ("R1_DISTILL", TOOL_CALL_FORMATS["mistral"])])
def test_tools_are_described_where_the_template_shows_none(name: str, calls: ToolCallFormat) -> None:
    for messages in ([USER], [SYSTEM, USER]):
        if name != "GEMMA" or messages == [USER]:
            text = render(name, messages, TOOLS, calls)
            assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in text
            assert all(message["content"] in text for message in messages)
            assert text.index('"weather"') < text.index("Oslo") or name == "GEMMA"
            assert calls.tag in text and f'"{calls.arguments}": {{...}}' in text
    if name in ("CHATML", "PARTS"):
        written = calls.call("weather", {"city": "Oslo"})
        assert f"Wait.\n{written}" in render(name, [USER, called("Wait."), RESULT], TOOLS, calls)
        assert written in render(name, [USER, called(None)], None, calls)
    if name == "R1_DISTILL":  # it shows a call, but not beside text
        written = calls.call("weather", {"city": "Oslo"})
        assert f"Wait.\n{written}" in render(name, [USER, called("Wait."), RESULT], None, calls)


def test_what_an_assistant_says_beside_a_call_may_be_left_out() -> None:
    assert "Wait" not in render("HERMES_TOOL_USE", [USER, called("Wait."), RESULT], TOOLS)


words = st.integers(0, 99).map("w{}".format)
talk = st.lists(st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]),
                           "content": words | st.lists(words, min_size=1, max_size=3)}),
    st.builds(lambda word: {**RESULT, "content": word}, words),
    st.builds(lambda word, text: {**called(text, {"city": word})}, words, words | st.none())), min_size=1, max_size=5)


@given(messages=talk, tools=st.sampled_from([None, TOOLS]))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_word_of_the_user_is_in_the_prompt_or_an_error_says_which_is_not(name: str, messages: list[Any],
                                                                               tools: Any) -> None:
    ordinals = iter(range(1000))
    expected = [] if tools is None else ["weather"]
    for message in messages:  # no word occurs twice
        content = message["content"]
        texts = [f"<{word}-{next(ordinals)}>" for word in ([content] if isinstance(content, str) else content or [])]
        message = messages[messages.index(message)]
        message["content"] = texts[0] if isinstance(content, str) else [
            {"type": "text", "text": text} for text in texts] if content else None
        if message.get("tool_calls"):
            expected.append(message["tool_calls"][0]["function"]["arguments"]["city"])
        else:
            expected += texts
    try:
        text = render(name, messages, tools)
    except RequestError as error:
        assert error.param in ("messages", "tools")
        return
    assert all(word in text for word in expected), text


@pytest.mark.parametrize(("name", "messages", "more", "turn"), [
    ("QWEN3", [USER], {}, "<|im_start|>assistant\n"),
    ("QWEN3", [USER], {"variables": {"enable_thinking": False}}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ("R1_DISTILL", [{"role": "user", "content": "What does <think> mean?"}], {}, "<|Assistant|><think>\n"),
    ("MISTRAL", [USER], {}, ""),
    ("QWEN3", [USER, {"role": "assistant", "content": "<think>\nLet me"}],
     {"continue_final_message": True, "add_generation_prompt": False},
     "<|im_start|>assistant\n<think>\n\n</think>\n\n<think>\nLet me"),
    ("GEMMA", [USER, {"role": "assistant", "content": "It is"}],
     {"continue_final_message": True, "add_generation_prompt": False}, "<start_of_turn>model\nIt is"),
])
def test_the_turn_of_the_answer(name: str, messages: list[Any], more: dict[str, Any], turn: str) -> None:
    template = FAMILIES[name]
    assert template.render(TemplateJob(messages, traits=template.traits, wants_turn=True, **more)).turn == turn


# Several templates of one model


def test_named_templates_in_a_gguf_file() -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.chat_templates": ["tool_use", "rag"],
                                         "tokenizer.chat_template.tool_use": families.HERMES_TOOL_USE,
                                         "tokenizer.chat_template.rag": "{{ documents }}"})
    assert set(read_gguf_tokenizer(metadata, Path("m.gguf")).chat_template or ()) == {"default", "tool_use", "rag"}
    tokenizer = wrap(metadata)
    assert tokenizer.apply_chat_template([USER])[0] == "<s>[user]Is it warm in Oslo?</s>[assistant]"
    with_tools, _ = tokenizer.apply_chat_template([USER, normalize_messages([called()])[0], RESULT], tools=TOOLS)
    assert with_tools == FAMILIES["HERMES_TOOL_USE"].render(TemplateJob(
        [USER, *normalize_messages([called()]), RESULT], TOOLS)).text


@pytest.mark.parametrize("layout", ["list", "folder", "file"])
def test_named_templates_in_a_directory(tmp_path: Path, layout: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    sources = {"default": families.CHATML, "tool_use": families.HERMES_TOOL_USE}
    config.pop("chat_template")
    if layout == "list":
        config["chat_template"] = [{"name": name, "template": source} for name, source in sources.items()]
    else:
        (model / "chat_template.jinja").write_text(sources["default"])
    if layout == "folder":
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(sources["tool_use"])
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(model)
    expected = tokenizer.hf.apply_chat_template([USER], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    plain = tokenizer.hf.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template([USER])[0] == plain == reference("CHATML", [USER])
    text, _ = tokenizer.apply_chat_template([USER], tools=TOOLS)
    assert (text == expected) == (layout != "file") and "weather" in text
