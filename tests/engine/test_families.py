"""Whole engines of the families' new blocks: greedy ids in chunks, with prefix hits, on one device and more.

What one step computes is compared in tests/models/test_models.py; here it is the native kernels, and the shards.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.models.test_models import write_checkpoint
from tests.support.sameness import compare_ids, num_decided
from tests.support.sharded_process import run_cases
from tests.support.tiny_llama import ENGINE_ARGS, random_prompt

# Prompts in chunks, the last one's first half cached.
ENGINE: dict[str, Any] = ENGINE_ARGS | {"max_num_batched_tokens": 7}
PROMPTS = [*(random_prompt(length, length) for length in (1, 17, 40, 90)), [*random_prompt(90, 90)[:50], 3]]
REQUESTS = [(prompt, {"temperature": 0}, 20) for prompt in PROMPTS]
# The tiny models have two KV heads: on four devices, two hold each.
# transformers changes to longrope's other factors when a text outgrows the original context, 64 tokens.
MORE = {"phi4-mini": {"max_model_len": 64}}
MOST_DEVICES = {"phi4-mini": 2, "falcon rw": 2}  # of two and six heads
QUICK = {"olmo2": (4,), "falcon 40b": (2,), "qwen2-moe": (1, 2)}
SLOW = ("gemma2", "cohere", "phi4-mini", "gemma3", "glm4", "cohere2", "ministral3", "granite", "exaone4", "starcoder2",
        "gpt2", "pythia", "falcon 7b", "falcon rw", "opt", "opt 350m", "mixtral", "qwen3-moe", "olmoe", "gpt-oss",
        "deepseek-v3", "deepseek-v2", "glm4-moe-lite", "glm4-moe", "granite-moe", "phimoe", "minimax-m2",
        "ernie4.5-moe")


@pytest.mark.parametrize("names", [
    tuple(QUICK), pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_greedy_ids(names: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from tests.support.reference_model import ReferenceModel

    cases = [(name, size) for name in names for size in QUICK.get(name, (1, 2, 4))
             if size <= MOST_DEVICES.get(name, 4)]
    folders = {name: write_checkpoint(tmp_path / name, name) for name in names}
    found = run_cases([{"size": size, "engine": {"model": str(folders[name]), **ENGINE, **MORE.get(name, {})},
                        "requests": REQUESTS[:3] if name in MORE else REQUESTS} for name, size in cases])
    for (name, _), result in zip(cases, found, strict=True):
        model, decided = ReferenceModel(folders[name]), 0
        for prompt, ids in zip(PROMPTS, result["ids"], strict=name not in MORE):
            reference = model.check(prompt, ids)
            assert len(ids) == 20 and compare_ids(ids, reference.ids, reference.gaps) is None, name
            decided += num_decided(reference.gaps)
        assert decided > 40, "too many near-ties to mean anything"
