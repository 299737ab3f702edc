"""One run on a machine with a GPU: are the kernels right there, and how fast are they?

    PYTHONPATH=. python bench/gpu_check.py --json check.json
    PYTHONPATH=. python bench/gpu_check.py --smoke              # on a CPU, tiny and interpreted: does the script work?

Each section is a process of its own with a time limit, so that one that fails, hangs or dies takes no other with it,
and what it has found until then counts. All together end within six minutes; the last thing printed is one short table.
Speeds are set against what this very GPU does in the same process: reading memory, and one large matrix product.
"""

import argparse
import contextlib
import functools
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.bench_aot import MODELS, engine_programs

# Seconds that each section may take, in the order in which they run; and all of them together.
LIMITS = {"device": 40, "kernels": 90, "decode": 70, "prefill": 40, "engine": 160, "aot": 60, "torch": 50}
TOTAL = 350
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16  # of Llama-3.1-8B
UNROLLED = 8  # calls in one program, so that launching them costs next to nothing


@dataclass(frozen=True, slots=True)
class Report:
    """Where a section writes what it finds: each line at once, so that it survives whatever comes after it."""

    file: Path
    deadline: float
    smoke: bool

    def put(self, name: str, **values: Any) -> None:
        values = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
        with self.file.open("a") as file:
            file.write(json.dumps({"name": name, **values}) + "\n")
        print(f"{name}: {values}", flush=True)

    def run(self, name: str, check: Callable[[], dict[str, Any]], least_seconds: float = 2) -> None:
        """Write what `check` finds. Its failure is a line too, and so is that no time was left for it."""
        if self.deadline - time.monotonic() < least_seconds:
            self.put(name, skipped="no time left")
            return
        try:
            self.put(name, **check())
        except Exception as error:
            traceback.print_exc()
            self.put(name, error=f"{type(error).__name__}: {error}"[:300])


def median_seconds(call: Callable[[], Any], at_least: float = 0.1, repeats: int = 5) -> float:
    """Median time of a call; calls are queued one behind the other, and waited for together."""
    import jax

    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    count = max(1, min(200, int(at_least / max(time.perf_counter() - begin, 1e-6))))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(count):
            result = call()  # only the last is kept: some are gigabytes
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / count)
    return statistics.median(times)


@functools.cache
def read_rate(smoke: bool) -> float:
    """Bytes per second of reading memory once."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((2**20 if smoke else 2**30,), jnp.float32)
    total = jax.jit(lambda x: jnp.sum(x))
    return x.nbytes / median_seconds(lambda: total(x))


@functools.cache
def matmul_rate(smoke: bool) -> float:
    """Operations per second of a large bfloat16 product."""
    import jax
    import jax.numpy as jnp

    size = 256 if smoke else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / median_seconds(lambda: product(x))


def gpu_target(smoke: bool) -> Any:
    import jax

    from jaxpaged.pallas_kernels.lowering import GpuTarget

    return GpuTarget((9, 0), 4, interpret=True) if smoke else GpuTarget.of(jax.devices()[0])


def check_device(report: Report) -> None:
    """What there is, and its rates: the denominators of everything else."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    report.put("device", kind=device.device_kind, jax=jax.__version__, python=sys.version.split()[0],
               memory_limit=int(stats.get("bytes_limit", 0)))

    def copy() -> dict[str, Any]:
        x = jnp.zeros((2**20 if report.smoke else 2**30,), jnp.float32)
        increment = jax.jit(lambda x: x + 1)
        return {"gb_per_s": 2 * x.nbytes / median_seconds(lambda: increment(x)) / 1e9}

    report.run("copy", copy)
    report.run("read", lambda: {"gb_per_s": read_rate(report.smoke) / 1e9})
    report.run("matmul bf16", lambda: {"tflop_per_s": matmul_rate(report.smoke) / 1e12})


