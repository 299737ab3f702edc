"""The engine from requests to ids, on a tiny model: what it computes, and what it promises about device and memory."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError, ContextLengthError, RequestError
from jaxpaged.core.messages import AbortRequests, EngineOutputs, EngineRequest, Shutdown
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.in_memory import InMemoryModel
from jaxpaged.engine.loop import run_engine_loop
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.execution.sharding import Partition, Placement, axes_tree
from jaxpaged.execution.step_functions import NativeKernels
from jaxpaged.execution.step_input import pad_step
from jaxpaged.execution.step_shape import StepShape, step_sizes
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.weights import load_params
from jaxpaged.models.registry import find_family
from jaxpaged.pallas_kernels import native_attention, native_linear
from jaxpaged.pallas_kernels.native_build import build
from tests.support.tiny_engine import FEW_BLOCKS, MakeEngine
from tests.support.tiny_llama import (
    CONFIG,
    CONTEXT,
    ENGINE_ARGS,
    VOCAB,
    Reference,
    module_and_params,
    random_prompt,
    random_weights,
)

REFERENCE = Reference(CONFIG, random_weights())
GREEDY = SamplingParams(temperature=0)


@dataclass
class Result:
    """What a request returned."""

    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None


def request(name: str, prompt: Sequence[int], max_tokens: int = 12, params: SamplingParams = GREEDY,
            **more: Any) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), params, max_tokens, **more)


def take(results: dict[str, Result], outputs: EngineOutputs) -> None:
    for delta in outputs.deltas:
        result = results.setdefault(delta.request_id, Result())
        assert result.finish_reason is None, "output of a request that has ended"
        result.ids += delta.token_ids
        result.finish_reason, result.stop_reason, result.error = delta.finish_reason, delta.stop_reason, delta.error


def finish(engine: Engine, results: dict[str, Result] | None = None) -> dict[str, Result]:
    """Run until nothing is left, with the bookkeeping checked after every step."""
    results = {} if results is None else results
    while engine.has_work():
        take(results, engine.step())
        engine.check_integrity()
    stats = engine.stats()
    assert (stats.blocks_used, stats.num_running, stats.num_waiting, stats.kv_slots_held) == (0, 0, 0, 0)
    return results


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, Result]:
    """All at once."""
    for item in requests:
        engine.add_request(item)
    return finish(engine)


def check_greedy(requests: Sequence[EngineRequest], results: dict[str, Result],
                 reference: Reference = REFERENCE) -> None:
    """All ended by length, with the reference's ids."""
    for item in requests:
        result = results[item.request_id]
        assert result.finish_reason == "length", result
        assert reference.error(item.prompt_token_ids, result.ids, item.max_tokens) is None


LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100)
BATCH = [request(f"length {length}", random_prompt(length, length), 24) for length in LENGTHS]
ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "small chunks": {"max_num_batched_tokens": 7},
    "attention on XLA": {"cpu_attention": "xla"},
    "all on XLA": {"cpu_attention": "xla", "cpu_linear": "xla"},
    "few blocks": FEW_BLOCKS,
    "one token a step": {"max_num_batched_tokens": 1, "max_num_seqs": 2},
    "large blocks": {"max_num_batched_tokens": 7, "block_size": 64, "num_gpu_blocks_override": 9},
}


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def few_blocks(make_engine: MakeEngine) -> Engine:
    return make_engine(**ENGINES["few blocks"])


# What it computes


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "attention on XLA")) for name in ENGINES])
def test_greedy_ids_do_not_depend_on_scheduling(make_engine: MakeEngine, name: str) -> None:
    """In a batch, alone, in chunks of every size, and with blocks taken away on the way."""
    engine = make_engine(**ENGINES[name])
    check_greedy(BATCH, run(engine, BATCH))
    check_greedy(BATCH[::-1], run(engine, BATCH[::-1]))
    assert (engine.stats().num_preemptions > 0) == (name == "few blocks")
    for item in BATCH[2:6:3]:
        check_greedy([item], run(engine, [item]))


@pytest.mark.slow
def test_greedy_ids_in_large_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=80, max_num_seqs=8)
    for batch in (BATCH, BATCH[::-1], *([item] for item in BATCH)):
        check_greedy(batch, run(engine, batch))


def test_arrivals_between_steps(engine: Engine) -> None:
    results: dict[str, Result] = {}
    for item in BATCH:
        engine.add_request(item)
        for _ in range(3):
            take(results, engine.step())
    check_greedy(BATCH, finish(engine, results))


