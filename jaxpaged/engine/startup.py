"""From a configuration to a model that is loaded, compiled and ready to run."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxpaged.core.config import DEFAULT_MEMORY_SHARE, EngineConfig
from jaxpaged.core.errors import CheckpointError, ConfigError
from jaxpaged.core.messages import EngineInfo
from jaxpaged.core.quantization_methods import AT_LOAD, METHODS
from jaxpaged.engine.chosen_devices import bytes_on, choose_devices
from jaxpaged.engine.compilation_cache import cached_compilation
from jaxpaged.engine.in_memory import InMemoryModel, source_in_memory
from jaxpaged.engine.model_source import ModelSource
from jaxpaged.engine.mosaic_check import choose_gpu_attention
from jaxpaged.engine.native_kernels import choose_native, keeps_stored
from jaxpaged.engine.planning import (
    TRIAL_LAYERS,
    DeviceDescription,
    EngineLayout,
    ModelDefinition,
    Report,
    define,
    lengths_of_interest,
    make_layout,
    model_dtype,
    temporaries_by_bound,
)
from jaxpaged.execution.devices import DeviceInfo, describe_devices, select_device
from jaxpaged.execution.model_runner import ModelRunner
from jaxpaged.execution.program_store import stored_blocks
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.execution.sharding import Placement
from jaxpaged.execution.step_functions import Params
from jaxpaged.execution.step_shape import StepShape
from jaxpaged.loading import rounding
from jaxpaged.loading.checkpoint import Checkpoint, open_model
from jaxpaged.loading.host_memory import move_zeros_to_huge_pages, return_free_memory
from jaxpaged.loading.hub import resolve_model
from jaxpaged.loading.orbax import OrbaxCheckpoint, saved_rules
from jaxpaged.loading.quantization_config import expected_type
from jaxpaged.loading.rounding import RoundedCheckpoint
from jaxpaged.loading.weights import load_params
from jaxpaged.models.config_checks import quantization_table
from jaxpaged.models.hf_config import eos_ids
from jaxpaged.models.quantization import kept_as_stored
from jaxpaged.models.registry import ModelFamily, find_family
from jaxpaged.models.rope_tables import merge_overrides
from jaxpaged.models.weight_rules import WeightRule, packable, products
from jaxpaged.pallas_kernels.kv_pages import page_dtype

_SHOW_LOADING_BYTES = 2**30  # smaller models load in seconds: the compilation's bar is enough


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A loaded and compiled model."""

    runner: ModelRunner
    info: EngineInfo
    shape: StepShape


def prepare(
    config: EngineConfig, report: Report, in_memory: InMemoryModel | None = None,
    devices: Sequence[jax.Device] | None = None, mesh: jax.sharding.Mesh | None = None, own_process: bool = True,
) -> ReadyModel:
    """Load the model, plan the KV pool and compile the programs; progress goes to stderr and `report`.

    Args:
        own_process: JAX's process-wide settings may be changed.

    Raises:
        ConfigError, CheckpointError: with what to change.
    """
    config, chosen = choose_devices(config, devices, mesh, in_memory)
    if chosen is not None:
        device = describe_devices(chosen, config.device)
    else:
        device = select_device(config.device, config.tensor_parallel_size,
                               config.gpu_memory_utilization or DEFAULT_MEMORY_SHARE, own_process=own_process)
    if not own_process and in_memory:
        device = device.without_others(bytes_on(device.devices[0], in_memory.params))
    with cached_compilation(report, keep=own_process):
        return _prepare(config, report, device, in_memory)


