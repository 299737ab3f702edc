"""Attention's speed: decode over the rate of reading memory, prompts over that of a large matrix product."""

import functools
from dataclasses import dataclass
from typing import Any

from bench.gpu_checks.report import (
    DECODE_GOAL,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PREFILL_GOAL,
    Report,
    copy_rate,
    gpu_target,
    matmul_rate,
    median_seconds,
    read_rate,
)

UNROLLED = 8  # calls in one program, so that launching them costs next to nothing


@dataclass(frozen=True, slots=True)
class Step:
    """A step's arrays: chunks of (context, new tokens) in slots of their own, pages in random order."""

    q: Any
    pages: Any
    table: Any
    slot: Any
    position: Any

    @classmethod
    def make(cls, chunks: list[tuple[int, int]], *, heads: int = HEADS, kv_heads: int = KV_HEADS,
             head_dim: int = HEAD_DIM, page: int = PAGE, dtype: Any = "bfloat16", wide: Any = "bfloat16",
             random: bool = True) -> "Step":
        """Args:
            dtype, wide: of the pages, and of the queries where the pages are 8-bit ones, else they have the same.
            random: pages full of random numbers, else one page over and over, which makes large pools faster.
        """
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jaxpaged.pallas_kernels.kv_pages import KVPages, is_scaled, quantize

        rng = np.random.default_rng(0)
        counts = [-(-context // page) for context, _ in chunks]
        num_pages = sum(counts) + 1
        order = rng.permutation(num_pages - 1) + 1
        table = np.zeros((len(chunks) + 1, max(counts)), np.int32)
        first = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[first : first + count]
            first += count
        slot = np.concatenate([np.full(new, row) for row, (_, new) in enumerate(chunks)]).astype(np.int32)
        position = np.concatenate([np.arange(context - new, context) for context, new in chunks]).astype(np.int32)
        dtype = jnp.dtype(dtype)
        wide = dtype if dtype.itemsize > 1 else jnp.dtype(wide)

        def pool(seed: int) -> Any:
            held = num_pages if random else 1
            made = jax.random.normal(jax.random.key(seed), (held, page, kv_heads, head_dim), jnp.float32).astype(wide)
            stored, scale = quantize(made, dtype) if is_scaled(dtype) else (made, None)
            stored = jnp.broadcast_to(stored, (num_pages, *stored.shape[1:]))
            return stored, None if scale is None else jnp.broadcast_to(scale.swapaxes(1, 2),
                                                                       (num_pages, kv_heads, page))

        (k, k_scale), (v, v_scale) = (jax.jit(pool, static_argnums=0)(seed) for seed in (1, 2))
        q = jax.random.normal(jax.random.key(3), (slot.size, heads, head_dim), jnp.float32).astype(wide)
        return cls(q, KVPages(k, v, k_scale, v_scale), *map(jnp.asarray, (table, slot, position)))

    @property
    def pool_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pages if pool is not None)


def attention(step: Step, target: Any, *, rule: Any = None, bias: Any = None, calls: int = 1) -> Any:
    """The engine's attention, `calls` times in a row, as a jitted function of (q, pages, table, slot, position)."""
    import jax

    from jaxpaged.pallas_kernels import paged_attention
    from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
    from jaxpaged.pallas_kernels.work_list import make_work_list

    heads, kv_heads, head_dim = step.q.shape[1], step.pages.k.shape[2], step.q.shape[2]
    rule, bias = rule or AttentionRule(head_dim**-0.5), bias or HeadBias()
    tiles = paged_attention.choose_tiles(target, step.slot.size, heads // kv_heads, head_dim, step.q.dtype,
                                         step.pages.k.dtype)
    slots = step.table.shape[0] - 1
    sizes = paged_attention.work_sizes(target, tiles, step.slot.size, slots, heads, kv_heads)

    @jax.jit  # traced once for all calls
    def attend(q: Any, pages: Any, table: Any, work: Any) -> Any:
        return paged_attention.paged_attention(q, pages, table, work, rule, bias, tiles=tiles, target=target)

    def run(q: Any, pages: Any, table: Any, slot: Any, position: Any) -> Any:
        work = make_work_list(slot, position, slots, sizes, rule.window)
        for _ in range(calls):
            q = attend(q, pages, table, work)
        return q

    compiled = jax.jit(run).lower(step.q, step.pages, step.table, step.slot, step.position).compile()
    return lambda: compiled(step.q, step.pages, step.table, step.slot, step.position)


def check_decode(report: Report) -> None:
    """Bytes of KV per second over the rates of reading and of copying memory."""
    import jax

    target = gpu_target(report.smoke)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**40)
    sizes = [(2, 40)] if report.smoke else [(64, 8192), (1, 8192), (16, 8192), (64, 1024), (256, 1024), (16, 32768),
                                            (256, 8192), (1, 32768), (16, 1024), (1, 1024), (64, 32768), (256, 32768)]

    def measure(contexts: list[int]) -> dict[str, Any]:
        if kv_bytes(contexts) > 0.8 * memory:
            return {"skipped": f"{kv_bytes(contexts) / 1e9:.0f} GB of KV do not fit"}
        return measure_decode(contexts, target, report.smoke) | (
            {"goal": DECODE_GOAL} if contexts == [8192] * 64 else {})

    for batch, context in sizes:
        report.run(f"decode {batch} x {context}", functools.partial(measure, [context] * batch), 4)
        if (batch, context) == (64, 8192):
            ragged = [1 + (row * 7919) % 16384 for row in range(64)]
            report.run("decode 64 x 1 to 16384", functools.partial(measure, ragged), 4)


def kv_bytes(contexts: list[int]) -> int:
    """Of one layer's keys and values, in bfloat16."""
    return 2 * 2 * KV_HEADS * HEAD_DIM * sum(contexts)


def measure_decode(contexts: list[int], target: Any, smoke: bool) -> dict[str, Any]:
    """Time of a layer's attention for one new token of each sequence, and what it reads per second."""
    calls, num_bytes = 1 if smoke else UNROLLED, kv_bytes(contexts)
    step = Step.make([(context, 1) for context in contexts], random=smoke)
    seconds = median_seconds(attention(step, target, calls=calls)) / calls
    rate = num_bytes / seconds
    return {"us": 1e6 * seconds, "gb_per_s": rate / 1e9, "of_read_rate": rate / read_rate(smoke),
            "of_copy_rate": rate / copy_rate(smoke), "kv_mb": num_bytes / 1e6}


def check_prefill(report: Report) -> None:
    """Operations of causal attention per second over the rate of a large matrix product."""
    target = gpu_target(report.smoke)

    def measure(chunks: list[tuple[int, int]]) -> dict[str, Any]:
        step = Step.make(chunks)
        seconds = median_seconds(attention(step, target), repeats=3)
        pairs = sum(new * (context - new) + new * (new + 1) / 2 for context, new in chunks)
        rate = 4 * HEADS * HEAD_DIM * pairs / seconds
        return {"us": 1e6 * seconds, "tflop_per_s": rate / 1e12, "of_matmul_rate": rate / matmul_rate(report.smoke)} | (
            {"goal": PREFILL_GOAL} if chunks == [(8192, 8192)] else {})

    cases = {"prefill 32": [(32, 32)]} if report.smoke else {
        "prefill 8192": [(8192, 8192)], "prefill 2048 after 6144": [(8192, 2048)],
        "prefill 4 x 2048": [(2048, 2048)] * 4}
    for name, chunks in cases.items():
        report.run(name, functools.partial(measure, chunks), 4)