SAMPLED = [
    request("plain", random_prompt(20, 1), 40, SamplingParams(), seed=1),
    request("second choice", random_prompt(20, 1), 40, SamplingParams(), seed=1, choice=1),
    request("cut", random_prompt(33, 2), 40, SamplingParams(top_k=20, top_p=0.9, min_p=0.01), seed=2),
    request("cool", random_prompt(7, 3), 40, SamplingParams(temperature=0.4), seed=2**63 + 1),
    request("hot", random_prompt(50, 4), 40, SamplingParams(temperature=3.0), seed=0),
    request("greedy", random_prompt(11, 5), 40),
]


def test_seeded_samples_are_the_same_alone_in_a_batch_and_after_preemption(engine: Engine, few_blocks: Engine) -> None:
    wanted = run(engine, SAMPLED)
    assert len({tuple(result.ids) for result in wanted.values()}) == len(SAMPLED)
    assert run(engine, SAMPLED[::-1]) == wanted
    for item in SAMPLED:
        assert run(engine, [item])[item.request_id] == wanted[item.request_id]
    before = few_blocks.stats().num_preemptions
    assert run(few_blocks, SAMPLED) == wanted
    assert few_blocks.stats().num_preemptions > before


def test_samples_without_a_seed_are_repeatable_only_with_the_engines(make_engine: MakeEngine, engine: Engine) -> None:
    items = [request(name, [1, 2, 3], 10, SamplingParams()) for name in "ab"]
    first, second = (run(make_engine(seed=7), items) for _ in range(2))
    assert first == second and first["a"].ids != first["b"].ids
    free = [tuple(run(engine, items)[name].ids) for _ in range(2) for name in "ab"]
    assert len(set(free)) == 4


def test_one_token(engine: Engine) -> None:
    items = [dataclasses.replace(item, max_tokens=1) for item in BATCH]
    check_greedy(items, run(engine, items))


def test_stop_ids(engine: Engine) -> None:
    """The id that stops is the last one given; the step that was already running goes unseen."""
    full = run(engine, BATCH)
    stopping: list[EngineRequest] = []
    for item in BATCH:
        ids = full[item.request_id].ids
        stop = ids[len(ids) // 2]
        eos = frozenset([stop]) if len(stopping) % 2 else frozenset()
        stopping.append(dataclasses.replace(item, stop_token_ids=frozenset([stop]), eos_token_ids=eos))
    results = run(engine, stopping)
    for item in stopping:
        ids, [stop] = full[item.request_id].ids, item.stop_token_ids
        reason = None if item.eos_token_ids else stop
        assert results[item.request_id] == Result(ids[: ids.index(stop) + 1], "stop", reason)


def test_the_first_step_returns_nothing_and_each_later_one_the_ids_of_the_step_before(engine: Engine) -> None:
    engine.add_request(request("r", [1, 2, 3], 3))
    assert engine.step().deltas == ()
    for _ in range(3):
        [delta] = engine.step().deltas
        assert len(delta.token_ids) == 1
    assert delta.finish_reason == "length" and not engine.has_work()


def test_new_weights_are_used_from_the_next_step_on(make_engine: MakeEngine, model_path: Path) -> None:
    engine = make_engine()
    weights = random_weights(seed=1)
    new = jax.tree.map(lambda leaf: leaf, _params(model_path))
    old = _params(model_path)
    new["embed"]["table"] = jnp.asarray(weights["model.embed_tokens.weight"])
    engine.update_weights(new)
    mixed = REFERENCE.weights | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"]}
    check_greedy(BATCH, run(engine, BATCH), Reference(CONFIG, mixed))
    engine.update_weights(old)
    check_greedy(BATCH, run(engine, BATCH))


def _params(path: Path) -> dict[Any, Any]:
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint.config)
    config = family.config_from_hf(checkpoint.config)
    _, state = nnx.split(nnx.eval_shape(lambda: family.build(config, jnp.float32)))
    return load_params(nnx.to_pure_dict(state), family.weights, checkpoint, config=config)


@pytest.mark.parametrize("change", ["shape", "dtype", "missing"])
def test_weights_that_do_not_fit_are_refused(engine: Engine, model_path: Path, change: str) -> None:
    params = _params(model_path)
    if change == "missing":
        del params["norm"]
    else:
        scale = params["norm"]["scale"]
        params["norm"]["scale"] = scale[:-1] if change == "shape" else scale.astype(jnp.bfloat16)
    with pytest.raises(ConfigError, match="differ"):
        engine.update_weights(params)
    check_greedy(BATCH[:2], run(engine, BATCH[:2]))


# Requests that fail, end early or cannot be served