@dataclass(frozen=True, slots=True)
class Step:
    """A step's arrays: pieces of (context, new tokens) in slots of their own, pages in random order."""

    q: Any
    pages: Any
    table: Any
    slot: Any
    position: Any

    @classmethod
    def make(cls, pieces: list[tuple[int, int]], *, heads: int = HEADS, kv_heads: int = KV_HEADS,
             head_dim: int = HEAD_DIM, page: int = PAGE, dtype: Any = "bfloat16", random: bool = True) -> "Step":
        """`random`: pages full of random numbers, else one page over and over, which makes large pools faster."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jaxpaged.pallas_kernels.kv_pages import KVPages, is_scaled, quantize

        rng = np.random.default_rng(0)
        counts = [-(-context // page) for context, _ in pieces]
        num_pages = sum(counts) + 1
        order = rng.permutation(num_pages - 1) + 1
        table = np.zeros((len(pieces) + 1, max(counts)), np.int32)
        first = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[first : first + count]
            first += count
        slot = np.concatenate([np.full(new, row) for row, (_, new) in enumerate(pieces)]).astype(np.int32)
        position = np.concatenate([np.arange(context - new, context) for context, new in pieces]).astype(np.int32)
        dtype = jnp.dtype(dtype)
        wide = dtype if dtype.itemsize > 1 else jnp.dtype("bfloat16")

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
    """The engine's attention as a jitted function of (q, pages, table, slot, position), so many times in a row."""
    import jax

    from jaxpaged.pallas_kernels import paged_attention
    from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
    from jaxpaged.pallas_kernels.work_list import make_work_list

    heads, kv_heads, head_dim = step.q.shape[1], step.pages.k.shape[2], step.q.shape[2]
    rule, bias = rule or AttentionRule(head_dim**-0.5), bias or HeadBias()
    tiles = paged_attention.choose_tiles(target, step.slot.size, heads // kv_heads, head_dim, step.pages.k.dtype)
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


def check_kernels(report: Report) -> None:
    """Every kernel against its plain specification, on the device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.pallas_kernels import reference
    from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias, alibi_slopes
    from jaxpaged.pallas_kernels.kv_pages import KVPages
    from jaxpaged.pallas_kernels.rotary_kv_write import rotary_kv_write

    target = gpu_target(report.smoke)
    mixed = [(5, 1), (17, 17), (33, 1)] if report.smoke else \
        [(1, 1), (15, 1), (16, 1), (17, 1), (700, 1), (1100, 1), (64, 64), (300, 70), (129, 40)]
    decode = [(1 + 97 * row % 1500, 1) for row in range(24)]

    def compare(pieces: list[tuple[int, int]], limit: float, rule: Any = None, bias: Any = None,
                **sizes: Any) -> dict[str, Any]:
        step = Step.make(pieces, **sizes)
        rule = rule or AttentionRule(step.q.shape[2] ** -0.5)
        found = np.asarray(attention(step, target, rule=rule, bias=bias)(), np.float32)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize == 2 else leaf, step.pages)
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(functools.partial(reference.paged_attention, rule=rule, bias=bias or HeadBias()))(
                step.q.astype(jnp.float32), wide, step.table, step.slot, step.position)
        off = float(np.abs(found - np.asarray(wanted)).max())
        return {"off_by": off, "ok": off < limit}

    small: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64} if report.smoke else {}
    cases: dict[str, Callable[[], dict[str, Any]]] = {"mixed": lambda: compare(mixed, 0.03, **small)}
    if not report.smoke:
        rule = AttentionRule(HEAD_DIM**-0.5, window=100, softcap=20.0)
        bias = HeadBias(jnp.asarray(alibi_slopes(HEADS)), jnp.linspace(-1, 1, HEADS))
        cases |= {
            "decode": lambda: compare(decode, 0.03),
            "int8 pages": lambda: compare(mixed, 0.05, dtype="int8"),
            "window, soft cap": lambda: compare(mixed, 0.03, rule),
            "ALiBi, sinks": lambda: compare(mixed, 0.03, None, bias),
            "float16": lambda: compare(mixed, 0.01, dtype="float16"),
            "float32": lambda: compare(mixed, 0.001, dtype="float32"),
            "group 7, head 64": lambda: compare(mixed, 0.03, heads=28, kv_heads=4, head_dim=64),
            "group 9, head 96, pages of 64": lambda: compare(mixed, 0.03, heads=18, kv_heads=2, head_dim=96, page=64),
            "head 256": lambda: compare(mixed, 0.03, heads=16, kv_heads=8, head_dim=256),
            "head 80": lambda: compare(decode, 0.03, heads=8, kv_heads=8, head_dim=80),
        }
        if target.has_fp8:
            cases["fp8 pages"] = lambda: compare(mixed, 0.15, dtype="float8_e4m3fn")
    def rotary(dtype: str) -> dict[str, Any]:
        tokens = 8 if report.smoke else 200
        step = Step.make([(tokens, tokens)], dtype=dtype, **small)
        kv_heads, head_dim = step.pages.k.shape[2], step.q.shape[2]
        keys = jax.random.split(jax.random.key(5), 3)
        k, v = (jax.random.normal(key, (tokens, kv_heads, head_dim)).astype(step.q.dtype) for key in keys[:2])
        angle = jax.random.uniform(keys[2], (tokens, head_dim // 2), maxval=6.0)
        page = jnp.where(jnp.arange(tokens) % 5 == 4, -1, step.table[0, jnp.arange(tokens) // PAGE])
        args = (step.q, k, v, jnp.cos(angle), jnp.sin(angle), page, jnp.arange(tokens) % PAGE)
        q, pages = jax.jit(functools.partial(rotary_kv_write, target=target))(*args, step.pages)
        wanted_q, wanted = reference.rotary_kv_write(*args, step.pages)

        def away(found: Any, wanted: Any) -> float:
            return float(np.abs(np.asarray(found, np.float32) - np.asarray(wanted, np.float32)).max())

        def unscaled(pages: KVPages) -> Any:
            return [np.asarray(pool, np.float32) * (1 if scale is None else
                                                    np.asarray(scale).swapaxes(1, 2)[..., None])
                    for pool, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))]

        off = max(away(q, wanted_q), *(away(*pair) for pair in zip(unscaled(pages), unscaled(wanted), strict=True)))
        return {"off_by": off, "ok": off < 0.05}

    report.run("attention, mixed", cases.pop("mixed"))
    for dtype in ("int8",) if report.smoke else ("bfloat16", "int8"):
        report.run(f"rotary and KV write, {dtype}", functools.partial(rotary, dtype))
    report.run("sampler", lambda: compare_sampler(target, report.smoke))
    for name, case in cases.items():
        report.run(f"attention, {name}", case, 5)


def compare_sampler(target: Any, smoke: bool) -> dict[str, Any]:
    """The kernel's draws beside the XLA path's, which draws the same but for rounding; and its time for 64 rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.execution.sampler import sample as sample_with_xla
    from jaxpaged.execution.sampler import state_of
    from jaxpaged.messages import EngineRequest
    from jaxpaged.pallas_kernels.sampler import SlotParameters, sample
    from jaxpaged.sampling_params import SamplingParams

    rows, vocab = (4, 600) if smoke else (64, 128256)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 3, (rows, vocab)), jnp.float32)
    params = [SamplingParams(temperature=float(rng.choice([0, 0.7, 1.3])), top_k=int(rng.choice([0, 1, 40])),
                             top_p=float(rng.choice([1, 0.9])), min_p=float(rng.choice([0, 0.05])))
              for _ in range(rows)]
    state = jax.device_put(state_of([EngineRequest(str(row), (1,), item, 1, seed=row)
                                     for row, item in enumerate(params)], rows))
    slot, last = jnp.arange(rows), jnp.zeros(rows, jnp.int32)
    parameters = SlotParameters(*(getattr(state, name) for name in SlotParameters._fields))
    kernel = jax.jit(functools.partial(sample, target=target))
    plain = jax.jit(sample_with_xla)
    equal = total = 0
    for position in range(1 if smoke else 20):
        at = jnp.full(rows, position, jnp.int32)
        equal += int(jnp.sum(kernel(logits, parameters, slot, at, last)[0] == plain(logits, state, at)))
        total += rows
    found: dict[str, Any] = {"equal": equal, "of": total, "ok": equal >= 0.98 * total}
    if not smoke:
        found["us"] = 1e6 * median_seconds(lambda: kernel(logits, parameters, slot, at, last)[0])
    return found


