"""A model of three KV groups: the ids of float64 whatever the pool goes through, and no more blocks than a window."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpaged import LLM
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.kv_groups import KVGroup
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.in_memory import in_memory_model
from jaxpaged.execution.model_runner import StepInFlight
from jaxpaged.frontend.metrics import Metrics
from jaxpaged.models.transformer import Transformer
from jaxpaged.scheduling.scheduler_output import REJECTED_TOKEN
from jaxpaged.server.routes.engine_state import engine_state
from tests.support.sharded_process import run_cases
from tests.support.tiny_engine import run
from tests.support.tiny_llama import (
    CONFIG,
    ENGINE_ARGS,
    VOCAB,
    Reference,
    load_with_windows,
    random_prompt,
    random_weights,
    write_model,
)

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
    return load_with_windows(write_model(tmp_path_factory.mktemp("groups") / "model", LAYERS), WINDOWS)


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
    {}, pytest.param({"cpu_attention": "xla"}, marks=pytest.mark.slow), {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 64},
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


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "largest", "rounded"), [
    ("int8", 127, np.rint), ("fp8", 448, lambda x: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))])
def test_pages_of_8_bits_in_every_group(engines: Any, pages: str, largest: float, rounded: Any) -> None:
    """Scales move with the numbers: copied, swapped, and in each unit of a bundle."""
    def stored(x: np.ndarray) -> np.ndarray:
        scale = np.abs(x).max(axis=-1, keepdims=True) / largest
        return np.asarray(rounded(x / scale) * scale)

    reference = replace(REFERENCE, stored=stored)
    engine = engines(kv_cache_dtype=pages, num_gpu_blocks_override=24, max_num_batched_tokens=7,
                     preemption_mode="swap", swap_space="0.01G")
    ids, _ = run(engine, REQUESTS)
    for name, found in ids.items():
        assert reference.error(PROMPTS[name], found, 40) is None, name
    assert engine.stats().num_preemptions > 0 and engine.stats().blocks_swapped_in > 0


@pytest.mark.parametrize(("family", "changes", "windows", "blocks"), [
    pytest.param("Mistral", {"sliding_window": 21}, (21, 21, 21, 21), 8, marks=pytest.mark.slow),
    ("Mistral", {"sliding_window": 21, "layer_types": ["full_attention", "sliding_attention"] * 2},
     (None, 21, None, 21), 16),
    pytest.param("Qwen2", {"sliding_window": 37, "use_sliding_window": True, "max_window_layers": 1},
                 (None, 37, 37, 37), 26, marks=pytest.mark.slow)])
def test_families_with_windows(tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...],
                               blocks: int) -> None:
    """From their configs, with prefix hits, forks, and too few blocks: preempted requests are swapped."""
    config = CONFIG | {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(),
                       "num_hidden_layers": len(windows)} | changes
    engine = Engine(EngineConfig.from_kwargs(
        model=str(write_model(tmp_path / "model", config)), **ENGINE_ARGS | {
            "num_gpu_blocks_override": blocks, "max_num_batched_tokens": 7, "preemption_mode": "swap",
            "swap_space": "0.01G"}))
    assert [group.window for group in engine.info.kv_groups] == sorted(set(windows), key=lambda window: window or 0)
    reference = Reference(config, random_weights(config), windows=windows)
    for _ in range(2):  # the second time prefixes are there
        ids, _ = run(engine, REQUESTS)
        for name, found in ids.items():
            assert reference.error(PROMPTS[name], found, 40) is None, name
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.blocks_swapped_in > 0
    engine.shutdown()


def test_proposed_tokens_change_no_id(engines: Any) -> None:
    """Right and wrong tokens are proposed to two requests at a time; later pairs find the prefixes of earlier ones."""
    engine = engines()
    pairs = [REQUESTS[index : index + 2] for index in range(2, 8, 2)]
    wanted = {name: ids for pair in pairs for name, ids in run(engine, pair)[0].items()}
    engine.reset_prefix_cache()
    scheduler = engine._scheduler
    accepted = rejected = 0
    for pair in pairs:
        ids: dict[str, list[int]] = {item.request_id: [] for item in pair}
        for item in pair:
            engine.add_request(item)
        in_flight: StepInFlight | None = None
        for number in count():
            if not (scheduler.has_unfinished() or in_flight):
                break
            for name, found in ids.items():
                right = wanted[name][len(found) : len(found) + 2]
                wrong = [(number + index) % 3 == 2 for index in range(len(right))]
                scheduler.propose(name, [(token + off) % VOCAB for token, off in zip(right, wrong, strict=True)])
            step = scheduler.schedule()
            running = engine._runner.dispatch(step) if step.chunks else None
            # Every other step is planned while the rows of the one before it are being computed.
            for done in [in_flight] if number % 2 else [in_flight, running]:
                if done is None:
                    continue
                sampled = done.sampled()
                rejected += sampled.count(REJECTED_TOKEN)
                accepted += done.step.num_proposed - sampled.count(REJECTED_TOKEN)
                for delta in scheduler.update_from_output(done.step, sampled):
                    ids[delta.request_id] += delta.token_ids
                engine.check_integrity()
            in_flight = running if number % 2 else None
        for name, found in ids.items():
            assert REFERENCE.error(PROMPTS[name], found, 40) is None, name
    assert accepted > 20 and rejected > 20


def test_a_prefix_is_reused_although_its_windows_have_moved_on(engines: Any) -> None:
    engine = engines()
    prompt = random_prompt(100, 3)
    run(engine, [request("first", prompt, 20)])
    ids, computed = run(engine, [request("second", prompt, 20)])
    assert computed == 100 - 96 + 19 and REFERENCE.error(prompt, ids["second"], 20) is None
    engine.reset_prefix_cache()
    ids, computed = run(engine, [request("third", prompt, 20)])
    assert computed == 100 + 19 and REFERENCE.error(prompt, ids["third"], 20) is None


def naive_beams(prompt: Sequence[int], width: int, length: int) -> list[tuple[float, list[int]]]:
    """The beams of a search that nothing ends before `length` tokens, with their log probabilities, by float64."""
    beams = [(0.0, list[int]())]
    for _ in range(length):
        found = []
        for total, ids in beams:
            logits = REFERENCE.logits([*prompt, *ids], 1)[0]
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            found += [(total + logprobs[token], [*ids, int(token)]) for token in np.argsort(-logprobs)[:width]]
        beams = sorted(found, key=lambda beam: -beam[0])[:width]
    return beams


@pytest.mark.parametrize("how", [{}, {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 7}], ids=str)
def test_beams_fork_in_every_group(model: tuple[Transformer, dict[Any, Any]], how: dict[str, Any]) -> None:
    """Also where they are preempted for one another; a second search finds the first one's prefix."""
    prompt = random_prompt(57, 4)
    wanted = naive_beams(prompt, 3, 24)
    with LLM(model=model, **ENGINE_ARGS | ROOMY | how) as llm:
        for _ in range(2):
            [output] = llm.beam_search([prompt], beam_width=3, max_tokens=24, ignore_eos=True, use_tqdm=False)
            assert [choice.cumulative_logprob for choice in output.outputs] == pytest.approx(
                [total for total, _ in wanted], abs=2e-3)
            assert [list(choice.token_ids) for choice in output.outputs] == [ids for _, ids in wanted]
        assert how or output.num_cached_tokens == 48