BAD_ID = 200


@pytest.fixture(scope="module", params=["auto", "xla"])
def poisoned(model_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A model in memory with a NaN embedding of one id, and few blocks; on either path."""
    family = find_family(CONFIG)
    config = family.config_from_hf(CONFIG)
    module = nnx.eval_shape(lambda: family.build(config, jnp.float32))
    params = _params(model_path)
    params["embed"]["table"] = params["embed"]["table"].at[BAD_ID].set(jnp.nan)
    engine_config = EngineConfig.from_kwargs(model="in-memory", cpu_attention=request.param,
                                             cpu_linear=request.param, **ENGINE_ARGS | ENGINES["few blocks"])
    engine = Engine(engine_config, model=InMemoryModel(module, params))
    yield engine
    engine.shutdown()


def without_bad_id(prompt: Sequence[int]) -> list[int]:
    return [0 if token == BAD_ID else token for token in prompt]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=5, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("position", [0, 20, 39])
def test_logits_that_are_not_finite_fail_only_their_own_request(poisoned: Engine, params: SamplingParams,
                                                                position: int) -> None:
    good = [request(f"good {length}", without_bad_id(random_prompt(length, length)), 10) for length in (5, 30, 17)]
    prompt = without_bad_id(random_prompt(40, 1))
    prompt[position] = BAD_ID
    results = run(poisoned, [good[0], request("bad", prompt, 10, params), *good[1:]])
    assert results["bad"].finish_reason == "error" and not results["bad"].ids
    assert "not finite" in str(results["bad"].error)
    check_greedy(good, results)


def test_blocks_that_held_nan_can_be_used_again(poisoned: Engine) -> None:
    for round_ in range(3):
        bad = [request(f"bad {number}", [BAD_ID] * 60, 2) for number in range(4)]
        assert {result.finish_reason for result in run(poisoned, bad).values()} == {"error"}
        good = [request(f"good {length}", without_bad_id(random_prompt(length, length + round_)), 10)
                for length in (1, 17, 33, 60)]
        check_greedy(good, run(poisoned, good))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 9])
def test_an_aborted_request_ends_at_once_and_the_others_continue(engine: Engine, steps: int) -> None:
    """Queued, between prefill chunks, with a token in flight, and decoding."""
    for item in BATCH:
        engine.add_request(item)
    results: dict[str, Result] = {}
    for _ in range(steps):
        take(results, engine.step())
    gone = [BATCH[number].request_id for number in (1, 5, 7)]
    used = engine.stats().blocks_used
    engine.abort([*gone, "unknown", gone[0]])
    engine.abort(gone)
    engine.check_integrity()
    assert engine.stats().blocks_used <= used
    results = finish(engine, results)
    for name in gone:
        assert results[name].finish_reason == "abort"
    check_greedy([item for item in BATCH if item.request_id not in gone], results)


def test_aborting_everything_leaves_nothing(engine: Engine) -> None:
    for item in BATCH:
        engine.add_request(item)
    for _ in range(4):
        engine.step()
    engine.abort([item.request_id for item in BATCH])
    assert engine.stats().blocks_used == 0
    assert Counter(result.finish_reason for result in finish(engine).values()) == {"abort": len(BATCH)}


def test_a_request_that_can_never_fit_is_refused_and_the_rest_are_served(few_blocks: Engine) -> None:
    capacity = 9 * 16
    assert few_blocks.info.max_model_len == CONTEXT < capacity
    few_blocks.add_request(BATCH[0])
    with pytest.raises(ContextLengthError, match=f"is {CONTEXT} tokens, and {CONTEXT + 1} were asked for"):
        few_blocks.add_request(request("large", [1] * 100, CONTEXT + 1 - 100))
    with pytest.raises(RequestError, match="no tokens"):
        few_blocks.add_request(request("empty", [], 4))
    with pytest.raises(RequestError, match="already running"):
        few_blocks.add_request(BATCH[0])
    fits = request("fits", random_prompt(100, 1), CONTEXT - 100)
    few_blocks.add_request(fits)
    results = finish(few_blocks)
    check_greedy([BATCH[0], fits], results)


def test_a_pool_smaller_than_the_context_lowers_it_and_says_so(model_path: Path) -> None:
    lines: list[str] = []
    config = EngineConfig.from_kwargs(model=str(model_path), **ENGINE_ARGS | {
        "max_num_batched_tokens": 1, "max_num_seqs": 2, "num_gpu_blocks_override": 4})
    engine = Engine(config, lines.append)
    assert engine.info.max_model_len == 48
    [line] = [line for line in lines if "lowered from 128" in line]
    assert "--num-gpu-blocks-override" in line
    with pytest.raises(ContextLengthError, match="maximum context length is 48 tokens, and 49 were"):
        engine.add_request(request("large", [1] * 40, 9))
    full = [request(f"full {number}", random_prompt(40, number), 8) for number in range(3)]
    check_greedy(full, run(engine, full))
    engine.shutdown()


def test_the_loop_serves_messages_and_reports_refused_requests(engine: Engine) -> None:
    """Batches of messages in, one batch of outputs per step out; a refused request gets an answer, too."""
    batches: list[list[Any]] = [
        [BATCH[0], BATCH[0], request("large", [1] * 100, 100)], [], [BATCH[6], AbortRequests(("unknown",))],
        [BATCH[7]], [AbortRequests((BATCH[7].request_id,))],
    ]
    waits: list[bool] = []
    answers: dict[str, list[str | None]] = {}
    ids: dict[str, list[int]] = {}

    def receive(block: bool) -> list[Any]:
        waits.append(block)
        if batches:
            return batches.pop(0)
        return [Shutdown()] if block else []

    def send(outputs: EngineOutputs) -> None:
        for delta in outputs.deltas:
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason:
                answers.setdefault(delta.request_id, []).append(delta.finish_reason)

    run_engine_loop(engine, receive, send)
    assert answers == {BATCH[0].request_id: ["error", "length"], "large": ["error"], BATCH[6].request_id: ["length"],
                       BATCH[7].request_id: ["abort"]}
    assert REFERENCE.error(BATCH[6].prompt_token_ids, ids[BATCH[6].request_id], 24) is None
    assert waits[0] and waits[-1] and not any(waits[1:-1]), "it waits only when there is nothing to do"


def test_shutting_down_with_running_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for item in BATCH:
        engine.add_request(item)
    for _ in range(5):
        engine.step()
    engine.shutdown()
    assert not engine.has_work() and engine.stats().blocks_used == 0


# Compilation


class Compilations:
    """Counts what XLA compiles, or reads from the persistent cache, in this process."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


FULL = [
    SamplingParams(logprobs=20), SamplingParams(prompt_logprobs=3), SamplingParams(frequency_penalty=1, min_tokens=3),
    SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.2), SamplingParams(allowed_token_ids=[1, 2]),
]


