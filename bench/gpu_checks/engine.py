"""The whole engine: decode steps over their memory floor, the host's share, tokens per second."""

import functools
import time
from typing import Any

from bench.bench_aot import MODELS
from bench.gpu_checks.report import STEP_GOAL, Report, read_rate


def check_engine(report: Report) -> None:
    """The engine with random weights in Llama-3.1-8B's shapes: decode steps over their memory floor, and tokens/s."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxpaged.core.config import EngineConfig
    from jaxpaged.core.messages import EngineRequest
    from jaxpaged.core.sampling_params import SamplingParams
    from jaxpaged.engine.engine import Engine
    from jaxpaged.engine.in_memory import InMemoryModel
    from jaxpaged.execution.model_runner import StepInFlight
    from jaxpaged.models.registry import find_family

    hf = MODELS["llama-3.1-8b"] if not report.smoke else MODELS["smollm2-135m"] | {
        "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512}
    family = find_family(hf)
    config = family.config_from_hf(hf)
    dtype = jnp.dtype("float32" if report.smoke else "bfloat16")
    module = nnx.eval_shape(lambda: family.build(config, dtype))

    def draw(shape: Any, seed: int) -> Any:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * 0.02).astype(dtype)

    made = jax.jit(draw, static_argnums=(0, 1))
    shapes = nnx.to_pure_dict(nnx.state(module))
    params = jax.tree.map(lambda leaf: made(leaf.shape, leaf.size % 997), shapes)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    report.put("weights", gb=weight_bytes / 1e9)
    begin = time.perf_counter()
    rate = read_rate(report.smoke)
    batches = (2, 4) if report.smoke else (64, 256, 1, 16)
    prompt, steps = (20, 8) if report.smoke else (512, 48)
    sizes: dict[str, Any] = {
        "device": "cpu", "max_model_len": 512, "max_num_seqs": max(batches), "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 128,
    } if report.smoke else {
        "device": "cuda", "max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit > 60e9:  # room for 256 requests; on a smaller GPU what fits has to do
        sizes["kv_cache_memory_bytes"] = 24 * 2**30

    def start(**flags: Any) -> Engine:
        options = sizes | flags
        return Engine(EngineConfig(model="random", enforce_eager=True, enable_prefix_caching=False, **options), print,
                      model=InMemoryModel(module, params))

    engine = start()
    report.put("engine", start_seconds=time.perf_counter() - begin, blocks=engine.info.num_blocks,
               attention=engine.info.attention)
    waited = 0.0
    sampled = StepInFlight.sampled

    def timed(step: Any) -> Any:
        nonlocal waited
        start = time.perf_counter()
        result = sampled(step)
        waited += time.perf_counter() - start
        return result

    StepInFlight.sampled = timed  # type: ignore[method-assign, assignment]

    def decode(engine: Engine, batch: int) -> dict[str, Any]:
        nonlocal waited
        names = [f"{batch}-{row}" for row in range(batch)]
        for row, name in enumerate(names):
            ids = tuple((row * 31 + index * 7) % config.vocab_size for index in range(prompt))
            engine.add_request(EngineRequest(name, ids, SamplingParams(temperature=0, ignore_eos=True), 400, seed=row))
        begin, started = time.perf_counter(), set[str]()
        while len(started) < batch:
            assert time.monotonic() < report.deadline, "no time left"
            started |= {delta.request_id for delta in engine.step().deltas if delta.token_ids}
        first_tokens = time.perf_counter() - begin
        for _ in range(4):
            engine.step()  # the decode program compiles here
        waited, begin = 0.0, time.perf_counter()
        tokens = sum(len(delta.token_ids) for _ in range(steps) for delta in engine.step().deltas)
        seconds = (time.perf_counter() - begin) / steps
        host = seconds - waited / steps
        engine.abort(names)
        while engine.has_work():
            engine.step()
        kv_bytes = 2 * dtype.itemsize * config.num_layers * config.num_kv_heads * config.head_dim * batch * prompt
        floor = (weight_bytes + kv_bytes) / rate
        return {"step_ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "floor_over_step": floor / seconds,
                "goal": STEP_GOAL, "host_ms": 1e3 * host, "tokens_per_s": tokens / steps / seconds,
                "first_tokens_s": first_tokens}

    for batch in batches:
        report.run(f"engine, {batch} requests", functools.partial(decode, engine, batch), 8 if report.smoke else 25)
    if engine.info.attention.startswith("Mosaic") and report.deadline - time.monotonic() > 45:
        engine.shutdown()
        other = start(gpu_attention="triton", kv_cache_memory_bytes=4 * 2**30)
        for batch in (16, 1):  # larger steps are Triton's anyway
            report.run(f"engine by Triton, {batch} requests", functools.partial(decode, other, batch), 25)
