"""Log probabilities of prompts, against a softmax in float64 NumPy."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.core.outputs import RequestOutput
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.llm import LLM
from jaxpaged.execution.step_input import pad_step
from jaxpaged.execution.step_shape import SCORED_ROWS
from tests.execution.test_logprobs import TOLERANCE, log_softmax
from tests.support.tiny_llama import CONFIG, CONTEXT, ENGINE_ARGS, Reference, random_prompt, random_weights, write_model

REFERENCE = Reference(CONFIG, random_weights())
ENGINES: dict[str, dict[str, Any]] = {
    "chunks of 16": {}, "chunks of 7": {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 10},
    "one chunk": {"max_num_batched_tokens": 128},
}
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("prompt_logprobs") / "model")


@pytest.fixture(scope="module", params=ENGINES)
def llm(model_path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model_path), **ENGINE_ARGS | ENGINES[request.param]) as found:
        yield found


def check(output: RequestOutput, count: int) -> None:
    ids = output.prompt_token_ids
    found = output.prompt_logprobs
    assert found is not None and len(found) == len(ids) and found[0] is None
    wanted = log_softmax(REFERENCE.logits(ids))
    for row, token, entry in zip(wanted, ids[1:], found[1:], strict=False):
        assert entry is not None and next(iter(entry)) == token and count <= len(entry) <= count + 1
        assert all(item.logprob == pytest.approx(row[other], abs=TOLERANCE) for other, item in entry.items())
        best = np.sort(row)[::-1][:count]
        values = sorted((item.logprob for item in entry.values()), reverse=True)[:count]
        assert np.allclose(values, best, atol=TOLERANCE)


def generate(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def test_every_prompt_token_has_its_logprob_beside_requests_that_want_none(llm: LLM) -> None:
    prompts = [random_prompt(length, length) for length in LENGTHS]
    plain = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * len(prompts)
    wanted = generate(llm, prompts, plain)
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=number % 4)
              if number % 3 else plain[0] for number in range(len(prompts))]
    for _ in range(2):  # the second time the prefixes are cached, and not read
        for output, before, item in zip(generate(llm, prompts, params), wanted, params, strict=True):
            assert len(output.outputs[0].token_ids) == 20
            assert REFERENCE.error(output.prompt_token_ids, output.outputs[0].token_ids) is None
            if item.prompt_logprobs is None:
                assert output.prompt_logprobs is None
                assert output.outputs[0].token_ids == before.outputs[0].token_ids
            else:
                check(output, item.prompt_logprobs)
                assert output.num_cached_tokens == 0


def test_a_prompt_alone(llm: LLM) -> None:
    """Nothing is generated, and the prompt may be as long as the context."""
    prompts = [random_prompt(length, length) for length in (1, 30, CONTEXT)]
    for output in generate(llm, prompts, [SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=2)] * 3):
        check(output, 2)
        choice = output.outputs[0]
        assert (choice.token_ids, choice.text, choice.finish_reason, choice.logprobs) == ((), "", "length", ())


def test_short_prompts_are_computed_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of 64 rows for each would hold up the streams beside them."""
    sizes: list[int] = []

    def note(*args: Any, size: int, **more: Any) -> np.ndarray:
        sizes.append(size)
        return pad_step(*args, size=size, **more)

    monkeypatch.setattr("jaxpaged.execution.model_runner.pad_step", note)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    for output in generate(llm, [random_prompt(3, seed) for seed in range(4)], [params] * 4):
        check(output, 2)
    assert 1 <= sizes.count(SCORED_ROWS) <= 2  # 12 tokens in steps of 7 or more


def test_choices_and_other_parameters_beside_it(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=5, prompt_logprobs=1, logprobs=1, frequency_penalty=0.5)
    [output] = generate(llm, [random_prompt(40, 1)], [params])
    check(output, 1)
    assert len(output.outputs) == 2 and output.outputs[0].token_ids != output.outputs[1].token_ids
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=0)