def test_nothing_compiles_once_the_engine_is_ready(make_engine: MakeEngine) -> None:
    """Not even for the first request, nor for the first of any kind."""
    with Compilations() as seen:
        jax.jit(lambda x: x * 3 + 1)(np.float32(1))
        assert seen.count == 1, "the counter does not count"
        engines = [make_engine(enforce_eager=False), make_engine(**ENGINES["few blocks"], enforce_eager=False)]
        ready = seen.count
        assert ready > 1
        for engine in engines:
            compiled = engine.stats().compilations
            assert compiled == engine.info.num_programs
            run(engine, BATCH + SAMPLED)
            run(engine, [request(f"full {number}", random_prompt(9, number), 9, params)
                         for number, params in enumerate(FULL)])
            run(engine, [request("stop", [1, 2], 9, stop_token_ids=frozenset(range(0, VOCAB, 2)))])
            for item in BATCH:
                engine.add_request(item)
                engine.step()
            engine.abort([item.request_id for item in BATCH[::2]])
            finish(engine)
            assert engine.stats().compilations == compiled
        assert seen.count == ready


def test_eager_engines_compile_only_what_they_need(make_engine: MakeEngine) -> None:
    engine = make_engine(enforce_eager=True, enable_prefix_caching=False)
    assert engine.stats().compilations == 0
    check_greedy(BATCH[:1], run(engine, BATCH[:1]))
    first = engine.stats().compilations
    assert 0 < first < engine.info.num_programs
    check_greedy(BATCH, run(engine, BATCH))
    run(engine, SAMPLED)
    known = engine.stats().compilations
    assert first < known <= engine.info.num_programs
    run(engine, BATCH + SAMPLED)
    assert engine.stats().compilations == known


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 8, 16, 33, 100, 256, 8192])
def test_step_sizes_end_at_the_budget(budget: int, platform: str) -> None:
    sizes = step_sizes(budget, platform)
    assert sizes[-1] == budget and list(sizes) == sorted(set(sizes)) and sizes[0] >= 1
    shape = StepShape(sizes, 5, 8, 16, 9)
    for tokens in range(1, min(budget, 300) + 1):
        size = shape.size_for(tokens)
        assert tokens <= size <= budget and size in sizes
        assert size <= max(2 * tokens, 16), "more padding than tokens"
        assert shape.samples_of(size) == min(size, 5)


