"""The attention kernel, compiled for absent GPUs: what interpreting it cannot see.

Each variant must lower, keep its registers, load its pages 16 bytes at a time while it computes, and use tensor cores.
They are compiled in a child process: a compiler that aborts is then a failed test of the variant that it aborted on.
"""

import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import gpu_code
from bench.bench_aot import MODELS, engine_programs
from jaxpaged.core.errors import ConfigError
from jaxpaged.execution import aot
from jaxpaged.execution.devices import DeviceInfo
from jaxpaged.execution.gpu_targets import GpuSpec, find_gpu
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.pallas_kernels import paged_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.lowering import GpuTarget, lowering_for
from jaxpaged.pallas_kernels.work_list import make_work_list
from tests.support.compile_only import GPU_PARAMS, OTHER_GPU, QUICK_GPU

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and softcap": {"window": 1000, "softcap": 30.0},
    "alibi and sinks": {"alibi": True, "sinks": True},
    "everything": {"window": 4096, "softcap": 50.0, "alibi": True, "sinks": True},
}
FACTORS: tuple[tuple[Any, ...], ...] = (
    (128, 64, 80, 96, 256),  # head size
    ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn"),  # pages
    (16, 32, 64, 128),  # page size
    (4, 1, 7, 16),  # query heads per kv head
    tuple(FEATURES),
    (8, 64),  # tokens: small tiles alone, and both
)
Variant = tuple[Any, ...]


def pairwise() -> list[Variant]:
    """Variants in which every two values of different factors meet, picked one by one for the most new pairs."""
    def pairs(variant: Variant) -> set[tuple[int, Any, int, Any]]:
        return {(a, variant[a], b, variant[b]) for a, b in itertools.combinations(range(len(variant)), 2)}

    every = list(itertools.product(*FACTORS))
    missing = set().union(*map(pairs, every))
    found = []
    while missing:
        best = max(every, key=lambda variant: len(pairs(variant) & missing))
        found.append(best)
        missing -= pairs(best)
    return found


VARIANTS = pairwise()


def compile_attention(gpu: GpuSpec, variant: Variant, folder: Path, queries: str = "") -> gpu_code.ProgramCode:
    """Queries are of the pages' dtype unless given, and bfloat16 over 8-bit pages."""
    head_dim, pages, page_size, group, features, tokens = variant
    rule, kv_heads, slots = FEATURES[features], 4, 256
    [device] = aot.compile_only_devices(gpu)
    target = GpuTarget.of(device)
    page_dtype = jnp.dtype(pages)
    dtype = jnp.dtype(queries or (page_dtype if page_dtype.itemsize > 1 else jnp.bfloat16))
    tiles = paged_attention.choose_tiles(target, tokens, group, head_dim, dtype, page_dtype)
    sizes = paged_attention.work_sizes(target, tiles, tokens, slots, group * kv_heads, kv_heads)

    def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    [pools] = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype),
                           KVCacheSpec(1, kv_heads, head_dim, page_size, page_dtype).shapes(1024))
    numbers = shape((group * kv_heads,), jnp.float32)

    def run(q: Any, pools: Any, bias: Any, table: Any, slot: Any, position: Any) -> Any:
        work = make_work_list(slot, position, slots, sizes, rule.get("window"))
        return paged_attention.paged_attention(
            q, pools, table, work, AttentionRule(0.1, rule.get("window"), rule.get("softcap")), bias, tiles=tiles,
            target=target)

    bias = HeadBias(*(numbers if rule.get(name) else None for name in ("alibi", "sinks")))  # type: ignore[arg-type]
    with lowering_for(device):
        lowered = jax.jit(run).lower(shape((tokens, group * kv_heads, head_dim), dtype), pools, bias,
                                     shape((slots + 1, 64), jnp.int32), shape((tokens,), jnp.int32),
                                     shape((tokens,), jnp.int32))
    with aot.no_persistent_cache():
        compiled = lowered.compile(compiler_options=aot.dump_options(folder))
    return gpu_code.analyze(compiled, folder, kernels="paged_attention")