def _prepare(
    config: EngineConfig, report: Report, device: DeviceInfo, in_memory: InMemoryModel | None
) -> ReadyModel:
    began = time.monotonic()
    model = (source_in_memory(in_memory, config.dtype, report, config.max_model_len) if in_memory else
             _from_checkpoint(config, device))
    on_cpu = device.platform == "cpu"
    if config.preemption_mode == "swap" and not config.swap_bytes(device.platform):
        raise ConfigError("--preemption-mode swap needs memory; give --swap-space in GiB")
    config = replace(config, gpu_attention=choose_gpu_attention(
        config.gpu_attention, model.config, config.block_size, model.dtype,
        page_dtype(config.kv_cache_dtype, model.dtype), device))
    layout, programs = _layout_and_programs(config, model, device, report)
    assert layout.max_model_len <= layout.memory.tokens, "a sequence that fills the context must fit the KV pool"
    for line in layout.memory.lines(device.kind, lengths_of_interest(layout.max_model_len)):
        report(line)
    params = _load_and_compile(model, layout.definition, programs, lazily=config.enforce_eager)
    if on_cpu:
        return_free_memory()
    make_pools = partial(layout.cache.allocate, layout.memory.num_blocks, programs.placement.sharding,
                         *[_settle] * on_cpu)
    runner = ModelRunner(programs, params, make_pools, layout.shape, stored=layout.definition.stored)
    info = EngineInfo(
        model=config.model,
        architecture=model.config.architecture,
        device=device.kind,
        dtype=str(model.dtype),
        vocab_size=model.config.vocab_size,
        max_model_len=layout.max_model_len,
        block_size=config.block_size,
        num_blocks=layout.memory.num_blocks,
        max_num_seqs=layout.shape.max_num_seqs,
        max_num_batched_tokens=layout.max_num_batched_tokens,
        num_programs=len(programs.names()),
        weight_bytes=layout.definition.weight_bytes,
        kv_cache_bytes=layout.memory.pool_bytes,
        start_seconds=time.monotonic() - began,
        eos_token_ids=model.config.eos_token_ids,
        kv_groups=layout.memory.groups,
        kv_capacity=layout.memory.tokens,
        num_host_blocks=config.swap_bytes(device.platform) // layout.cache.block_bytes,
        attention=programs.attention,
        num_compiled=programs.num_compiled,
    )
    return ReadyModel(runner, info, layout.shape)


def layout_of(
    config: EngineConfig, model: ModelSource, device: DeviceInfo, report: Report, *, compiling: bool = True
) -> EngineLayout:
    """Every size that the engine runs with; the device may be one that programs can only be compiled for, or none.

    Args:
        compiling: find the temporaries by compiling the largest step, where the pool's size depends on them.

    Raises:
        ConfigError: the model does not fit; the text has the numbers and the flags that would help.
    """
    compiling = compiling and temporaries_matter(config, device)

    def temporaries(layout: EngineLayout) -> int:
        if not compiling:
            return temporaries_by_bound(layout, model.config)
        small = model.define(model.config.with_layers_of_each_kind(TRIAL_LAYERS), layout.partition)
        return programs_of(config, layout, small, device, report).largest_temporaries()

    return make_layout(
        config, model.config, DeviceDescription(device.platform, device.kind, device.memory_bytes), dtype=model.dtype,
        definition=model.define, temporaries=temporaries, report=report)


def temporaries_matter(config: EngineConfig, device: DeviceInfo) -> bool:
    """Whether the pool takes what a share of the memory leaves, and a compiler can measure the steps' temporaries."""
    return bool(device.devices) and (device.platform != "cpu" or config.gpu_memory_utilization is not None)


def programs_of(
    config: EngineConfig, layout: EngineLayout, definition: ModelDefinition, device: DeviceInfo, report: Report,
    store: Path | None = None,
) -> ProgramSet:
    """The programs of a layout, for its own definition or one of fewer layers; none is compiled yet."""
    native = choose_native(config, device.platform, layout.dtype, layout.cache.dtype, definition.config, report)
    return ProgramSet(
        definition.graph, definition.shapes, definition.config,
        replace(layout.cache, num_strips=definition.config.kv_layout.num_strips), layout.shape, axes=definition.axes,
        placement=Placement.of(device.devices, layout.partition), vocab_size=definition.vocab_size, dtype=layout.dtype,
        platform=device.platform, native=native, gpu_attention=config.gpu_attention, store=store)


def _layout_and_programs(
    config: EngineConfig, model: ModelSource, device: DeviceInfo, report: Report
) -> tuple[EngineLayout, ProgramSet]:
    """The layout and its programs, those of --compiled where they fit."""
    if config.compiled and model.own_module:
        report(f"{config.compiled} is not used: it cannot hold programs of a module of one's own")
    elif config.compiled:
        store = Path(config.compiled).expanduser()
        # The number of blocks is a part of every program: unless a flag sets it, it is that of the store.
        blocks = stored_blocks(store) if config.kv_cache_memory_bytes is None else None
        like_the_store = replace(config, num_gpu_blocks_override=config.num_gpu_blocks_override or blocks)
        try:
            layout = layout_of(like_the_store, model, device, report, compiling=False)
            programs = programs_of(config, layout, layout.definition, device, report, store)
            if programs.uses_store:
                return layout, programs
        except ConfigError as error:
            report(f"{store} is not used: {error}")
    layout = layout_of(config, model, device, report)
    return layout, programs_of(config, layout, layout.definition, device, report)


