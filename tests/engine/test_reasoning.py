"""Structured output behind a model's reasoning, from Python."""

from collections.abc import Iterator
from typing import Any

import pytest

import jaxpaged
from jaxpaged.core.errors import ConfigError
from tests.support.scripted_model import write_scripted_model
from tests.support.tiny_llama import ENGINE_ARGS

SCRIPTS = {"think": ["<think>", "Hm", "</think>", "Well"], "words": ["Just", " words"]}
ANSWERS: dict[str, Any] = {
    "json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
    "regex": "[0-9]{2}", "choice": ["yes", "no"], "grammar": 'start: "x" /[0-9]/'}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jaxpaged.LLM]:
    model = write_scripted_model(tmp_path_factory.mktemp("reasoning") / "model", SCRIPTS)
    with jaxpaged.LLM(model=str(model), reasoning_parser="qwen3", **ENGINE_ARGS) as found:
        yield found


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_form_begins_behind_the_reasoning(llm: jaxpaged.LLM, kind: str) -> None:
    params = jaxpaged.SamplingParams(temperature=0, max_tokens=40, structured_outputs=jaxpaged.StructuredOutputsParams(
        **{kind: ANSWERS[kind]}))
    [free] = llm.chat([{"role": "user", "content": "think"}], params, use_tqdm=False)
    [plain] = llm.chat([{"role": "user", "content": "words"}], params, use_tqdm=False)
    assert free.outputs[0].text == f"<think>Hm</think>{plain.outputs[0].text}"
    assert (free.outputs[0].finish_reason, plain.outputs[0].finish_reason) == ("stop", "stop")
    assert "<think>" not in plain.outputs[0].text
    # A text of one's own: only what is open at its end is reasoning.
    prompts = ["<|think|>", "So: <think><|think|>",
               llm.get_tokenizer().encode("So: <think>Hm", add_special_tokens=False)]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    assert texts[0] == plain.outputs[0].text
    assert texts[1].endswith(f"Hm</think>{plain.outputs[0].text}") and texts[2] == f"</think>{plain.outputs[0].text}"


def test_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match="reasoning_parser must be one of deepseek_r1, qwen3, mistral"):
        jaxpaged.EngineConfig(reasoning_parser="x")
