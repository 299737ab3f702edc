"""The GPU's kernel of latent attention: interpreted against NumPy in float64, and compiled for absent GPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import gpu_code
from jaxpaged.execution import aot
from jaxpaged.execution.gpu_targets import find_gpu
from jaxpaged.pallas_kernels import paged_latents
from jaxpaged.pallas_kernels.lowering import GpuTarget, lowering_for
from jaxpaged.pallas_kernels.tiles import LatentTiles
from jaxpaged.pallas_kernels.work_list import make_work_list
from tests.support.compile_only import OTHER_GPU, QUICK_GPU

TARGET = GpuTarget((9, 0), 4, interpret=True)
PAGE, LATENT, ROTARY, SLOTS, WIDTH = 16, 64, 16, 6, 12
# Of each slot: the position of its first token in the step, and its tokens. Around pages, and long enough to be split.
DECODE = {0: (100, 1), 1: (0, 1), 2: (16, 1), 4: (175, 1)}
MIXED = {0: (100, 1), 1: (0, 9), 2: (37, 5), 4: (60, 1)}


@pytest.mark.parametrize(("pieces", "heads", "tiles", "dtype"), [
    (DECODE, 4, LatentTiles(16, 32, 4, 3, 1), "float32"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (MIXED, 20, LatentTiles(32, 16, 4, 3, 1), "float32"),
        (DECODE, 16, LatentTiles(16, 32, 4, 3, 1), "float32"), (DECODE, 40, LatentTiles(16, 32, 8, 2, 1), "float32"),
        (MIXED, 16, LatentTiles(64, 32, 8, 2, 1), "float32"), (MIXED, 4, LatentTiles(16, 16, 8, 2, 1), "float32"),
        (MIXED, 16, LatentTiles(64, 32, 8, 2, 1), "bfloat16")))])
def test_against_float64(pieces: dict[int, tuple[int, int]], heads: int, tiles: LatentTiles, dtype: str) -> None:
    """Nothing beyond what a token sees is read: all else in the pool is NaN."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)

    table = np.zeros((SLOTS + 1, WIDTH), np.int32)
    table[:SLOTS] = rng.permutation(np.arange(1, SLOTS * WIDTH + 1)).reshape(SLOTS, WIDTH)
    pool = np.full((SLOTS * WIDTH + 1, PAGE, 1, LATENT + ROTARY), np.nan)
    contexts, slot, position = {}, [SLOTS], [0]  # padding first
    for number, (start, count) in pieces.items():
        contexts[number] = draw(start + count, LATENT + ROTARY)
        for place, row in enumerate(contexts[number]):
            pool[table[number, place // PAGE], place % PAGE, 0] = row
        slot += [number] * count
        position += range(start, start + count)
    q = draw(len(slot), heads, LATENT + ROTARY)
    sizes = replace(paged_latents.work_sizes(TARGET, tiles, len(slot), SLOTS, heads), min_chunk=32)

    @jax.jit
    def run(q: Any, pool: Any, table: Any, slot: Any, position: Any) -> Any:
        work = make_work_list(slot, position, SLOTS, sizes)
        return paged_latents.paged_latents(q, pool, table, work, scale=0.07, latent_dim=LATENT, tiles=tiles,
                                           target=TARGET)

    found = np.asarray(run(jnp.asarray(q, dtype), jnp.asarray(pool, dtype), table, np.array(slot), np.array(position)),
                       np.float64)
    for row in range(1, len(slot)):
        context = contexts[slot[row]][: position[row] + 1]
        scores = q[row] @ context.T * 0.07
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        wanted = weights / weights.sum(axis=1, keepdims=True) @ context[:, :LATENT]
        np.testing.assert_allclose(found[row], wanted, atol=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(("gpu", "heads", "tokens"), [(QUICK_GPU, 128, 64), *(
    pytest.param(gpu, heads, tokens, marks=pytest.mark.slow) for gpu in (QUICK_GPU, OTHER_GPU, "l4")
    for heads in (16, 20, 128) for tokens in (8, 64) if (gpu, heads, tokens) != (QUICK_GPU, 128, 64))])
def test_compiled(gpu: str, heads: int, tokens: int, tmp_path: Path) -> None:
    """DeepSeek's sizes: nothing spills, loads overlap with arithmetic, all is in one graph."""
    spec, slots = find_gpu(gpu), 64
    [device] = aot.compile_only_devices(spec)
    target = GpuTarget.of(device)
    assert paged_latents.supports(512, 64, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))
    tiles = paged_latents.choose_tiles(target, tokens, heads)
    sizes = paged_latents.work_sizes(target, tiles, tokens, slots, heads)

    def shape(*sizes: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    def run(q: Any, pool: Any, table: Any, slot: Any, position: Any) -> Any:
        work = make_work_list(slot, position, slots, sizes)
        return paged_latents.paged_latents(q, pool, table, work, scale=0.07, latent_dim=512, tiles=tiles, target=target)

    with lowering_for(device):
        lowered = jax.jit(run).lower(shape(tokens, heads, 576), shape(4096, 16, 1, 576),
                                     shape(slots + 1, 512, dtype="int32"), shape(tokens, dtype="int32"),
                                     shape(tokens, dtype="int32"))
    with aot.no_persistent_cache():
        compiled = lowered.compile(compiler_options=aot.dump_options(tmp_path))
    facts = gpu_code.analyze(compiled, tmp_path, kernels="paged_latents")
    kernel, launch = facts.kernel("paged_latents"), facts.launch("paged_latents")
    assert not kernel.spill_bytes and not facts.kernel("paged_latents_combine").spill_bytes, facts.kernels
    assert kernel.async_loads > 0 and kernel.overlaps and not kernel.narrow_async_loads and kernel.mma + kernel.wgmma
    assert gpu_code.resident_blocks(kernel, launch, spec) >= tiles.programs_per_sm, kernel
    assert facts.command_buffers == 1 and not facts.outside_graphs
