"""A model of three KV groups: the ids of float64 whatever the pool goes through, and no more blocks than a window."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.kv_groups import KVGroup
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.llm import in_memory_model
from jaxpaged.frontend.metrics import Metrics
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.weights import load_params
from jaxpaged.models.registry import find_family
from jaxpaged.models.transformer import Transformer
from jaxpaged.server.routes.engine_state import engine_state
from tests.support.model_configs import with_windows
from tests.support.tiny_engine import run
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, Reference, random_prompt, random_weights, write_model

# Two layers keep everything: two strips. A block of the window of 21 is a bundle of two units.
WINDOWS = (None, 21, 37, 21, None, 21)
LAYERS: dict[str, Any] = CONFIG | {"num_hidden_layers": len(WINDOWS)}
GROUPS = (KVGroup(), KVGroup(21, 2), KVGroup(37))
REFERENCE = Reference(LAYERS, random_weights(LAYERS), windows=WINDOWS)
GREEDY = SamplingParams(temperature=0)
ROOMY = {"num_gpu_blocks_override": 4 * 33}


def request(name: str, prompt: Sequence[int], max_tokens: int = 40, **more: Any) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), GREEDY, max_tokens, **more)


REQUESTS = [
    *(request(f"own {seed}", random_prompt(3 + 19 * seed, seed)) for seed in range(5)),
    *(request(f"shared {seed}", [*random_prompt(65, 9), seed]) for seed in range(3)),
    *(request(f"choice {choice}", random_prompt(45, 8), choice=choice, fork_of="choice 0" if choice else None)
      for choice in range(3)),
]
PROMPTS = {item.request_id: item.prompt_token_ids for item in REQUESTS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, dict[Any, Any]]:
    """The module and its weights."""
    checkpoint = open_checkpoint(write_model(tmp_path_factory.mktemp("groups") / "model", LAYERS))
    family = find_family(LAYERS)
    config = with_windows(family.config_from_hf(LAYERS), WINDOWS)
    module = family.build(config, jnp.dtype(jnp.float32))
    params = load_params(nnx.to_pure_dict(nnx.state(module)), family.weights, checkpoint, config=config)
    return module, params


@pytest.fixture
def engines(model: tuple[Transformer, dict[Any, Any]]) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        config = EngineConfig.from_kwargs(model="in-memory", **(ENGINE_ARGS | ROOMY | changes))
        made.append(Engine(config, model=in_memory_model(model)))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


@pytest.mark.parametrize("how", [
    {}, {"cpu_attention": "xla"}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 64},
    {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 7},
    {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 7, "preemption_mode": "swap", "swap_space": "0.01G"},
    {"num_gpu_blocks_override": 24, "swap_space": "0.01G", "enable_prefix_caching": False}], ids=str)
def test_greedy_ids_are_those_of_float64(engines: Any, how: dict[str, Any]) -> None:
    engine = engines(**how)
    assert engine.info.kv_groups == GROUPS
    ids, _ = run(engine, REQUESTS)
    for name, found in ids.items():
        assert REFERENCE.error(PROMPTS[name], found, 40) is None, name
    if "num_gpu_blocks_override" in how:
        assert engine.stats().num_preemptions > 0
    if how.get("preemption_mode") == "swap":
        assert engine.stats().blocks_swapped_in > 0


def test_a_prefix_is_reused_although_its_windows_have_moved_on(engines: Any) -> None:
    engine = engines()
    prompt = random_prompt(100, 3)
    run(engine, [request("first", prompt, 20)])
    ids, computed = run(engine, [request("second", prompt, 20)])
    assert computed == 100 - 96 + 19 and REFERENCE.error(prompt, ids["second"], 20) is None
    # A prefix whose windows are gone is of no use: another text takes the windows' blocks, which were freed first.
    engine.reset_prefix_cache()
    ids, computed = run(engine, [request("third", prompt, 20)])
    assert computed == 100 + 19 and REFERENCE.error(prompt, ids["third"], 20) is None


def test_a_request_never_holds_more_than_its_windows_and_a_chunk(engines: Any) -> None:
    engine = engines()
    engine.add_request(request("long", random_prompt(100, 4), 27))
    most = 0
    while engine.has_work():
        engine.step()
        most = max(most, engine.stats().blocks_used)
    chunk = ENGINE_ARGS["max_num_batched_tokens"]
    assert most <= 8 + sum(group.width * group.max_blocks(16, chunk) for group in GROUPS[1:])


@pytest.mark.slow
def test_32k_tokens_in_a_window_of_4k(tmp_path: Path) -> None:
    """Every layer has the window, as Mistral's first version: the pool has room for no more than it needs."""
    config = CONFIG | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096,
                       "max_position_embeddings": 32768 + 64}
    group, budget = KVGroup(4096), 256
    blocks = group.max_blocks(16, budget)
    engine = Engine(EngineConfig.from_kwargs(model=str(write_model(tmp_path / "model", config)), max_num_seqs=2,
                                             max_num_batched_tokens=budget, num_gpu_blocks_override=blocks + 1))
    prompt = random_prompt(32768, 5)
    engine.add_request(request("long", prompt, 32))
    most, ids = 0, list[int]()
    while engine.has_work():
        ids += [token for delta in engine.step().deltas for token in delta.token_ids]
        most = max(most, engine.stats().blocks_used)
    engine.shutdown()
    assert len(ids) == 32 and most <= blocks


def test_the_engine_says_which_group_uses_which_blocks(engines: Any) -> None:
    engine = engines()
    engine.add_request(request("long", random_prompt(100, 6), 10))
    while engine.has_work():
        engine.step()
        pool, stats = engine.pool_state(), engine.stats()
        counts = [pool.group_codes.count(code) for code in "abc"]
        assert counts == list(stats.group_blocks_used) and sum(counts) == stats.blocks_used
        used = [index for index, code in enumerate(pool.group_codes) if code != "-"]
        assert used == [index for index, code in enumerate(pool.state_codes) if code in "os"]
        if stats.num_running and not stats.num_waiting and counts[0] >= 6:
            assert counts[1] % 2 == 0 and counts[1] < 2 * counts[0] and counts[2] < counts[0]
        state = engine_state("tiny", engine.info, pool, Metrics("tiny", engine.info))
        assert [group["used"] for group in state["blocks"]["groups"]] == counts
        assert [group["window"] for group in state["blocks"]["groups"]] == [None, 21, 37]