def check_decode(report: Report) -> None:
    """Bytes of KV per second over the rate of reading memory."""
    import jax

    target = gpu_target(report.smoke)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**40)
    sizes = [(2, 40)] if report.smoke else [(64, 8192), (1, 8192), (16, 8192), (64, 1024), (256, 1024), (16, 32768),
                                            (256, 8192), (1, 32768), (16, 1024), (1, 1024), (64, 32768), (256, 32768)]

    def measure(contexts: list[int], calls: int) -> dict[str, Any]:
        sum_bytes = 2 * 2 * KV_HEADS * HEAD_DIM * sum(contexts)
        if sum_bytes > 0.8 * memory:
            return {"skipped": f"{sum_bytes / 1e9:.0f} GB of KV do not fit"}
        step = Step.make([(context, 1) for context in contexts], random=report.smoke)
        seconds = median_seconds(attention(step, target, calls=calls)) / calls
        return {"us": 1e6 * seconds, "gb_per_s": sum_bytes / seconds / 1e9,
                "of_read_rate": sum_bytes / seconds / read_rate(report.smoke), "kv_mb": sum_bytes / 1e6}

    calls = 1 if report.smoke else UNROLLED
    for batch, context in sizes:
        report.run(f"decode {batch} x {context}", functools.partial(measure, [context] * batch, calls), 4)
        if (batch, context) == (64, 8192):
            ragged = [1 + (row * 7919) % 16384 for row in range(64)]
            report.run("decode 64 x 1 to 16384", functools.partial(measure, ragged, calls), 4)


