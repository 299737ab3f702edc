"""Greedy ids of every request of the workloads equal those of transformers, however the requests are run.

transformers reads prompt and ids in one pass and says what it would have chosen at each position.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from tests.support.sameness import compare_ids

WORKLOADS = ("W1", "W2", "W3", "W4", "W5")
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "small chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
    "few blocks": {"num_gpu_blocks_override": 100},
    "large blocks": {"block_size": 64},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Judge:
    """Compares with the reference; the same ids for the same prompt are looked at once."""

    def __init__(self, model_path: Path) -> None:
        from tests.support.reference_model import ReferenceModel

        self._model = ReferenceModel(model_path)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], str | None] = {}

    def error(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> str | None:
        if (prompt, ids) not in self._known:
            reference = self._model.check(prompt, ids)
            self._known[prompt, ids] = compare_ids(ids, reference.ids, reference.gaps)
        return self._known[prompt, ids]


@pytest.fixture(scope="module")
def judge(smollm2_path: Path) -> Judge:
    pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    return Judge(smollm2_path)


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[LLM]:
    with LLM(model=str(smollm2_path), **ENGINES[request.param]) as llm:
        yield llm


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_at_once(llm: LLM, judge: Judge, workload_folder: Path, name: str, request: pytest.FixtureRequest) -> None:
    before = llm.get_metrics()["vllm:num_preemptions"]
    assert not _errors(llm, judge, _requests(workload_folder, name))
    if "few blocks" in request.node.name and name in ("W1", "W2"):  # short answers are admitted with all their blocks
        assert llm.get_metrics()["vllm:num_preemptions"] > before


@pytest.mark.parametrize("name", WORKLOADS)
def test_alone(judge: Judge, smollm2_path: Path, workload_folder: Path, name: str) -> None:
    with LLM(model=str(smollm2_path)) as llm:
        errors = [_errors(llm, judge, [item]) for item in _requests(workload_folder, name)]
    assert not any(errors), errors


def _requests(folder: Path, name: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["requests"]
    return requests


def _errors(llm: LLM, judge: Judge, requests: list[dict[str, Any]]) -> list[str]:
    params = [SamplingParams(temperature=0, max_tokens=item["output_len"], ignore_eos=True) for item in requests]
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in requests]
    found = []
    for number, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        ids = output.outputs[0].token_ids
        assert len(ids) == requests[number]["output_len"]
        error = judge.error(tuple(output.prompt_token_ids), tuple(ids))
        if error:
            found.append(f"request {number}, {error}")
    return found
