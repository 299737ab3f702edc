"""The closed set of compiled programs: nothing else runs on the device after start-up.

`program_kinds` says what they are. They are ahead-of-time executables, which refuse a new shape instead of compiling
for it.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.core.errors import ConfigError
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.execution.program_kinds import KINDS, ArgumentShapes
from jaxpaged.execution.program_store import ProgramStore, StoreError, digest, environment_key
from jaxpaged.execution.sharding import Placement
from jaxpaged.execution.step_functions import XLA_ONLY, NativeKernels, Params, StepFunctions
from jaxpaged.execution.step_shape import SCORED_ROWS, ProgramName, StepShape
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.metadata import uses_mosaic
from jaxpaged.models.transformer import Transformer
from jaxpaged.pallas_kernels.lowering import GpuTarget, lowering_for
from jaxpaged.pallas_kernels.tiles import MANY_TOKENS

logger = logging.getLogger(__name__)

COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {
    "cpu": {},
    "cuda": {
        "xla_gpu_enable_triton_gemm": False,
        # Merged products of q, k and v would copy their weights side by side in each step.
        "xla_gpu_dot_merger_threshold_mb": "0",
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,COLLECTIVES",
        # Weights and pools fill the GPU as planned. XLA takes that for a lack of memory, and would
        # recompute in each layer what the layers share, which saves nothing.
        "xla_disable_hlo_passes": "rematerialization",
    },
}


class ProgramSet:
    """Compiles the programs of one model and hands them out.

    Args:
        graph: the model's definition, without weights.
        params: shapes of the weights.
        axes: logical axes of the weights, in a tree like `params`.
        placement: where they will run.
        vocab_size: without the padding that `config` may have.
        dtype: of activations.
        platform: "cpu" or "cuda".
        native: parts that do not run on XLA.
        gpu_attention: see `EngineConfig`.
        store: folder of programs compiled ahead of time; if one cannot be loaded, it logs one warning and compiles.

    Raises:
        ConfigError: the device does not support the dtype of the pools, or with `gpu_attention`.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Transformer],
        params: Params,
        config: ModelConfig,
        cache: KVCacheSpec,
        shape: StepShape,
        *,
        axes: Params,
        placement: Placement,
        vocab_size: int,
        dtype: jnp.dtype,
        platform: str,
        native: NativeKernels = XLA_ONLY,
        gpu_attention: str = "auto",
        store: Path | None = None,
    ) -> None:
        self._cache = cache
        self._config = config
        self._shape = shape
        self._platform = platform
        target = None if platform == "cpu" else GpuTarget.of(placement.devices[0], gpu_attention,
                                                             sharded=placement.mesh is not None)
        if gpu_attention == "mosaic" and not (target and target.mosaic):
            raise ConfigError("--gpu-attention mosaic needs one GPU of the Hopper generation; use triton")
        if target is not None and cache.dtype == jnp.float8_e4m3fn and not target.has_fp8:
            raise ConfigError(f"--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or newer, and "
                              f"{placement.devices[0].device_kind} is older; use int8")
        self._functions = StepFunctions(graph, config, shape, placement, vocab_size, dtype, cache.dtype, native, target)
        self.placement = placement
        self.shapes = ArgumentShapes(params, axes, cache, shape, placement, config.vocab_size,
                                     config.kv_layout.column_units, cache.state_width(config))
        self._compiled: dict[ProgramName, jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._store = None if store is None else self.store_in(store)
        if self._store is not None:
            try:
                self._store.check()
            except StoreError as error:
                self._give_up_store(error)

    def store_in(self, folder: Path) -> ProgramStore:
        """A store of these programs in `folder`, which need not exist yet."""
        return ProgramStore(folder, self.key)

    @property
    def params(self) -> Params:
        """Shapes and shardings of the weights."""
        return self.shapes.params

    @property
    def axes(self) -> Params:
        """Axes of the weights."""
        return self.shapes.axes

    @property
    def key(self) -> dict[str, str]:
        """Everything that the programs depend on."""
        partition = self.placement.partition
        key = environment_key(self.placement.devices[0], self._platform, COMPILER_OPTIONS[self._platform])
        return key | {
            "devices": f"{partition.kv} x {partition.share}",
            # End-of-text tokens and the dtype of the stored weights change no program.
            "model": digest(self._config.replace(eos_token_ids=(), checkpoint_dtype="")),
            "weights": digest(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), self.shapes.params)),
            "kv_cache_dtype": self._cache.dtype.name,
            # A store with programs that move blocks also serves an engine that moves none.
            "shape": digest(replace(self._shape, transfer_sizes=())),
            "native_kernels": str(self._functions.native),
            "gpu_attention": str(self._functions.target),
        }

    @property
    def attention(self) -> str:
        """What computes attention, as shown to the user."""
        target = self._functions.target
        if target is None:
            return "native kernel" if self._functions.native.attention else "XLA"
        if uses_mosaic(target, self._config, self._functions.dtype, self._cache.dtype):
            return f"Mosaic GPU below {MANY_TOKENS} tokens in a step, Triton above"
        return "Triton"

    @property
    def quant_hint(self) -> str:
        """For whoever has weights in the dtype of the activations, where some lie in memory as stored."""
        return "; --quantization none keeps all in the dtype of the activations" if self._config.quant.types else ""

    @property
    def uses_store(self) -> bool:
        """Whether programs come from the given store."""
        return self._store is not None

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    @property
    def num_logits(self) -> int:
        """V of the logits, padding for the mesh included."""
        return self._config.vocab_size

    def names(self) -> tuple[ProgramName, ...]:
        """The closed set, the slowest to compile first."""
        return tuple((kind.name, size) for kind in KINDS.values() for size in kind.sizes(self._shape))

    def compile_all(self, done: Callable[[ProgramName], None]) -> None:
        """Compile, or read from the persistent cache, on two threads; `done` is called after each."""
        with ThreadPoolExecutor(2) as threads:
            jobs = {threads.submit(self.get, name): name for name in self.names()}
            for job in as_completed(jobs):
                job.result()
                done(jobs[job])

    def temporary_bytes(self, name: ProgramName) -> int:
        """Bytes of a program's temporaries while it runs."""
        analysis = self.get(name).memory_analysis()
        assert analysis is not None, "this backend reports no temporaries"
        return int(analysis.temp_size_in_bytes)

    def largest_temporaries(self) -> int:
        """Bytes of the largest step's temporaries, and of the sampling state and block tables between steps."""
        size = self._shape.sizes[-1]
        state = jax.tree.leaves((self.shapes.processors(self.shapes.slots), self.shapes.table))
        names: list[ProgramName] = [("forward", size), ("sample_full", self._shape.samples_of(size)),
                                    ("prompt_logprobs", SCORED_ROWS)]
        with ThreadPoolExecutor(len(names)) as threads:  # on a GPU, seconds each
            temporaries = threads.map(self.temporary_bytes, names)
            return sum(leaf.size * leaf.dtype.itemsize for leaf in state) + max(temporaries)

    def get(self, name: ProgramName) -> jax.stages.Compiled:
        """The executable; compiled now if it is not yet.

        In a thread of its own, where no context of the caller changes what is traced, such as a mesh that is set.
        """
        if name not in self._compiled:
            with ThreadPoolExecutor(1) as thread:
                compiled = thread.submit(lambda: self._from_store(name) or self.compile(name)).result()
            with self._lock:
                self._compiled[name] = compiled
        return self._compiled[name]

    def compile(self, name: ProgramName, more_options: Mapping[str, bool | str] | None = None) -> jax.stages.Compiled:
        """Compile, whether or not it has been compiled before."""
        return self.lower(name).compile(compiler_options=COMPILER_OPTIONS[self._platform] | dict(more_options or {}))

    def _from_store(self, name: ProgramName) -> jax.stages.Compiled | None:
        store = self._store
        if store is None:
            return None
        try:
            return store.load(name, self.placement.devices)
        except StoreError as error:
            self._give_up_store(error)
            return None

    def _give_up_store(self, error: StoreError) -> None:
        with self._lock:
            if self._store is not None:
                logger.warning("%s; compiling instead", error)
            self._store = None

    @property
    def host_memory_kind(self) -> str | None:
        """JAX's name of the host memory that blocks are moved to; None where the pools are in it already."""
        return None if self._platform == "cpu" else "pinned_host"

    def lower(self, name: ProgramName) -> jax.stages.Lowered:
        """The program before it is compiled, which can also be done for an absent device; see `aot`."""
        # Inside shard_map the mesh says which devices they are.
        kind, size = name
        with nullcontext() if self.placement.mesh else lowering_for(self.placement.devices[0]):
            return KINDS[kind].lower(self._functions, self.shapes, size)