def check_prefill(report: Report) -> None:
    """Operations of causal attention per second over the rate of a large matrix product."""
    target = gpu_target(report.smoke)

    def measure(pieces: list[tuple[int, int]]) -> dict[str, Any]:
        step = Step.make(pieces)
        seconds = median_seconds(attention(step, target), repeats=3)
        pairs = sum(new * (context - new) + new * (new + 1) / 2 for context, new in pieces)
        rate = 4 * HEADS * HEAD_DIM * pairs / seconds
        return {"us": 1e6 * seconds, "tflop_per_s": rate / 1e12, "of_matmul_rate": rate / matmul_rate(report.smoke)}

    cases = {"prefill 32": [(32, 32)]} if report.smoke else {
        "prefill 8192": [(8192, 8192)], "prefill 2048 after 6144": [(8192, 2048)],
        "prefill 4 x 2048": [(2048, 2048)] * 4}
    for name, pieces in cases.items():
        report.run(name, functools.partial(measure, pieces), 4)


def check_torch(report: Report) -> None:
    """PyTorch's attention on contiguous keys and values, for comparison; FlexAttention compiles for half a minute."""
    try:
        import torch
    except ImportError:
        report.put("torch", skipped="not installed")
        return
    if not torch.cuda.is_available():
        report.put("torch", skipped="sees no GPU")
        return

    def median(call: Callable[[], Any]) -> float:
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 20)
        return statistics.median(times)

    def tensors(batch: int, queries: int, context: int) -> Any:
        sizes = ((HEADS, queries), (KV_HEADS, context), (KV_HEADS, context))
        return [torch.randn(batch, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                for heads, length in sizes]

    def decode(batch: int, context: int) -> dict[str, Any]:
        q, k, v = tensors(batch, 1, context)
        seconds = median(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        return {"us": 1e6 * seconds, "gb_per_s": 4 * KV_HEADS * HEAD_DIM * batch * context / seconds / 1e9}

    def prefill(flex: bool) -> dict[str, Any]:
        q, k, v = tensors(1, 8192, 8192)
        if flex:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            mask = create_block_mask(lambda b, h, row, column: row >= column, None, None, 8192, 8192)
            compiled = torch.compile(flex_attention)
            seconds = median(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))
        else:
            seconds = median(lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True))
        return {"us": 1e6 * seconds, "tflop_per_s": 4 * HEADS * HEAD_DIM * 8192 * 8193 / 2 / seconds / 1e12}

    for batch, context in ((64, 8192), (16, 8192), (64, 1024), (1, 8192)):
        report.run(f"torch SDPA decode {batch} x {context}", functools.partial(decode, batch, context))
    report.run("torch SDPA prefill 8192", lambda: prefill(False))
    report.run("torch FlexAttention prefill 8192", lambda: prefill(True), 10)


