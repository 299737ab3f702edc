"""How a store keeps a program: in JAX's own form, which is read without running anything.

JAX writes a program with pickle, and a pickle may name any function for its reader to call. Here only what JAX's
programs consist of can be named. The machine code inside is not run before the program is: for that, see
`core/trusted_files`.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

# Types that hold data, and functions that make them.
_NAMES = frozenset({
    ("builtins", "frozenset"),
    ("builtins", "set"),
    ("jax", "P"),
    ("jax._src.core", "ManualAxisType"),
    ("jax._src.core", "MemorySpace"),
    ("jax._src.core", "ShapedArray"),
    ("jax._src.interpreters.pxla", "AllArgsInfo"),
    ("jax._src.interpreters.pxla", "UnloadedMeshExecutable"),
    ("jax._src.layout", "AutoLayoutSingleton"),
    ("jax._src.layout", "Format"),
    ("jax._src.layout", "Layout"),
    ("jax._src.linear_util", "DebugInfo"),
    ("jax._src.mesh", "AbstractDevice"),
    ("jax._src.mesh", "AbstractMesh"),
    ("jax._src.mesh", "AxisType"),
    ("jax._src.mesh", "Mesh"),
    ("jax._src.mesh", "_unpicke_mesh"),
    ("jax._src.mesh", "_unpickle_mesh"),
    ("jax._src.named_sharding", "NamedSharding"),
    ("jax._src.named_sharding", "_unpickle_named_sharding"),
    ("jax._src.partition_spec", "PartitionSpec"),
    ("jax._src.partition_spec", "unpickle_pspec"),
    ("jax._src.sharding_impls", "GSPMDSharding"),
    ("jax._src.sharding_impls", "SingleDeviceSharding"),
    ("jax._src.sharding_impls", "_unpickle_gspmd_sharding"),
    ("jax._src.sharding_impls", "_unpickle_single_device_sharding"),
    ("jax._src.stages", "ArgInfo"),
    ("jax._src.tree_util", "default_registry"),
    ("jax._src.tree_util", "tracing_registry"),
    ("jaxlib._jax", "DeviceList"),
    ("jaxlib._jax", "HloSharding"),
    ("jaxlib._jax", "OpSharding"),
    ("jaxlib._jax.pytree", "PyTreeDef"),
    ("jaxpaged.execution.logit_processors", "ProcessorState"),
    ("jaxpaged.execution.sampler", "SamplingState"),
    ("jaxpaged.pallas_kernels.kv_pages", "KVPages"),
    ("jaxpaged.pallas_kernels.kv_pages", "LatentPages"),
    ("ml_dtypes", "bfloat16"),
    ("ml_dtypes", "float8_e4m3fn"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
})


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a program")
        return super().find_class(module, name)


class _ProgramReader(_DataOnly, serialize_executable._JaxPjrtUnpickler):
    """JAX's reader, which also finds devices and loads executables."""


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    """A program in the form that `from_bytes` reads."""
    return pickle.dumps(serialize_executable.serialize(compiled))


def from_bytes(content: bytes, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """The program, to run on `devices`.

    Raises:
        Exception: of many kinds; it is damaged, names something else, or the runtime refuses it.
    """
    payload, in_tree, out_tree = _DataOnly(io.BytesIO(content)).load()
    reader = _ProgramReader(io.BytesIO(payload), devices[0].client, devices)
    unloaded, args_info, no_kwargs = reader.load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)
