"""The one module that knows how a Pallas kernel reaches a GPU; no other may import `jax.experimental.pallas.triton`.

All shipped kernels go through Pallas' Triton lowering: it is the only way inside JAX that covers Ampere, Ada and Hopper
today. It is deprecated since jax 0.11 and still works in 0.12. When it is removed:

1. XLA's side of it stays reachable without Pallas: `jax.ffi.ffi_call("__gpu$xla.gpu.triton", ...)` takes Triton IR as
   text, with the grid and the number of warps and stages, and XLA compiles that IR as it does today. `launch` then
   becomes such a call with IR frozen from the last jax that can lower our kernels (or written by the official Triton
   compiler ahead of time). tests/pallas_kernels/test_lowering.py proves on every run that this route still compiles,
   and that a kernel of ours frozen like that becomes the same machine code, in place too. A kernel's PTX can be
   frozen as well: `"__gpu$xla.gpu.ptx"` takes it, with its block and shared memory; proven there too.
2. On Hopper, Mosaic GPU, Pallas' other GPU lowering: `mosaic_attention` is there for decode, where `GpuTarget.of`
   chooses it. The engine first checks its results on the GPU itself (`jaxpaged.engine.mosaic_check`),
   since it has only been compiled and interpreted; neither lowering has been timed on a GPU yet.

A kernel's body uses plain `jax.numpy`, `pl.program_id`, `pl.when`, `lax.fori_loop`, and from here `load`, `store` and
`dot`. Triton has no dynamic grid and no scalar prefetch: grids are static, what varies is read from arrays. Index a
ref with arrays for all axes (`ref.at[rows[:, None], head, lanes[None, :]]`) or slices for all: interpreting cannot mix
them.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_IS_DEPRECATED = "The Pallas Triton backend is deprecated"


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """The GPU that a program is traced for, there or not; hashable, so that it can be a static argument.

    Attributes:
        compute_capability: (8, 0) is an A100, (8, 9) an L4, (9, 0) an H100 or H200.
        num_sms: streaming multiprocessors.
        interpret: run the kernels' bodies on any backend instead, slowly; for tests.
        mosaic: let Mosaic GPU lower the kernels that are written for it, where they support what a step asks for.
    """

    compute_capability: tuple[int, int]
    num_sms: int
    interpret: bool = False
    mosaic: bool = False

    @classmethod
    def of(cls, device: jax.Device, attention: str = "triton", *, sharded: bool = False) -> "GpuTarget":
        """The target of a CUDA device, also of one that can only be compiled for.

        Args:
            attention: its lowering: "triton"; "mosaic" or "auto" for Mosaic GPU where the device has it.
            sharded: several devices share the model; `mosaic_attention` has not been compiled for that.
        """
        major, _, minor = str(device.compute_capability).partition(".")
        target = cls((int(major), int(minor)), int(device.core_count))
        return replace(target, mosaic=attention != "triton" and target.has_mosaic and not sharded)

    @property
    def has_mosaic(self) -> bool:
        """Whether Mosaic GPU can lower our kernels: their wgmma is Hopper's alone."""
        return self.compute_capability == (9, 0)

    @property
    def generation(self) -> str:
        """Key of the tile tables. "ada" covers all with its small shared memory, so also for (8, 6) and (12, 0)."""
        if (9, 0) <= self.compute_capability < (12, 0):
            return "hopper"
        return "ada" if self.compute_capability >= (8, 6) else "ampere"

    @property
    def has_fp8(self) -> bool:
        """Whether float8_e4m3 can be converted; lowering such a conversion for another GPU ends the process."""
        return self.interpret or self.compute_capability >= (8, 9)


def load(ref: Any, mask: jax.Array | None = None, other: Any = None) -> jax.Array:
    """Read `ref.at[...]`; where not `mask`, return `other` without touching memory."""
    result: jax.Array = triton.load(ref, mask=mask, other=other)
    return result


def store(ref: Any, value: jax.Array, mask: jax.Array | None = None) -> None:
    """Write `ref.at[...]` where `mask`."""
    triton.store(ref, value, mask=mask)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[M, K] x [K, N] -> [M, N] float32 on tensor cores; M, K, N are powers of two of at least 16.

    float32 operands are multiplied as such, not as TF32.
    """
    return triton.dot(a, b, precision="highest" if a.dtype == jnp.float32 else None)


def inline_asm(code: str, *args: jax.Array, constraints: str, pack: int, result: jax.ShapeDtypeStruct) -> jax.Array:
    """PTX on every `pack` elements of arrays of one shape; the interpreter cannot run it.

    Args:
        code: with $0 for the register of the result, $1 and on for those of the arguments.
        constraints: of these registers, as LLVM spells them.
    """
    found: jax.Array = triton.elementwise_inline_asm(
        code, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[result])[0]
    return found


def launch(
    kernel: Callable[..., None],
    *args: Any,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    aliases: Mapping[int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 1,
    interpret: bool = False,
) -> Any:
    """Run `kernel(*input_refs, *output_refs)` once per point of the grid; every ref is a whole array.

    Args:
        args: arrays, or None where the kernel takes None instead of a ref.
        name: of the kernel in PTX and in profiles.
        out_shape: a ShapeDtypeStruct or a sequence of them.
        aliases: index among the arrays of `args` (None not counted) -> index of the output that is the same memory.
        num_stages: how deep Triton pipelines the loads of a loop.
        interpret: see `GpuTarget`.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=jax.tree.map(lambda _: whole, args),
        out_specs=jax.tree.map(lambda _: whole, out_shape),
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*args)


def is_compile_only(device: jax.Device) -> bool:
    """Whether the device is only a description: programs compile for it, and none runs."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def lowering_for(device: jax.Device) -> AbstractContextManager[Any]:
    """Context in which a program with kernels is lowered for `device`; needed around `lower()`, not around `compile()`.

    From jax 0.11 on the lowering asks the context for the GPU, and an absent one has to be named. The warning
    of deprecation is silenced for good rather than inside the context: programs are lowered on several threads, and
    Python's warning filters are not made to be restored by two of them.
    Inside `shard_map` its mesh names the devices, and nothing has to be around it.
    """
    if device.platform != "gpu":
        return nullcontext()
    warnings.filterwarnings("ignore", message=_IS_DEPRECATED, category=DeprecationWarning)
    if not is_compile_only(device):
        return nullcontext()
    name = device.device_kind.replace("L40S", "L40")  # Pallas' table has the latter alone; the architecture is the same
    kind = jax.sharding.AbstractDevice(device_kind=name, num_cores=None, platform="cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("gpu",), abstract_device=kind))