def small_programs(devices: Any, platform: str) -> tuple[Any, Any]:
    """The engine's programs for a small model's first two layers, and its plan."""
    from jaxpaged.execution.devices import DeviceInfo

    hf = MODELS["smollm2-135m"] | {"max_position_embeddings": 512}
    return engine_programs(hf, DeviceInfo(platform, "", 2**34, tuple(devices)), 2, max_num_seqs=8,
                           max_num_batched_tokens=64, num_gpu_blocks_override=64)


PROGRAM = ("forward", 8)


def compile_without_device(gpu: str, file: str) -> None:
    """In a process that sees no GPU: compile a program for `gpu` ("cpu" is itself) and pickle the executable."""
    import jax
    from jax.experimental.serialize_executable import serialize

    from jaxpaged.execution import aot
    from jaxpaged.execution.gpu_targets import find_gpu
    from jaxpaged.execution.programs import COMPILER_OPTIONS

    platform = "cpu" if gpu == "cpu" else "cuda"
    devices = jax.devices("cpu")[:1] if gpu == "cpu" else aot.compile_only_devices(find_gpu(gpu))
    programs, _ = small_programs(devices, platform)
    compiled = programs.lower(PROGRAM).compile(compiler_options=COMPILER_OPTIONS[platform])
    Path(file).write_bytes(pickle.dumps(serialize(compiled)))


def check_aot(report: Report) -> None:
    """Load and run what a process without a GPU has compiled, and compare with what is compiled here."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.serialize_executable import deserialize_and_load

    from jaxpaged.execution.gpu_targets import GPUS

    device = jax.devices()[0]
    platform = "cpu" if report.smoke else "cuda"
    names = [name for name, gpu in GPUS.items() if gpu.kind == device.device_kind]
    name = "cpu" if report.smoke else names[0] if names else ""
    if not name:
        report.put("compile without GPU", skipped=f"{device.device_kind} is not in the table of GPUs")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program")
        code = f"from bench.gpu_check import compile_without_device; compile_without_device({name!r}, {str(file)!r})"
        hidden = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
                  "JAX_ENABLE_COMPILATION_CACHE": "false"}
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], env=hidden, capture_output=True, text=True, timeout=120)
        if done.returncode:
            report.put("compile without GPU", error=(done.stderr.strip().splitlines() or ["died"])[-1][:300])
            return
        report.put("compile without GPU", seconds=time.perf_counter() - begin, bytes=file.stat().st_size)
        payload = pickle.loads(file.read_bytes())
    programs, _ = small_programs([device], platform)

    def arguments() -> Any:
        """Small random weights and pools, and zeros: every row is token 0 at position 0 of slot 0."""
        rng = np.random.default_rng(0)
        values, _ = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(0, 0.05, leaf.shape) if jnp.issubdtype(leaf.dtype, jnp.floating)
                                     else np.zeros(leaf.shape), leaf.dtype), programs.lower(PROGRAM).in_avals)
        return values

    def load_and_compare() -> dict[str, Any]:
        begin = time.perf_counter()
        loaded = deserialize_and_load(*payload)
        seconds = time.perf_counter() - begin
        found, wanted = (np.asarray(run(*arguments())[0]) for run in (loaded, programs.get(PROGRAM)))
        off = float(np.abs(found - wanted).max())
        return {"load_seconds": seconds, "off_by": off, "ok": off < 0.05}

    report.run("load and run", load_and_compare)


def check_engine(report: Report) -> None:
    """The engine with random weights in Llama-3.1-8B's shapes: decode steps over their memory floor, and tokens/s."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxpaged.config import EngineConfig
    from jaxpaged.engine import Engine
    from jaxpaged.execution.model_runner import StepInFlight
    from jaxpaged.messages import EngineRequest
    from jaxpaged.models.registry import find_family
    from jaxpaged.sampling_params import SamplingParams
    from jaxpaged.startup import InMemoryModel

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
    if limit > 60e9:  # room for 256 requests; on a smaller GPU what the plan finds has to do
        sizes["kv_cache_memory_bytes"] = 24 * 2**30
    config_of_engine = EngineConfig(model="random", enforce_eager=True, enable_prefix_caching=False, **sizes)
    engine = Engine(config_of_engine, print, model=InMemoryModel(module, params))
    report.put("engine", start_seconds=time.perf_counter() - begin, blocks=engine.info.num_blocks)
    waited = 0.0
    sampled = StepInFlight.sampled

    def timed(step: Any) -> Any:
        nonlocal waited
        start = time.perf_counter()
        result = sampled(step)
        waited += time.perf_counter() - start
        return result

    StepInFlight.sampled = timed  # type: ignore[method-assign, assignment]

    def decode(batch: int) -> dict[str, Any]:
        nonlocal waited
        names = [f"{batch}-{row}" for row in range(batch)]
        for row, name in enumerate(names):
            ids = tuple((row * 31 + place * 7) % config.vocab_size for place in range(prompt))
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
                "host_ms": 1e3 * host, "tokens_per_s": tokens / steps / seconds, "first_tokens_s": first_tokens}

    for batch in batches:
        report.run(f"engine, {batch} requests", functools.partial(decode, batch), 8 if report.smoke else 25)