class Child:
    """A process that compiles one variant after another, and is replaced when it dies."""

    def __init__(self) -> None:
        self._pool = self._start()

    @staticmethod
    def _start() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def compile(self, gpu: GpuSpec, variant: Variant, queries: str = "") -> gpu_code.ProgramCode:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return self._pool.submit(compile_attention, gpu, variant, Path(folder), queries).result()
            except BrokenProcessPool:
                self._pool = self._start()
                pytest.fail(f"compiling {variant} for {gpu.name} ended the process")

    def stop(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.stop()


def check(name: str, variant: Variant, child: Child) -> None:
    _, pages, _, _, _, tokens = variant
    gpu = find_gpu(name)
    if pages == "float8_e4m3fn" and gpu.compute_capability < (8, 9):
        with pytest.raises(AssertionError, match="no float8_e4m3fn"):
            child.compile(gpu, variant)
        return
    facts = child.compile(gpu, variant)
    kernel, launch = facts.kernel("paged_attention"), facts.launch("paged_attention")
    assert not kernel.spill_bytes and not facts.kernel("paged_attention_combine").spill_bytes
    assert kernel.async_loads > 0 and kernel.overlaps
    # Heads of 80 and 96 load rows whose ends are masked, in the same 16 bytes; scales are 4 bytes each.
    assert jnp.dtype(pages).itemsize == 1 or not kernel.narrow_async_loads
    assert (kernel.mma > 0) == (pages != "float32")
    assert (kernel.wgmma > 0) == (pages != "float32" and tokens > 8 and gpu.compute_capability >= (9, 0))
    assert gpu_code.resident_blocks(kernel, launch, gpu) >= 1
    assert facts.command_buffers == 1 and not facts.outside_graphs


def test_the_set_is_pairwise_and_small() -> None:
    assert len(VARIANTS) <= 32, len(VARIANTS)


@pytest.mark.parametrize("name", [*GPU_PARAMS, pytest.param("l4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_every_pair_of_choices_compiles(variant: Variant, name: str, child: Child) -> None:
    check(name, variant, child)


# Those of --dtype with --kv-cache-dtype in which queries and pages differ otherwise than above.
MIXED = list(itertools.product(("float32",), ("int8", "float8_e4m3fn", "bfloat16", "float16"))) + list(
    itertools.product(("float16",), ("int8", "float8_e4m3fn", "bfloat16", "float32"))) + list(
    itertools.product(("bfloat16",), ("float16", "float32")))


def check_mixed(name: str, queries: str, pages: str, head_dim: int, tokens: int, child: Child) -> None:
    gpu = find_gpu(name)
    facts = child.compile(gpu, (head_dim, pages, 16, 4, "everything", tokens), queries)
    kernel, launch = facts.kernel("paged_attention"), facts.launch("paged_attention")
    assert not kernel.spill_bytes and not facts.kernel("paged_attention_combine").spill_bytes, kernel
    assert (kernel.mma > 0) == (queries != "float32")
    # Float32 queries over narrower pages have no pipeline; other programs compute while one loads.
    assert kernel.overlaps or gpu_code.resident_blocks(kernel, launch, gpu) >= 3
    assert facts.command_buffers == 1 and not facts.outside_graphs


@pytest.mark.parametrize("name", GPU_PARAMS)
def test_float32_queries_over_8_bit_pages_compile(name: str, child: Child) -> None:
    check_mixed(name, "float32", "int8", 128, 64, child)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "tokens"), [(128, 64), (256, 8), (64, 8)])
@pytest.mark.parametrize(("name", "queries", "pages"), [
    (name, queries, pages) for name in (QUICK_GPU, OTHER_GPU) for queries, pages in MIXED
    if pages != "float8_e4m3fn" or find_gpu(name).compute_capability >= (8, 9)])
def test_queries_and_pages_of_different_dtypes_compile(
    name: str, queries: str, pages: str, head_dim: int, tokens: int, child: Child
) -> None:
    check_mixed(name, queries, pages, head_dim, tokens, child)


@pytest.mark.slow  # every run compares the same kernels of whole programs, in tests/execution/test_aot_programs.py
@pytest.mark.parametrize(("name", "tokens", "registers", "resident", "waits"), [
    ("h200", 8, 128, 3, (2, 0)), ("h200", 64, 200, 2, (2, 0, 2, 0)),
    ("a100-80g", 8, 128, 2, (2, 0)), ("a100-80g", 64, 248, 2, (2, 0, 2, 0)),
])
def test_the_shipped_tiles_of_an_8b_model(
    name: str, tokens: int, registers: int, resident: int, waits: tuple[int, ...], tmp_path: Path
) -> None:
    """Heads of 128, 4 to a kv head, bfloat16 pages of 16: at most `registers`, at least `resident` programs at once.

    Two groups of loads stay under way while a block is computed; the zeros are after the loops.
    """
    gpu = find_gpu(name)
    facts = compile_attention(gpu, (128, "bfloat16", 16, 4, "plain", tokens), tmp_path)
    kernel, launch = facts.kernel("paged_attention"), facts.launch("paged_attention")
    assert kernel.registers <= registers and not kernel.spill_bytes
    assert gpu_code.resident_blocks(kernel, launch, gpu) >= resident
    assert kernel.wait_groups == waits
    assert not kernel.narrow_async_loads and kernel.wide_stores > 0


def test_a_compiler_that_aborts_fails_one_test_alone(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next variant compiles in a new process."""
    submit = child._pool.submit
    monkeypatch.setattr(child._pool, "submit", lambda *args: submit(os.abort))
    with pytest.raises(pytest.fail.Exception, match="for h200 ended the process"):
        child.compile(find_gpu("h200"), VARIANTS[0])
    assert child.compile(find_gpu("h200"), VARIANTS[0]).kernels


@pytest.mark.parametrize(("name", "dtype"), [
    ("h200", "fp8"), pytest.param("a100-80g", "int8", marks=pytest.mark.slow)])
def test_a_step_of_the_engine_over_8_bit_pages(name: str, dtype: str, tmp_path: Path) -> None:
    """With --kv-cache-dtype: numbers and scales are updated in place, in one CUDA graph, nothing spilled."""
    gpu = find_gpu(name)
    device = DeviceInfo("cuda", gpu.kind, gpu.memory_bytes, aot.compile_only_devices(gpu))
    programs, layout = engine_programs(MODELS["smollm2-135m"], device, 2, kv_cache_dtype=dtype)
    assert layout.cache.dtype.itemsize == 1 and programs.attention == "Triton"
    with aot.no_persistent_cache():
        facts = gpu_code.analyze(programs.compile(("forward", 16), aot.dump_options(tmp_path)), tmp_path,
                            kernels="paged_attention|rotary_kv_write")
    pools = jax.tree.leaves(replace(layout.cache, num_strips=2).shapes(layout.shape.num_blocks))
    assert facts.alias_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in pools)
    assert max((op.num_bytes for op in facts.copies), default=0) < 2**20
    assert facts.command_buffers == 1 and not facts.outside_graphs
    assert {kernel.name for kernel in facts.kernels} >= {"paged_attention", "rotary_kv_write"}
    assert not any(kernel.spill_bytes for kernel in facts.kernels)


def test_fp8_pages_are_refused_where_the_gpu_has_no_fp8() -> None:
    """With an error: the compiler would end the process."""
    from jaxpaged.execution.programs import ProgramSet
    from jaxpaged.execution.sharding import Partition, Placement
    from jaxpaged.execution.step_shape import StepShape

    devices = aot.compile_only_devices(find_gpu("a100-80g"))
    cache = KVCacheSpec(1, 1, 16, 16, jnp.dtype(jnp.float8_e4m3fn))
    shape: Any = StepShape((2,), 2, 4, 16, 8)
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or newer.*A100.*use int8"):
        ProgramSet(None, {}, None, cache, shape, axes={},  # type: ignore[arg-type]
                   placement=Placement.of(devices, Partition()), vocab_size=1, dtype=jnp.dtype(jnp.bfloat16),
                   platform="cuda")
