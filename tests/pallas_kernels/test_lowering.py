"""The way of a kernel to a GPU: through Pallas today, and through Triton IR on the day that Pallas' way is gone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from bench import gpu_code
from jaxpaged.execution.aot import dump_options, no_persistent_cache
from jaxpaged.pallas_kernels import lowering, packed_linear
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.lowering import GpuTarget, launch
from jaxpaged.pallas_kernels.packed_layout import PackedLayout, PackedWeight
from jaxpaged.pallas_kernels.rotary_kv_write import rotary_kv_write
from tests.support.compile_only import GPU_PARAMS, OTHER_GPU, QUICK_GPU, compile_for, compile_only_device

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 128


def _add_kernel(x: Any, y: Any, absent: None, limit: Any, out: Any) -> None:
    """Block by block: out = x + y up to the limit, which an array holds; the rest of x stays."""
    assert absent is None
    index = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
    mask = index < limit[0]
    lowering.store(out.at[index], lowering.load(x.at[index], mask, 0.0) + lowering.load(y.at[index], mask, 0.0), mask)


def add_up_to(x: Any, y: Any, limit: Any, *, interpret: bool = False) -> Any:
    return launch(_add_kernel, x, y, None, limit, name="add_up_to", grid=(x.size // BLOCK,),
                  out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), aliases={0: 0}, num_warps=1, interpret=interpret)


def test_only_one_module_knows_the_triton_lowering() -> None:
    files = [file for folder in ("jaxpaged", "models", "server", "pallas_kernels", "bench")
             for file in (ROOT / folder).rglob("*.py")]
    knowing = [file.name for file in files if re.search(r"pallas[. ](import )?triton|pallas_triton", file.read_text())]
    assert set(knowing) == {"lowering.py"}


def test_interpreted_kernel_writes_in_place_where_masked() -> None:
    x, y = (np.random.default_rng(seed).standard_normal(4 * BLOCK).astype(np.float32) for seed in (0, 1))
    out = np.asarray(jax.jit(lambda *args: add_up_to(*args, interpret=True))(x, y, jnp.array([300])))
    np.testing.assert_array_equal(out[:300], (x + y)[:300])
    np.testing.assert_array_equal(out[300:], x[300:])


@pytest.mark.parametrize(("name", "capability", "generation", "fp8"), [
    (QUICK_GPU, (9, 0), "hopper", True), pytest.param(OTHER_GPU, (8, 0), "ampere", False, marks=pytest.mark.slow),
])
def test_kernels_compile_for_a_gpu_that_is_not_there(
    name: str, capability: tuple[int, int], generation: str, fp8: bool
) -> None:
    device = compile_only_device(name)
    target = GpuTarget.of(device)
    assert (target.compute_capability, target.generation, target.has_fp8) == (capability, generation, fp8)
    numbers = jax.ShapeDtypeStruct((4 * BLOCK,), jnp.float32)
    compiled = compile_for(device, add_up_to, numbers, numbers, jax.ShapeDtypeStruct((1,), jnp.int32),
                           donate_argnums=0)
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == 4 * BLOCK * 4 and not analysis.temp_size_in_bytes


@pytest.mark.parametrize(("capability", "generation"), [
    ((8, 0), "ampere"), ((8, 6), "ada"), ((8, 9), "ada"), ((9, 0), "hopper"), ((10, 0), "hopper"), ((12, 0), "ada"),
])
def test_tiles_fit_the_shared_memory_of_the_generation(capability: tuple[int, int], generation: str) -> None:
    """Of the gaming and workstation GPUs after Hopper too, which have 99 KiB for a block and not 227."""
    assert GpuTarget(capability, 100).generation == generation


DOUBLE = """
module {
  tt.func public @double(
    %x: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %out: !tt.ptr<f32> {tt.divisibility = 16 : i32}
  ) {
    %block = arith.constant 1024 : i32
    %program = tt.get_program_id x : i32
    %first = arith.muli %program, %block : i32
    %lane = tt.make_range {end = 1024 : i32, start = 0 : i32} : tensor<1024xi32>
    %firsts = tt.splat %first : i32 -> tensor<1024xi32>
    %index = arith.addi %firsts, %lane : tensor<1024xi32>
    %xs = tt.splat %x : !tt.ptr<f32> -> tensor<1024x!tt.ptr<f32>>
    %from = tt.addptr %xs, %index : tensor<1024x!tt.ptr<f32>>, tensor<1024xi32>
    %value = tt.load %from : tensor<1024x!tt.ptr<f32>>
    %twice = arith.addf %value, %value : tensor<1024xf32>
    %outs = tt.splat %out : !tt.ptr<f32> -> tensor<1024x!tt.ptr<f32>>
    %to = tt.addptr %outs, %index : tensor<1024x!tt.ptr<f32>>, tensor<1024xi32>
    tt.store %to, %twice : tensor<1024x!tt.ptr<f32>>
    tt.return
  }
}
"""


@pytest.mark.parametrize("name", GPU_PARAMS)
def test_triton_ir_compiles_without_pallas(name: str) -> None:
    """The way out that the docstring of pallas_kernels/lowering.py promises."""
    def double(x: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call("__gpu$xla.gpu.triton", jax.ShapeDtypeStruct(x.shape, x.dtype))
        result: jax.Array = call(x, name="double", ir=DOUBLE, num_warps=np.int32(4), num_stages=np.int32(3),
                                 grid_x=np.int32(x.size // 1024), grid_y=np.int32(1), grid_z=np.int32(1), debug=False)
        return result

    compiled = compile_for(compile_only_device(name), double, jax.ShapeDtypeStruct((8192,), jnp.float32))
    assert '__gpu$xla.gpu.triton' in str(compiled.as_text())


def operations(operation: Any) -> Iterator[Any]:
    """All that is inside, however deep."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner
                yield from operations(inner)