def starts_cuda(report: Report, section: str) -> bool:
    """Start JAX on the GPU; a line says why where that fails."""
    from jaxpaged.execution.devices import select_device

    try:
        select_device("cuda")
    except Exception as error:
        report.put(section, error=str(error)[:300])
        return False
    return True


CHECKS = {"device": check_device, "kernels": check_kernels, "decode": check_decode, "prefill": check_prefill,
          "engine": check_engine, "aot": check_aot, "torch": check_torch}


def run_section(name: str, seconds: float, smoke: bool) -> list[dict[str, Any]]:
    """Run one section in a process of its own, for at most so long; returns its lines."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lines")
        command = [sys.executable, __file__, "--section", name, "--lines", str(file), "--seconds", str(seconds - 5)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"JAX_PLATFORMS": "cpu"} if smoke else {})
        code: int | str
        try:
            code = subprocess.run([*command, *["--smoke"] * smoke], env=environment, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
        lines = []
        for line in file.read_text().splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):  # cut off in the middle
                lines.append(json.loads(line))
        if code:
            lines.append({"name": f"{name}: process", "error": str(code)})
        return [{"section": name, **line} for line in lines]


def summary(lines: list[dict[str, Any]]) -> list[str]:
    """One short line each."""
    shown = []
    for line in lines:
        values = {key: value for key, value in line.items() if key not in ("section", "name")}
        mark = "FAIL" if "error" in line or line.get("ok") is False else "skip" if "skipped" in line else "ok"
        shown.append(f"{mark:4} {line['section']:8} {line['name'][:38]:38} "
                     + " ".join(f"{key}={value}" for key, value in values.items() if key != "ok")[:120])
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="write all results to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, kernels interpreted")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--section", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        report = Report(args.lines, time.monotonic() + args.seconds, args.smoke)
        if args.smoke or args.section == "torch" or starts_cuda(report, args.section):
            CHECKS[args.section](report)
        return
    begin, lines = time.monotonic(), []
    for name in args.only:
        left = TOTAL - (time.monotonic() - begin)
        if left < 15:
            lines.append({"section": name, "name": name, "skipped": "no time left"})
            continue
        lines += run_section(name, min(LIMITS[name], left), args.smoke)
        if args.json:
            args.json.write_text(json.dumps(lines, indent=1) + "\n")
    print("\n" + "\n".join(summary(lines)), flush=True)


if __name__ == "__main__":
    main()
