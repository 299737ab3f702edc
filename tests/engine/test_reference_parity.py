"""Greedy ids equal those of transformers in float32 on the same weights, however the requests are run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from tests.support.sameness import compare_ids, num_decided

FILE = Path(__file__).parents[1] / "support" / "data" / "reference_smollm2.json"
ROWS: list[dict[str, Any]] = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(model=str(smollm2_path), enforce_eager=True) as llm:  # loads only the programs that it uses
        yield llm


@pytest.fixture(scope="module")
def cramped_llm(smollm2_path: Path) -> Iterator[LLM]:
    """Chunks of at most 32 tokens, and too few blocks for the requests it runs at once."""
    with LLM(model=str(smollm2_path), max_num_batched_tokens=32, max_num_seqs=8, num_gpu_blocks_override=48,
             enforce_eager=True) as llm:
        yield llm


def _errors(llm: LLM, rows: list[dict[str, Any]]) -> list[str]:
    params = [SamplingParams(temperature=0, max_tokens=len(row["ids"]), ignore_eos=True) for row in rows]
    outputs = llm.generate([{"prompt_token_ids": row["prompt_token_ids"]} for row in rows], params, use_tqdm=False)
    errors = [compare_ids(output.outputs[0].token_ids, row["ids"], row["gaps"])
              for row, output in zip(rows, outputs, strict=True)]
    return [f"{row['name']}: {error}" for row, error in zip(rows, errors, strict=True) if error]


def test_the_reference_decides_nearly_everywhere() -> None:
    """Otherwise the tests below would compare little."""
    assert sum(num_decided(row["gaps"]) for row in ROWS) > 0.9 * sum(len(row["ids"]) for row in ROWS)


@pytest.mark.slow
def test_all_at_once(llm: LLM) -> None:
    assert not _errors(llm, ROWS)


@pytest.mark.parametrize("row", ROWS[::5], ids=lambda row: row["name"])
def test_alone(llm: LLM, row: dict[str, Any]) -> None:
    assert not _errors(llm, [row])


@pytest.mark.slow
def test_in_small_pieces_and_preempted(cramped_llm: LLM) -> None:
    assert not _errors(cramped_llm, ROWS)
    assert cramped_llm.get_metrics()["vllm:num_preemptions"] > 0
