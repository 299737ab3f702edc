"""Attention by Mosaic GPU: interpreted, with races looked for, against float64; and compiled for Hopper."""

import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import gpu_code
from jaxpaged.core.errors import ConfigError
from jaxpaged.execution import aot
from jaxpaged.execution.gpu_targets import find_gpu
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.pallas_kernels import mosaic, paged_attention
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.lowering import GpuTarget, lowering_for
from jaxpaged.pallas_kernels.tiles import MOSAIC
from jaxpaged.pallas_kernels.work_list import make_work_list
from tests.pallas_kernels.test_paged_attention import Batch, Chunk, Shape, expected, make_batch

# Small enough that the interpreter's grid is; contexts are split into several chunks all the same.
TARGET = GpuTarget((9, 0), 1, interpret=True, mosaic=True)
MIN_CHUNK = 64
SCALE = 0.25


def found_races() -> bool:
    """Whether the kernel that was interpreted last had a race; jax 0.12 has raised JaxRuntimeError instead."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.get_races().races_found)


def run(shape: Shape, batch: Batch, dtype: Any, window: int | None, softcap: float | None) -> tuple[np.ndarray, Any]:
    heads = shape.kv_heads * shape.group
    tiles = paged_attention.choose_tiles(TARGET, shape.tokens, shape.group, shape.head_dim, dtype, dtype)
    assert tiles.mosaic
    sizes = paged_attention.work_sizes(TARGET, tiles, shape.tokens, shape.slots, heads, shape.kv_heads)
    sizes = replace(sizes, min_chunk=MIN_CHUNK, num_extra=4)
    work = make_work_list(jnp.asarray(batch.slot), jnp.asarray(batch.position), shape.slots, sizes, window)
    attend = jax.jit(partial(paged_attention.paged_attention, rule=AttentionRule(SCALE, window, softcap),
                             bias=HeadBias(), tiles=tiles, target=TARGET))
    pages = KVPages(jnp.asarray(batch.k_pool, dtype), jnp.asarray(batch.v_pool, dtype))
    return np.asarray(attend(jnp.asarray(batch.q, dtype), pages, batch.block_table, work), np.float64), work


def rounded(array: np.ndarray, dtype: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(array, dtype), np.float32)


DECODE = Shape(tokens=6, slots=6, kv_heads=2, group=4, head_dim=64)


@pytest.mark.parametrize(("shape", "dtype", "chunks", "window", "softcap"), [
    (DECODE, jnp.bfloat16, [Chunk(90), Chunk(1), Chunk(33, 2), Chunk(16)], None, None),
    (replace(DECODE, group=7, head_dim=128, block_size=128, width=2, num_pages=8), jnp.float16,
     [Chunk(200, 3), Chunk(129)], 100, 3.0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (replace(DECODE, kv_heads=1, group=3, block_size=32), jnp.bfloat16, [Chunk(64), Chunk(65), Chunk(31, 3)], None,
         2.0),
        (replace(DECODE, tokens=24, kv_heads=1, group=16), jnp.float16, [Chunk(96, 3), Chunk(17, 12)], None, None),
        (replace(DECODE, kv_heads=3, group=1), jnp.bfloat16, [Chunk(80), Chunk(15), Chunk(3, 3)], 1, None),
        (DECODE, jnp.bfloat16, [], None, None),
    )),
])
def test_against_float64_without_races(
    shape: Shape, dtype: Any, chunks: list[Chunk], window: int | None, softcap: float | None
) -> None:
    """What must not be seen holds NaN in keys, and in values of pages of others; whole pages are read."""
    batch = make_batch(shape, chunks, np.random.default_rng(0))
    used = {int(page) for row, chunk in zip(dict.fromkeys(batch.slot[batch.slot < shape.slots]), chunks, strict=True)
            for page in batch.block_table[row, : -(-chunk.context // shape.block_size)]}
    for page in used:  # values are finite in all pages that the engine writes
        batch.v_pool[page] = np.nan_to_num(batch.v_pool[page], nan=77.0)
    batch.q = rounded(batch.q, dtype)
    for contexts in (batch.keys, batch.values):
        contexts[:] = [rounded(context, dtype) for context in contexts]
    found, work = run(shape, batch, dtype, window, softcap)
    assert not found_races()
    wanted = expected(batch, chunks, SCALE, window=window, softcap=softcap)
    rows = sum(chunk.new for chunk in chunks)
    np.testing.assert_allclose(found[:rows], wanted[:rows], atol=3e-2 if dtype == jnp.bfloat16 else 4e-3)
    assert np.isfinite(found).all(), "rows of padding must be finite"
    lengths = [min(chunk.context, (window or chunk.context) + chunk.new - 1) for chunk in chunks]
    assert (max(lengths, default=0) > MIN_CHUNK) == bool(np.asarray(work.splits)[:, 1].any())


def test_a_read_before_the_barrier_is_found() -> None:
    """That no races are found above means something."""
    def kernel(x: Any, out: Any, tile: Any, here: Any, *, waits: bool) -> None:
        mosaic.load_tile(x, tile, here)
        if waits:
            mosaic.barrier_wait(here)
        tile[...] = tile[...] + 1
        mosaic.commit_smem()
        mosaic.store_tile(tile, out)
        mosaic.wait_for_stores(0)

    x = jnp.ones((8, 128), jnp.float32)
    for waits in (True, False):
        try:
            mosaic.launch(partial(kernel, waits=waits), x, name="racy", grid=(1,),
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True,
                          scratch=(mosaic.plain(x.shape, x.dtype), mosaic.Barrier(num_arrivals=1))).block_until_ready()
            found = found_races()
        except jax.errors.JaxRuntimeError as error:  # jax 0.12 raises instead of noting it down
            found = "RACE DETECTED" in str(error)
        assert found != waits


def compiled(variant: tuple[Any, ...], folder: Path) -> gpu_code.ProgramCode:
    """In a process of its own, whose environment makes JAX dump Mosaic's PTX."""
    head_dim, dtype, page_size, group, window, softcap = variant
    os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(folder)}
    [device] = aot.compile_only_devices(find_gpu("h200"))
    target, tokens, kv_heads, slots = GpuTarget.of(device, "mosaic"), 16, 8, 256
    tiles = paged_attention.choose_tiles(target, tokens, group, head_dim, jnp.dtype(dtype), jnp.dtype(dtype))
    sizes = paged_attention.work_sizes(target, tiles, tokens, slots, group * kv_heads, kv_heads)

    def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    [pools] = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype),
                           KVCacheSpec(1, kv_heads, head_dim, page_size, jnp.dtype(dtype)).shapes(1024))

    def attend(q: Any, pools: Any, table: Any, slot: Any, position: Any) -> Any:
        work = make_work_list(slot, position, slots, sizes, window)
        return paged_attention.paged_attention(q, pools, table, work, AttentionRule(0.1, window, softcap), HeadBias(),
                                               tiles=tiles, target=target)

    with lowering_for(device):
        lowered = jax.jit(attend).lower(shape((tokens, group * kv_heads, head_dim), dtype), pools,
                                        shape((slots + 1, 64), jnp.int32), *[shape((tokens,), jnp.int32)] * 2)
    with aot.no_persistent_cache():
        executable = lowered.compile(compiler_options=aot.dump_options(folder / "xla"))
    return gpu_code.analyze(executable, folder / "xla", kernels="paged_attention")


