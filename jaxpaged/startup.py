"""From a configuration to a model that is loaded, compiled and ready to run."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

from jaxpaged.config import EngineConfig
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.execution.devices import DeviceInfo, select_device
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.execution.memory_plan import plan_memory
from jaxpaged.execution.model_runner import ModelRunner, placed
from jaxpaged.execution.programs import Params, ProgramSet, StepShape, step_sizes
from jaxpaged.loading.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.loading.host_memory import move_zeros_to_huge_pages, return_free_memory
from jaxpaged.loading.hub import cache_dir, resolve_model
from jaxpaged.loading.weights import load_params
from jaxpaged.messages import EngineInfo
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import ModelFamily, find_family
from jaxpaged.models.transformer import Transformer
from jaxpaged.pallas_kernels import native_attention

Report = Callable[[str], None]

_SHOW_LOADING_BYTES = 2**30  # smaller models load in seconds: the compilation's bar is enough


@dataclass(frozen=True, slots=True)
class InMemoryModel:
    """A model that somebody already holds: its module, and weights as `nnx.to_pure_dict` gives them."""

    module: Transformer
    params: Params


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """What an engine runs on."""

    runner: ModelRunner
    info: EngineInfo
    shape: StepShape


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's definition before its weights are there."""

    config: ModelConfig
    graph: nnx.GraphDef[Transformer]
    shapes: Params
    load: Callable[[bool], Params]

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes))


