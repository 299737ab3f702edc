"""Chat templates: rendered as transformers renders them, in a sandbox."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from jaxpaged.core.errors import RequestError
from jaxpaged.text.chat_template import ChatTemplate, TemplateJob

CHATML_WITH_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set state = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}{% set state.seen = true %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function.name ~ (call.function.arguments | tojson(indent=2)) ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
"""
TRIMMED = """{{ bos_token }}
{% for message in messages %}
  {% generation %}[{{ message['role'] }}] {{ message['content'] | trim }}</s>{% endgeneration %}
{% endfor %}
{{ dict(a=1, **{'b': loop_count or 2}) | tojson(sort_keys=true) }}
{% if add_generation_prompt %}[assistant]{% endif %}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "é <&>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]

texts = st.text(st.characters(codec="utf-8"), max_size=20)
calls = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries(
    {"name": texts, "arguments": st.dictionaries(texts, st.none() | st.integers() | texts, max_size=2)})}), max_size=2)
messages = st.lists(st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts},
    optional={"tool_calls": calls, "reasoning_content": texts}), min_size=1, max_size=4)


@given(messages=messages, tools=st.sampled_from([None, TOOLS]), prompt=st.booleans(),
       variables=st.sampled_from([{}, {"enable_thinking": False}, {"loop_count": 7}]))
@pytest.mark.parametrize("template", [CHATML_WITH_TOOLS, TRIMMED])
def test_renders_what_transformers_renders(template: str, messages: list[dict[str, Any]], tools: Any, prompt: bool,
                                           variables: dict[str, Any]) -> None:
    text = ChatTemplate(template, TOKENS).render(TemplateJob(messages, tools, prompt, variables=variables)).text
    [expected], _ = render_jinja_template([messages], tools=tools, chat_template=template,
                                          add_generation_prompt=prompt, **TOKENS, **variables)
    assert text == expected


@given(messages=messages)
@pytest.mark.parametrize("template", [CHATML_WITH_TOOLS, TRIMMED])
def test_continues_the_last_message_as_transformers_does(template: str, messages: list[dict[str, Any]]) -> None:
    job = TemplateJob(messages, add_generation_prompt=False, continue_final_message=True)
    [expected], _ = render_jinja_template([messages], chat_template=template, continue_final_message=True, **TOKENS)
    assert ChatTemplate(template, TOKENS).render(job).text == expected


def test_the_tool_use_template_is_used_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}, {})
    assert template.render(TemplateJob([])).text == "plain"
    assert template.render(TemplateJob([], TOOLS)).text == "weather"
    with pytest.raises(RequestError, match="rag"):
        ChatTemplate({"rag": "x"}, {}).render(TemplateJob([]))


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    job = TemplateJob([{"role": "user", "content": "a"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError) as caught:
        ChatTemplate("nothing", {}).render(job)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("template", [
    "{% set n = namespace(_x=1) %}", "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{% set n = namespace() %}{{ n.__init__.__globals__ }}", "{{ dict.__globals__ }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__code__ }}", "{{ messages.clear() }}",
    "{{ messages[0].update(a=1) }}", "{{ self.__dict__ }}", "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}", "{% import 'os' as x %}", "{{ ''.format.__self__.__class__.__base__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}", "{{ ('{a.__class__}').format_map({'a': 1}) }}",
])
def test_templates_cannot_leave_the_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    try:
        text = ChatTemplate(template, {}).render(TemplateJob(messages)).text
    except RequestError:
        pass
    else:
        assert text == ""
    assert messages == [{"role": "user", "content": "a"}]