@pytest.mark.slow
def test_two_devices_share_a_model_of_three_groups(tmp_path: Path) -> None:
    """Prefix hits, forks, and a pool so small that requests are swapped; each device has half of every unit."""
    windows = (None, 21, 37, 21)
    config = LAYERS | {"num_hidden_layers": len(windows)}
    requests = [*REQUESTS[3:8], *(replace(item, fork_of=item.fork_of and "5") for item in REQUESTS[8:])]
    assert [item.choice for item in requests[5:]] == [0, 1, 2], "the choices are forked from number 5"
    [result] = run_cases([{
        "size": 2, "windows": windows,
        "engine": {**ENGINE_ARGS, "model": str(write_model(tmp_path / "model", config)), "max_num_batched_tokens": 7,
                   "num_gpu_blocks_override": 28, "preemption_mode": "swap", "swap_space": "0.01G"},
        "requests": [(item.prompt_token_ids, {"temperature": 0}, 40, {"choice": item.choice, "fork_of": item.fork_of})
                     for item in requests]}])
    reference = Reference(config, random_weights(config), windows=windows)
    for item, ids in zip(requests, result["ids"], strict=True):
        assert reference.error(item.prompt_token_ids, ids, 40) is None, item.request_id
    assert result["preemptions"] > 0 and result["swapped_in"] > 0
    tokens = sum(len(item.prompt_token_ids) + 39 for item in requests)
    assert result["computed"] < tokens - 2 * 45, "the forks have computed the prompt again"
    strips, heads, size = 1, config["num_key_value_heads"], config["head_dim"]
    assert result["pools"] == [28 * strips * 16 * heads * size * 2 * 4 // 2] * 2


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
@pytest.mark.parametrize(("family", "changes", "full"), [
    ("Mistral", {}, 0), ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (32768 + 32) // 16)])
def test_32k_tokens_in_a_window_of_4k(tmp_path: Path, family: str, changes: dict[str, Any], full: int) -> None:
    """Every layer has the window, or one of two: the pool has room for no more than they need; all ids are right."""
    config = CONFIG | {"model_type": family.lower(), "architectures": [f"{family}ForCausalLM"], "sliding_window": 4096,
                       "max_position_embeddings": 32768 + 64} | changes
    group, budget = KVGroup(4096), 256
    blocks = full + group.max_blocks(16, budget)
    engine = Engine(EngineConfig.from_kwargs(model=str(write_model(tmp_path / "model", config)), max_num_seqs=2,
                                             max_num_batched_tokens=budget, num_gpu_blocks_override=blocks + 1))
    prompt = random_prompt(32768, 5)
    engine.add_request(request("long", prompt, 32))
    most, ids = 0, list[int]()
    while engine.has_work():
        ids += [token for delta in engine.step().deltas for token in delta.token_ids]
        most = max(most, engine.stats().blocks_used)
    engine.shutdown()
    assert most <= blocks
    windows = (None, 4096) if full else (4096, 4096)
    assert Reference(config, random_weights(config), windows=windows).error(prompt, ids, 32) is None


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