def frozen(lowered: jax.stages.Lowered) -> dict[str, Any]:
    """What Pallas tells XLA of a program's one kernel: name, grid, warps, stages, and its Triton IR as text."""
    module: Any = lowered.compiler_ir()
    [call] = [found for found in operations(module.operation) if found.name == "stablehlo.custom_call"]
    given = {item.name: item.attr for item in call.attributes["mhlo.backend_config"]}
    context = mlir.make_ir_context()
    with context:
        dialect.register_dialect(context)
        text = str(ir.Module.parse(given["ir"].value_bytes))
    numbers = ("num_warps", "num_stages", "grid_x", "grid_y", "grid_z")
    return {"name": given["name"].value, "ir": text, "debug": False} | {
        name: np.int32(given[name].value) for name in numbers}


@pytest.mark.parametrize("name", GPU_PARAMS)
def test_a_frozen_kernel_compiles_to_the_same(name: str, tmp_path: Path) -> None:
    """Queries and pools in place, as with Pallas."""
    device = compile_only_device(name)
    sharding = jax.sharding.SingleDeviceSharding(device)
    sizes = (((64, 8, 128), jnp.bfloat16), *[((64, 2, 128), jnp.bfloat16)] * 2, *[((64, 64), jnp.float32)] * 2,
             *[((64,), jnp.int32)] * 2, *[((256, 16, 2, 128), jnp.bfloat16)] * 2)
    shapes = [jax.ShapeDtypeStruct(size, dtype, sharding=sharding) for size, dtype in sizes]
    in_place = {0: 0, 7: 1, 8: 2}

    def by_pallas(q: Any, k: Any, v: Any, cos: Any, sin: Any, page: Any, offset: Any, *pools: Any) -> Any:
        return rotary_kv_write(q, k, v, cos, sin, page, offset, KVPages(*pools), target=GpuTarget.of(device))

    def by_ir(*args: Any) -> Any:
        results = [jax.ShapeDtypeStruct(args[index].shape, args[index].dtype) for index in in_place]
        return jax.ffi.ffi_call("__gpu$xla.gpu.triton", results, input_output_aliases=in_place)(*args, **kernel)

    kernel: dict[str, Any] = {}
    codes = []
    for way in (by_pallas, by_ir):
        with lowering.lowering_for(device):
            lowered = jax.jit(way, donate_argnums=tuple(in_place)).lower(*shapes)
        kernel = kernel or frozen(lowered)
        with no_persistent_cache():
            compiled = lowered.compile(compiler_options=dump_options(tmp_path / way.__name__))
        memory = compiled.memory_analysis()
        assert memory is not None and memory.temp_size_in_bytes == 0
        assert memory.alias_size_in_bytes == sum(shapes[index].size * 2 for index in in_place)
        codes.append("".join(file.read_text() for file in sorted((tmp_path / way.__name__).glob("*.ptx"))))
    assert codes[0] == codes[1] and "rotary_kv_write" in codes[0]


@pytest.mark.parametrize("name", GPU_PARAMS)
def test_frozen_ptx_is_launched_without_pallas(name: str, tmp_path: Path) -> None:
    """The other way out: of a kernel whose IR no longer parses, its PTX is left. XLA launches it as its own."""
    device = compile_only_device(name)
    layout = PackedLayout("int4", 1024, 512, 1024, zero=8)
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(size, dtype, sharding=sharding) for size, dtype in (
        ((16, 1024), jnp.bfloat16), ((8, 8, 64, 32), jnp.int16), ((1, 512), jnp.float16), ((1, 16), jnp.float32))]
    result = jax.ShapeDtypeStruct((packed_linear.num_parts(GpuTarget.of(device), layout), 16, 512), jnp.float32)

    def by_pallas(x: Any, words: Any, scale: Any, _: Any) -> Any:
        return packed_linear.product(x, PackedWeight(words, scale), layout, target=GpuTarget.of(device))

    def by_ptx(*args: Any) -> Any:
        return jax.ffi.ffi_call("__gpu$xla.gpu.ptx", result)(*args, **kernel)

    kernel: dict[str, Any] = {}
    launches = []
    for way in (by_pallas, by_ptx):
        with lowering.lowering_for(device):
            lowered = jax.jit(way).lower(*shapes)
        with no_persistent_cache():
            compiled = lowered.compile(compiler_options=dump_options(tmp_path / way.__name__))
        launch = gpu_code.analyze(compiled, tmp_path / way.__name__).launch("packed_linear")
        launches.append((launch.grid, launch.threads, launch.shared_bytes))
        texts = [file.read_text() for file in (tmp_path / way.__name__).glob("*.ptx")]
        sizes = {"grid": launch.grid, "block": (launch.threads, 1, 1)}
        kernel = kernel or {
            "name": "packed_linear", "kernel_type": "ptx",
            "kernel_data": next(text for text in texts if ".entry packed_linear" in text),
            "shared_mem_bytes": np.int32(launch.shared_bytes), "output_indices": (np.int32(len(shapes)),),
        } | {f"{name}_{axis}": np.int32(size) for name in sizes
             for axis, size in zip("xyz", sizes[name], strict=True)}
    assert launches[0] == launches[1]
