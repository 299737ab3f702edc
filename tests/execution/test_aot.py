"""Compiling for absent GPUs: every GPU in the table, what is read from the result, and no noise."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from bench import gpu_code
from jaxpaged.core.errors import ConfigError
from jaxpaged.execution import aot
from jaxpaged.execution.gpu_targets import GPUS, find_gpu
from jaxpaged.pallas_kernels import lowering

ROOT = Path(__file__).resolve().parents[2]
SIZE, BLOCK = 512, 64


def _product_kernel(x: Any, y: Any, out: Any) -> None:
    """64 rows of x @ y; a loop of products whose loads can be asynchronous."""
    lanes = jnp.arange(BLOCK)
    rows = pl.program_id(0) * BLOCK + lanes

    def body(step: jax.Array, total: jax.Array) -> jax.Array:
        inner = step * BLOCK + lanes
        return total + lowering.dot(lowering.load(x.at[rows[:, None], inner[None, :]]),
                                    lowering.load(y.at[inner[:, None], lanes[None, :]]))

    total = jax.lax.fori_loop(0, SIZE // BLOCK, body, jnp.zeros((BLOCK, BLOCK), jnp.float32))
    lowering.store(out.at[rows[:, None], lanes[None, :]], total)


def program(x: jax.Array, y: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A kernel, ordinary operations around it, and a pool [4096, 64] that is written in place."""
    for _ in range(3):
        z = lowering.launch(_product_kernel, x, y, name="product", grid=(SIZE // BLOCK,), num_stages=3,
                            out_shape=jax.ShapeDtypeStruct((SIZE, BLOCK), jnp.float32))
        pool = pool.at[jnp.arange(SIZE) * 2].set(jnp.tanh(z))
        x = (x + z.sum()).astype(x.dtype)
    return pool, x


def compile_program(device: jax.Device, folder: Path) -> gpu_code.ProgramCode:
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in (
        ((SIZE, SIZE), jnp.bfloat16), ((SIZE, BLOCK), jnp.bfloat16), ((4096, BLOCK), jnp.float32))]
    with lowering.lowering_for(device):
        lowered = jax.jit(program, donate_argnums=2).lower(*shapes)
    with aot.no_persistent_cache():
        compiled = lowered.compile(compiler_options=aot.dump_options(folder))
    return gpu_code.analyze(compiled, folder, kernels="product")


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_can_be_compiled_for(name: str, tmp_path: Path) -> None:
    gpu = find_gpu(name)
    (device,) = aot.compile_only_devices(gpu)
    target = lowering.GpuTarget.of(device)
    assert (target.compute_capability, target.num_sms) == (gpu.compute_capability, gpu.num_sms)
    assert device.device_kind == gpu.kind
    facts = compile_program(device, tmp_path)
    kernel, launch = facts.kernel("product"), facts.launch("product")
    assert facts.alias_bytes == 4096 * BLOCK * 4
    assert (launch.grid, launch.threads, launch.in_graph) == ((SIZE // BLOCK, 1, 1), 128, True)
    assert facts.command_buffers == 1 and not facts.outside_graphs
    assert [item.name for item in facts.work].count("product") == 3
    assert not facts.copies and not facts.collectives
    assert (kernel.wgmma > 0) == (gpu.compute_capability >= (9, 0)) and kernel.wgmma + kernel.mma > 0
    assert kernel.async_loads > 0 and not kernel.narrow_async_loads and kernel.overlaps
    assert 0 < kernel.registers <= 255 and not kernel.spill_bytes
    assert gpu_code.resident_blocks(kernel, launch, gpu) >= 2


def test_arguments_that_fill_the_memory_as_planned_are_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Of the temporaries only what the step needs counts: `plan`, whose pool is small, finds the same."""
    gpu = find_gpu("h200")
    (device,) = aot.compile_only_devices(gpu)
    sharding = jax.sharding.SingleDeviceSharding(device)
    weights = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding)

    def step(pool: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = jnp.tanh(weights @ weights) @ weights
        return pool.at[7, :256].set(row[0]), row.sum()

    found = []
    for size in (2**20, int(0.9 * gpu.memory_bytes)):
        pool = jax.ShapeDtypeStruct((size // 4096, 1024), jnp.float32, sharding=sharding)
        with aot.no_persistent_cache():
            facts = aot.facts_of(jax.jit(step, donate_argnums=0).lower(pool, weights).compile())
        assert facts.alias_bytes > 0.99 * size
        found.append(facts.temporary_bytes)
    assert found[0] == found[1] > 0
    assert "base limit" not in capfd.readouterr().err


def test_collectives_and_copies_are_found_with_their_bytes() -> None:
    devices = aot.compile_only_devices(find_gpu("h200"), 2)
    mesh = jax.sharding.Mesh(devices, ("model",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=split)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jax.shard_map(lambda part: jax.lax.psum(part, "model"), mesh=mesh, in_specs=split.spec,
                              out_specs=whole.spec)(x)
        return total, x

    with aot.no_persistent_cache():
        facts = gpu_code.analyze(jax.jit(run).lower(x).compile())
    assert [(op.kind, op.shape, op.num_bytes) for op in facts.collectives] == [("all-reduce", "f32[8,32]", 1024)]
    assert ("f32[8,32]", 1024) in [(op.shape, op.num_bytes) for op in facts.copies]
    assert not facts.launches and not facts.kernels


def test_a_missing_plugin_is_one_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'jax\[cuda12-local\]'"):
        aot.compile_only_devices(find_gpu("h200"))


def test_an_unknown_gpu_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known are a100-40g, a100-80g, a10, l4, l40s, h100, h200, b200"):
        find_gpu("h20")


@pytest.mark.parametrize("code", [
    "from jaxpaged.execution.devices import select_device; print(select_device('auto').platform)",
    "from jaxpaged.execution.aot import compile_only_devices as find\n"
    "from jaxpaged.execution.gpu_targets import GPUS\n"
    "import jax; print(find(GPUS['h200'])[0].platform, jax.devices()[0].platform)",
], ids=["auto", "compile-only"])
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_the_plugin_is_quiet_where_there_is_no_gpu(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("cpu\n"), done.stderr
    assert "Traceback" not in done.stderr and "rror" not in done.stderr, done.stderr
