"""The one module that knows Pallas' Mosaic GPU lowering; no other may import `jax.experimental.pallas.mosaic_gpu`.

Mosaic GPU is for Hopper: TMA loads into shared memory, barriers, wgmma. Its interpreter runs such kernels on a CPU and
detects races, but lacks what `Tensors` has replacements for there: operands of wgmma in registers, which take a detour
through shared memory, and in jax 0.10 also layouts of values in registers and transposed operands, which jax 0.11 and
0.12 interpret as they are compiled. These parts of the compiled kernel have only been compiled. It also sees
no race of a wgmma that reads what a load has not yet written, and does not know that a load into an `operand` has to
begin at a multiple of 8 in each axis that is tiled: elsewhere the GPU would read zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

barrier_wait = plgpu.barrier_wait
commit_smem = plgpu.commit_smem
load_tile = plgpu.copy_gmem_to_smem
store_tile = plgpu.copy_smem_to_gmem
wait_for_stores = plgpu.wait_smem_to_gmem
Barrier = plgpu.Barrier

SWIZZLE_BYTES = 128


def operand(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory in the layout that wgmma reads: the last axis is cut into runs of 128 bytes."""
    lanes = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    assert shape[-1] % lanes == 0 and shape[-2] % 8 == 0, (shape, dtype)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, lanes)),
                                                plgpu.SwizzleTransform(SWIZZLE_BYTES)))


def plain(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory row by row."""
    return plgpu.SMEM(shape, dtype)


def written_in_place(x: jax.Array) -> Any:
    """x as a ref that a kernel may be given and writes to; `[...]` reads it afterwards."""
    return jax.new_ref(x, memory_space=plgpu.GMEM)


@dataclass(frozen=True, slots=True)
class Tensors:
    """Values in the registers of a warp group, as wgmma leaves them; `interpret`: see above."""

    interpret: bool

    @property
    def _has_layouts(self) -> bool:
        return not self.interpret or jax.__version_info__ >= (0, 11)

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """Float32 of shape [rows, columns], or [rows]: what reducing columns leaves."""
        layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        made = jnp.full(shape, value, jnp.float32)
        return plgpu.layout_cast(made, layout) if self._has_layouts else made

    def index(self, shape: tuple[int, int], axis: int) -> jax.Array:
        """int32 [rows, columns]: each element's index along `axis`."""
        if self._has_layouts:
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    def multiply_transposed(self, a: Any, b: Any, staging: Any) -> jax.Array:
        """a [M, K] x b [N, K] in shared memory -> [M, N] float32; staging [K, N]: only to interpret."""
        if self._has_layouts:
            return self._multiply(a, b.T, b.shape[0])
        staging[...] = b[...].T
        commit_smem()
        return self._multiply(a, staging, b.shape[0])

    def multiply(self, a: jax.Array, b: Any, staging: Any) -> jax.Array:
        """a [M, K] in registers x b [K, N] in shared memory -> [M, N] float32; staging [M, K]: only to interpret."""
        if self.interpret:
            staging[...] = a
            commit_smem()
            return self._multiply(staging, b, b.shape[1])
        return self._multiply(a, b, b.shape[1])

    @staticmethod
    def _multiply(a: Any, b: Any, columns: int) -> jax.Array:
        def run(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, a, b)
            result: jax.Array = accumulator[...]
            return result

        result: jax.Array = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], columns), jnp.float32))
        return result


def launch(
    kernel: Callable[..., None],
    *args: jax.Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    scratch: tuple[Any, ...],
    interpret: bool = False,
) -> Any:
    """Run `kernel(*input_refs, *output_refs, *scratch_refs)` once per point of the grid, by one warp group.

    A point's coordinates are `lax.axis_index("x0")`, `"x1"` and so on. With `interpret` it runs on a CPU and
    JAX looks for races: jax 0.12 raises JaxRuntimeError at the first, older ones only note them.
    """
    mesh = plgpu.Mesh(grid=grid, grid_names=tuple(f"x{axis}" for axis in range(len(grid))), kernel_name=name)
    more: dict[str, Any] = {}
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        more["interpret"] = InterpretGPUParams(detect_races=True)

    def body(*refs: Any) -> None:
        pl.run_scoped(partial(kernel, *refs), *scratch, collective_axes=())

    return pl.kernel(body, mesh=mesh, out_type=out_shape, name=name, **more)(*args)