# Memory


def make_programs(num_blocks: int, native: bool) -> tuple[ProgramSet, KVCacheSpec]:
    module, params = module_and_params()
    cache = KVCacheSpec.of(module.config, 16, jnp.dtype(jnp.float32))
    shape = StepShape((2, 16), 4, CONTEXT // 16, 16, num_blocks)
    shapes = jax.eval_shape(lambda: params)
    return ProgramSet(nnx.split(module)[0], shapes, module.config, cache, shape,
                      axes=axes_tree(shapes, find_family(CONFIG).weights, module.config, Partition()),
                      placement=Placement.of(jax.devices()[:1], Partition()), vocab_size=VOCAB,
                      dtype=jnp.dtype(jnp.float32), platform="cpu", native=NativeKernels(native, native)), cache


@pytest.mark.parametrize(("size", "native"), [(2, True), (16, False), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (16, True)))])
def test_the_compiled_step_updates_the_pools_in_place(size: int, native: bool, native_folder: Path) -> None:
    """All of the pools is aliased, no instruction copies one, and temporaries are small whatever the pools' size."""
    if native and (failure := build(native_folder, [native_attention.KERNEL, native_linear.KERNEL])):
        pytest.skip(f"the native kernel cannot be built here: {failure}")
    temporaries = []
    for num_blocks in (64, 4096):
        programs, cache = make_programs(num_blocks, native)
        compiled = programs.get(("forward", size))
        analysis = compiled.memory_analysis()
        assert analysis is not None
        pool_bytes = num_blocks * cache.block_bytes
        assert analysis.alias_size_in_bytes >= pool_bytes
        temporaries.append(programs.temporary_bytes(("forward", size)))
        text = compiled.as_text()
        heads, head_dim = cache.num_kv_heads, cache.head_dim
        pool, flat = f"f32[{num_blocks},16,{heads},{head_dim}]", f"f32[{num_blocks},16,{heads * head_dim}]"
        assert text is not None and pool in text
        copies = [line for line in text.splitlines()
                  if (" copy(" in line or " copy-start(" in line) and (pool in line or flat in line)]
        assert not copies, copies[0]
    assert temporaries[0] == temporaries[1] < pool_bytes / 10


def test_the_pools_stay_where_they_are(engine: Engine) -> None:
    """No step moves them, and the ones before a step are used up by it."""
    pools = jax.tree.leaves(engine._runner._pools)
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    run(engine, BATCH + SAMPLED)
    assert all(pool.is_deleted() for pool in pools)
    assert [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(engine._runner._pools)] == addresses


def test_no_host_buffer_is_written_under_a_running_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dispatch gets memory of its own, frozen; once its step is collected it is not read any more."""
    buffers: list[np.ndarray] = []

    def keep(*args: Any, **more: Any) -> np.ndarray:
        buffers.append(pad_step(*args, **more))
        return buffers[-1]

    monkeypatch.setattr("jaxpaged.execution.model_runner.pad_step", keep)
    for item in BATCH:
        engine.add_request(item)
    results: dict[str, Result] = {}
    while engine.has_work():
        take(results, engine.step())
        for buffer in buffers[-2:]:
            assert not buffer.flags.writeable
        for old in buffers[:-1]:  # all but the step that has just been dispatched are collected
            old.flags.writeable = True
            old[:] = -(2**31) + 5
            old.flags.writeable = False
    assert len(buffers) > 24
    spans = sorted((buffer.__array_interface__["data"][0], buffer.nbytes) for buffer in buffers)
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    check_greedy(BATCH, results)


def test_statistics_add_up(engine: Engine) -> None:
    engine.reset_prefix_cache()
    before = engine.stats()
    tokens, steps, padding = 0, 0, before.padding_tokens
    for item in BATCH:
        engine.add_request(item)
    while engine.has_work():
        stats = engine.step().stats
        assert stats.num_running <= ENGINE_ARGS["max_num_seqs"] and stats.blocks_used <= stats.blocks_total == 32
        assert 0 <= stats.kv_slots_empty <= stats.kv_slots_held
        assert len(stats.step_tokens) == len(stats.step_seconds) <= 1
        tokens += sum(stats.step_tokens)
        steps += len(stats.step_tokens)
        assert stats.padding_tokens >= padding
        padding = stats.padding_tokens
    assert tokens == sum(len(item.prompt_token_ids) + item.max_tokens - 1 for item in BATCH)
    assert steps > 24 and padding - before.padding_tokens < 8 * steps