def prepare(config: EngineConfig, report: Report, in_memory: InMemoryModel | None = None) -> ReadyModel:
    """Load the model, plan the pool, compile the programs; progress goes to stderr and `report`.

    Raises:
        ConfigError, CheckpointError: with what to change.
    """
    began = time.monotonic()
    device = select_device(config.device)
    _enable_compilation_cache()
    model = _from_memory(in_memory, device) if in_memory else _from_checkpoint(config, device)
    dtype = jax.tree.leaves(model.shapes)[0].dtype
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)
    cache = KVCacheSpec.of(model.config, config.block_size, cache_dtype)
    on_cpu = device.platform == "cpu"
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    budget = config.max_num_batched_tokens or (256 if on_cpu else 8192)
    max_model_len = _context(config, model.config)
    native = _native_attention(config.cpu_attention, device, {jnp.dtype(dtype), jnp.dtype(cache_dtype)}, report)

    def programs_for(num_blocks: int) -> tuple[ProgramSet, StepShape]:
        shape = StepShape(step_sizes(budget, device.platform), max_num_seqs, -(-max_model_len // config.block_size),
                          config.block_size, num_blocks)
        return ProgramSet(model.graph, model.shapes, model.config, cache, shape, device=device.device,
                          platform=device.platform, native_attention=native), shape

    temporary_bytes = 0
    if not on_cpu or config.gpu_memory_utilization is not None:
        # Temporaries do not depend on the number of blocks, so a small pool tells them.
        trial, shape = programs_for(64)
        temporary_bytes = trial.temporary_bytes(("forward", shape.sizes[-1]))
    plan = plan_memory(
        memory_bytes=device.memory_bytes, weight_bytes=model.weight_bytes, temporary_bytes=temporary_bytes,
        block_bytes=cache.block_bytes, on_cpu=on_cpu, share=config.gpu_memory_utilization,
        pool_bytes=config.kv_cache_memory_bytes, num_blocks=config.num_gpu_blocks_override,
    )
    held = (plan.num_blocks - 1) * config.block_size
    if held < max_model_len:
        report(f"the KV pool holds {held:,} tokens: the context is lowered from {max_model_len:,} to that; "
               "--kv-cache-memory-bytes or --num-gpu-blocks-override make it larger")
        max_model_len = held
    programs, shape = programs_for(plan.num_blocks)
    params = _load_and_compile(model, programs, lazily=config.enforce_eager)
    if on_cpu:
        return_free_memory()
        pools = cache.allocate(plan.num_blocks, device.device, _settle)
    else:
        pools = cache.allocate(plan.num_blocks, device.device)
    runner = ModelRunner(programs, params, pools, shape, device=device.device)
    info = EngineInfo(
        model=config.model,
        architecture=model.config.architecture,
        device=device.kind,
        dtype=str(dtype),
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_programs=len(programs.names()),
        weight_bytes=model.weight_bytes,
        kv_cache_bytes=plan.pool_bytes,
        start_seconds=time.monotonic() - began,
        eos_token_ids=model.config.eos_token_ids,
    )
    return ReadyModel(runner, info, shape)


def _from_checkpoint(config: EngineConfig, device: DeviceInfo) -> _Model:
    checkpoint = open_checkpoint(resolve_model(config.model, config.revision, config.download_dir))
    hf = checkpoint.config | (config.hf_overrides or {})
    family = find_family(hf)
    model_config = family.config_from_hf(hf)
    eos = model_config.eos_token_ids + _ids(checkpoint.generation_config.get("eos_token_id"))
    model_config = model_config.replace(eos_token_ids=tuple(sorted(set(eos))))
    dtype = jnp.dtype(_dtype(config.dtype, model_config, device))
    graph, state = nnx.split(nnx.eval_shape(lambda: family.build(model_config, dtype)))
    shapes = nnx.to_pure_dict(state)
    return _Model(model_config, graph, shapes,
                  lambda progress: _load(checkpoint, family, model_config, shapes, dtype, device, progress))


def _from_memory(model: InMemoryModel, device: DeviceInfo) -> _Model:
    graph, _ = nnx.split(model.module)
    shapes = jax.eval_shape(lambda: model.params)
    return _Model(model.module.config, graph, shapes, lambda progress: placed(model.params, device.device))


def _load(
    checkpoint: Checkpoint, family: ModelFamily, config: ModelConfig, shapes: Params, dtype: jnp.dtype,
    device: DeviceInfo, progress: bool,
) -> Params:
    return load_params(
        shapes, family.weights, checkpoint, num_layers=config.num_layers, ignored=family.ignored,
        tied=config.tie_embeddings, dtype=dtype, place=lambda array: jax.device_put(array, device.device),
        keep_in_place=device.platform == "cpu", progress=progress,
    )


def _load_and_compile(model: _Model, programs: ProgramSet, *, lazily: bool) -> Params:
    progress = model.weight_bytes >= _SHOW_LOADING_BYTES
    if lazily:
        return model.load(progress)
    with (
        tqdm(total=len(programs.names()), desc="Compiling programs", unit="program") as bar,
        ThreadPoolExecutor(1, thread_name_prefix="compile") as thread,
    ):
        compiling = thread.submit(programs.compile_all, lambda name: bar.update())
        params = model.load(progress)
        compiling.result()
    return params


def _settle(pool: jax.Array) -> None:
    move_zeros_to_huge_pages(jax.block_until_ready(pool).unsafe_buffer_pointer(), pool.nbytes)


def _native_attention(wanted: str, device: DeviceInfo, dtypes: set[jnp.dtype], report: Report) -> bool:
    """Whether attention runs in the native kernel, which is then built and registered."""
    if wanted == "xla" or (wanted == "auto" and (device.platform != "cpu" or dtypes != {jnp.dtype("float32")})):
        return False
    if device.platform != "cpu":
        raise ConfigError(f"--cpu-attention native cannot run on {device.platform}; leave it out")
    if dtypes != {jnp.dtype("float32")}:
        raise ConfigError("--cpu-attention native needs weights and KV pool in float32; add --dtype float32 "
                          "--kv-cache-dtype float32, or leave it out")
    failure = native_attention.build(cache_dir() / "native")
    if failure is not None and wanted == "native":
        raise ConfigError(f"--cpu-attention native cannot be built: {failure}; use auto or xla")
    if failure is not None:
        report(f"attention runs on XLA, more slowly than the native kernel would: {failure}")
    return failure is None


def _context(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(f"--max-model-len {wanted} is more than the model's context of {model.max_model_len}; "
                          "lower it, or raise max_position_embeddings with --hf-overrides")
    return wanted


def _dtype(wanted: str, model: ModelConfig, device: DeviceInfo) -> str:
    if wanted != "auto":
        return wanted
    return "float32" if device.platform == "cpu" else model.checkpoint_dtype


def _ids(value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise CheckpointError("generation_config.json: eos_token_id must be an integer or a list of integers")
    return tuple(items)


def _enable_compilation_cache() -> None:
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
