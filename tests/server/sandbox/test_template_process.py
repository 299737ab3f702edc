"""Chat templates rendered in processes of their own: cut off where they do not end."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.server.sandbox.template_process import TemplateProcesses
from jaxpaged.text.chat_template import ChatTemplate, TemplateJob
from tests.support.chat_templates import GEMMA


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    source = ("{% set n = namespace(s='x') %}{% if messages[0].content == 'slow' %}"
              "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
              "{% elif messages[0].content == 'large' %}{% for a in range(99) %}{% set n.s = n.s * 9 %}{% endfor %}"
              "{% elif messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}")
    found = TemplateProcesses(ChatTemplate(source, {}), timeout=1, memory=2**30, count=2)
    yield found
    found.close()


def ask(processes: TemplateProcesses, content: Any) -> str:
    return processes.render(TemplateJob([{"role": "user", "content": content}])).text


def test_what_runs_too_long_or_grows_too_large_is_cut_off(processes: TemplateProcesses) -> None:
    assert ask(processes, "warm") == "warm"
    with ThreadPoolExecutor(6) as threads:
        answers = {content: threads.submit(ask, processes, content)
                   for content in ("slow", "a", "large", "b", "bad", "c")}
        for content in ("a", "b", "c"):
            assert answers[content].result() == content
        for content, word in (("slow", "within 1 s"), ("large", "chat template"), ("bad", "no")):
            with pytest.raises(RequestError, match=word) as caught:
                answers[content].result()
            assert caught.value.param == "messages"
    assert ask(processes, "after") == "after"


def test_messages_too_deep_to_send(processes: TemplateProcesses) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        ask(processes, deep)
    assert ask(processes, "after") == "after"


def test_a_process_that_died_is_replaced() -> None:
    others = set(psutil.Process().children())
    found = TemplateProcesses(ChatTemplate("{{ messages[0].content }}", {}), timeout=10, memory=2**30, count=1)
    try:
        for _ in range(2):
            assert ask(found, "a") == "a"  # so it is not killed while it starts, which counts as a failed start
            for child in set(psutil.Process().children()) - others:
                child.kill()
                child.wait()
        assert ask(found, "a") == ask(found, "a") == "a"
    finally:
        found.close()


def test_a_template_that_cannot_be_tried_out() -> None:
    endless = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", {})
    found = TemplateProcesses(endless, timeout=0.2, memory=2**30, count=1)
    try:
        assert found.find_traits() is None
    finally:
        found.close()


def test_traits_are_those_found_in_this_process() -> None:
    template = ChatTemplate(GEMMA, {"bos_token": "<s>"})
    found = TemplateProcesses(template, timeout=10, memory=2**30, count=1)
    try:
        assert found.find_traits() == template.traits
    finally:
        found.close()
