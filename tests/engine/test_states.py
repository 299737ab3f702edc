"""Qwen3-Next through the whole engine: the ids of transformers whatever its states go through."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from tests.models.test_models import write_checkpoint
from tests.support.sameness import compare_ids
from tests.support.tiny_engine import run
from tests.support.tiny_llama import ENGINE_ARGS, random_prompt

GREEDY = SamplingParams(temperature=0)


def request(name: str, prompt: Sequence[int], max_tokens: int = 40, **more: Any) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), GREEDY, max_tokens, **more)


REQUESTS = [
    *(request(f"own {seed}", random_prompt(3 + 19 * seed, seed)) for seed in range(3)),
    *(request(f"shared {seed}", [*random_prompt(65, 9), seed]) for seed in range(2)),
    *(request(f"choice {choice}", random_prompt(45, 8), choice=choice, fork_of="choice 0" if choice else None)
      for choice in range(2)),
]
PROMPTS = {item.request_id: item.prompt_token_ids for item in REQUESTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("states") / "model", "qwen3-next 80b")


@pytest.fixture
def engines(folder: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        made.append(Engine(EngineConfig.from_kwargs(model=str(folder), **(ENGINE_ARGS | changes))))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def check(folder: Path, ids: dict[str, list[int]]) -> None:
    from tests.support.reference_model import ReferenceModel

    model = ReferenceModel(folder)
    for name, found in ids.items():
        assert len(found) == 40
        reference = model.check(PROMPTS[name], found)
        assert compare_ids(found, reference.ids, reference.gaps) is None, name


FEW: dict[str, Any] = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 7}


@pytest.mark.slow
@pytest.mark.parametrize("how", [
    {**FEW, "preemption_mode": "swap", "swap_space": "0.01G"}, {}, {"cpu_attention": "xla"},
    {"enable_prefix_caching": False}, {"max_num_batched_tokens": 64}, FEW,
    {**FEW, "swap_space": "0.01G", "enable_prefix_caching": False}], ids=str)
def test_greedy_ids_are_those_of_transformers(folder: Path, engines: Any, how: dict[str, Any]) -> None:
    """In chunks, mixed with decoding, with prefix hits, forked, preempted; and again when prefixes are there."""
    engine = engines(**how)
    assert engine.info.kv_groups[-1].save_every
    for _ in range(2):
        ids, _ = run(engine, REQUESTS)
        check(folder, ids)
    stats = engine.stats()
    if "num_gpu_blocks_override" in how:
        assert stats.num_preemptions > 0
    if how.get("preemption_mode") == "swap":
        assert stats.blocks_swapped_in > 0
