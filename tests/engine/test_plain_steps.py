"""What crosses from the scheduler to the model runner can be sent to another process."""

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.core.outputs import RequestOutput
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.llm import LLM
from jaxpaged.execution.model_runner import ModelRunner, StepInFlight
from jaxpaged.scheduling.scheduler_output import SchedulerOutput
from tests.engine.test_swap import WISHES, check_logprobs
from tests.support.tiny_engine import FEW_BLOCKS
from tests.support.tiny_llama import ENGINE_ARGS, random_prompt

PROMPTS = [random_prompt(20 + 5 * seed, seed) for seed in range(8)]
PLAIN = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
POOLED = [random_prompt(length, length) for length in (1, 30, 70)]


class PlainUnpickler(pickle.Unpickler):
    """Refuses everything but the frozen values of `core` and `scheduler_output`, and arrays."""

    def find_class(self, module: str, name: str) -> Any:
        assert module.startswith(("jaxpaged.core.", "jaxpaged.scheduling.scheduler_output", "numpy")) or \
            (module, name) == ("builtins", "frozenset"), f"{module}.{name} crosses to the runner"
        return super().find_class(module, name)


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(str(model_path), **ENGINE_ARGS | FEW_BLOCKS, preemption_mode="swap", swap_space="0.01",
             enable_embeddings=True) as found:
        yield found


def serve(llm: LLM) -> tuple[list[RequestOutput], list[Any], list[Any]]:
    """Requests of every kind: answers, beams, embeddings."""
    llm.reset_prefix_cache()
    params = [*WISHES, *[PLAIN] * (len(PROMPTS) - len(WISHES))]
    answers = llm.generate(list(PROMPTS), params, use_tqdm=False)
    [beams] = llm.beam_search([PROMPTS[0]], beam_width=3, max_tokens=6, use_tqdm=False)
    embeddings = [found.outputs.embedding for pooling in ("last", "mean")
                  for found in llm.embed(list(POOLED), use_tqdm=False, pooling=pooling)]
    return answers, [choice.token_ids for choice in beams.outputs], embeddings


def test_the_runner_computes_the_same_from_a_copy_of_each_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = serve(llm)
    steps: list[SchedulerOutput] = []
    dispatch = ModelRunner.dispatch

    def send(self: ModelRunner, step: SchedulerOutput) -> StepInFlight:
        steps.append(PlainUnpickler(io.BytesIO(pickle.dumps(step))).load())
        return dispatch(self, steps[-1])

    monkeypatch.setattr(ModelRunner, "dispatch", send)
    found = serve(llm)
    for output, other in zip(found[0], wanted[0], strict=True):
        check_same(output, other)
    assert found[1] == wanted[1]
    for embedding, expected in zip(found[2], wanted[2], strict=True):
        assert embedding == pytest.approx(expected, abs=1e-5)
    seen_kinds(steps)


def check_same(output: RequestOutput, wanted: RequestOutput) -> None:
    assert [replace(choice, logprobs=None, cumulative_logprob=None) for choice in output.outputs] == [
        replace(choice, logprobs=None, cumulative_logprob=None) for choice in wanted.outputs]
    for choice, other in zip(output.outputs, wanted.outputs, strict=True):
        check_logprobs(choice.logprobs or (), other.logprobs or ())
    check_logprobs((output.prompt_logprobs or ())[1:], (wanted.prompt_logprobs or ())[1:])


def seen_kinds(steps: Sequence[SchedulerOutput]) -> None:
    """Everything that a step can carry was among them."""
    chunks = [chunk for step in steps for chunk in step.chunks]
    full = [step.full_sampling for step in steps if step.full_sampling is not None]
    assert any(step.transfers.saves for step in steps) and any(step.transfers.loads for step in steps)
    assert any(step.transfers.copies for step in steps) and any(chunk.table for chunk in chunks)
    assert any(chunk.new and chunk.new.output_token_ids for chunk in chunks), "no request ran again"
    assert any(sampling.masks for sampling in full) and any(any(sampling.num_logprobs) for sampling in full)
    assert {scoring.pooling for chunk in chunks if (scoring := chunk.scoring)} == {None, "last", "mean"}