def _from_checkpoint(config: EngineConfig, device: DeviceInfo) -> ModelSource:
    checkpoint = open_model(resolve_model(config.model, config.revision, config.download_dir), config.hf_overrides)
    if config.quantization in AT_LOAD and checkpoint.quantization != config.quantization:
        checkpoint = _rounded(checkpoint, config.quantization)
    _check_method(config.quantization, checkpoint)
    found = model_of(config, checkpoint.config, device.platform, checkpoint)
    if isinstance(checkpoint, RoundedCheckpoint) and not found.config.quant.packed:
        raise ConfigError(f"--quantization {config.quantization} needs the native products of a CPU, --dtype float32, "
                          "and layers whose sizes are multiples of 32; leave the flag out")
    eos = found.config.eos_token_ids + eos_ids(checkpoint.generation_config, "generation_config.json")
    return replace(found, config=found.config.replace(eos_token_ids=tuple(sorted(set(eos)))),
                   load=partial(_load, checkpoint, find_family(checkpoint.config), found))


def _rounded(checkpoint: Checkpoint, method: str) -> Checkpoint:
    """With the weights of its layers' products quantized, those of routers and experts apart."""
    family = find_family(checkpoint.config)
    found = products(_rules(checkpoint, family), family.config_from_hf(checkpoint.config))
    return RoundedCheckpoint(checkpoint, method, [
        name for path, names in found.items() if path.startswith("layers.") and not path.endswith(".router")
        for name in names])


def _check_method(wanted: str | None, checkpoint: Checkpoint) -> None:
    if wanted not in (None, "none") and METHODS.get(wanted, wanted) != checkpoint.quantization:
        says = f"are quantized by {checkpoint.quantization}" if checkpoint.quantization else "are plain"
        raise ConfigError(f"--quantization {wanted}, but the weights of {checkpoint.path} {says}; leave the flag out")


def model_of(
    config: EngineConfig, hf: dict[str, Any], platform: str, checkpoint: Checkpoint | None = None
) -> ModelSource:
    """The model that a config.json describes, without weights to load.

    Args:
        checkpoint: what it will be loaded from, whose tensors need not be there yet: its config says their dtype then.
    """
    hf = merge_overrides(hf, config.hf_overrides or {})
    family = find_family(hf)
    model = family.config_from_hf(hf)
    if config.max_model_len:
        model = model.for_length(config.max_model_len)
    dtype = model_dtype(config.dtype, model, platform)
    rules, devices = _rules(checkpoint, family), config.tensor_parallel_size
    stored = checkpoint.stored_type if checkpoint else expected_type(hf, model.checkpoint_dtype)
    if config.quantization in AT_LOAD and not checkpoint and not quantization_table(hf):
        stored = rounding.expected_type(config.quantization, stored)
    quant = kept_as_stored(products(rules, model), stored,
                           packable(rules, model, devices, min(devices, model.num_kv_heads)))
    if quant.types and keeps_stored(config, platform, dtype, model, quant):
        model = model.replace(quant=quant)

    def load(definition: ModelDefinition, programs: ProgramSet, progress: bool) -> Params:
        raise CheckpointError("this model has no weights")

    return ModelSource(model, dtype, partial(define, family, dtype), load)


def _rules(checkpoint: Checkpoint | None, family: ModelFamily) -> tuple[WeightRule, ...]:
    return saved_rules(family.weights) if isinstance(checkpoint, OrbaxCheckpoint) else family.weights


def _load(
    checkpoint: Checkpoint, family: ModelFamily, source: ModelSource, definition: ModelDefinition,
    programs: ProgramSet, progress: bool,
) -> Params:
    converted = isinstance(checkpoint, OrbaxCheckpoint)
    try:
        return load_params(
            definition.stored, _rules(checkpoint, family), checkpoint,
            config=source.config, ignored=family.ignored, dtype=source.dtype, wanted=programs.params,
            axes=definition.axes, keep_in_place=programs.placement.devices[0].platform == "cpu", progress=progress)
    except CheckpointError as error:
        if not converted:
            raise
        raise CheckpointError(f"{error}\nConvert the model again if its files may be damaged, or if another version "
                              "converted them.") from error


def _load_and_compile(model: ModelSource, definition: ModelDefinition, programs: ProgramSet, *, lazily: bool) -> Params:
    progress = definition.weight_bytes >= _SHOW_LOADING_BYTES
    if lazily:
        return model.load(definition, programs, progress)
    with (
        tqdm(total=len(programs.names()), desc="Compiling programs", unit="program") as bar,
        ThreadPoolExecutor(1, thread_name_prefix="compile") as thread,
    ):
        compiling = thread.submit(programs.compile_all, lambda name: bar.update())
        params = model.load(definition, programs, progress)
        compiling.result()
    return params


def _settle(pool: jax.Array) -> None:
    for shard in jax.block_until_ready(pool).addressable_shards:
        move_zeros_to_huge_pages(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