@pytest.mark.slow  # every run compiles it as a part of whole programs, in tests/execution/test_aot_programs.py
@pytest.mark.parametrize("variant", [
    (128, "bfloat16", 16, 4, None, None), (128, "float16", 128, 7, 1000, 30.0), (64, "bfloat16", 32, 1, None, 30.0),
    (64, "float16", 64, 16, 500, None),
], ids=lambda variant: "-".join(map(str, variant)))
def test_compiled_for_hopper(variant: tuple[Any, ...], tmp_path: Path) -> None:
    """TMA and wgmma, nothing spilled, in one CUDA graph."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        facts = child.submit(compiled, variant, tmp_path).result()
    [ptx], [log] = ([file.read_text() for file in tmp_path.glob(pattern)] for pattern in ("*.ptx", "*.ptxas"))
    assert "'sm_90a'" in log and " 0 bytes spill stores, 0 bytes spill loads" in log
    assert int(re.findall(r"Used (\d+) registers", log)[0]) <= 232
    head_dim, _, page_size, _, _, _ = variant
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == (head_dim + MOSAIC.block) // 16
    boxes = max(MOSAIC.block // page_size, 1)
    assert ptx.count("cp.async.bulk.tensor") >= MOSAIC.num_stages * 2 * boxes and "mbarrier.try_wait" in ptx
    assert not facts.kernel("paged_attention_combine").spill_bytes
    assert facts.command_buffers == 1 and not facts.outside_graphs


def test_only_one_module_knows_the_mosaic_lowering() -> None:
    files = [file for folder in ("jaxpaged", "models", "server", "pallas_kernels", "bench")
             for file in (Path(__file__).parents[2] / folder).rglob("*.py")]
    assert {file.name for file in files if re.search(r"import mosaic_gpu|pallas\.mosaic_gpu", file.read_text())} == {
        "mosaic.py"}


def test_it_is_chosen_where_it_can_compute_the_step() -> None:
    half: Any = jnp.bfloat16
    for target, biased, dtype, page_dtype, chosen in (
        (TARGET, False, half, half, True), (TARGET, True, half, half, False), (TARGET, False, half, jnp.int8, False),
        (TARGET, False, jnp.float32, half, False), (TARGET, False, half, jnp.float16, False),
        (replace(TARGET, mosaic=False), False, half, half, False),
    ):
        tiles = paged_attention.choose_tiles(target, 16, 4, 128, dtype, page_dtype, is_biased=biased)
        assert tiles.mosaic == chosen
    assert not paged_attention.choose_tiles(TARGET, 8192, 4, 128, half, half).mosaic


def test_the_engine_refuses_it_where_there_is_no_hopper() -> None:
    from jaxpaged.execution.programs import ProgramSet
    from jaxpaged.execution.sharding import Partition, Placement
    from jaxpaged.execution.step_shape import StepShape

    devices = aot.compile_only_devices(find_gpu("a100-80g"))
    shape: Any = StepShape((2,), 2, 4, 16, 8)
    with pytest.raises(ConfigError, match="mosaic needs one GPU of the Hopper generation; use triton"):
        ProgramSet(None, {}, None, KVCacheSpec(1, 1, 16, 16, jnp.dtype(jnp.bfloat16)), shape,  # type: ignore[arg-type]
                   axes={}, placement=Placement.of(devices, Partition()), vocab_size=1,
                   dtype=jnp.dtype(jnp.bfloat16), platform="cuda",
                   gpu_attention="mosaic")
