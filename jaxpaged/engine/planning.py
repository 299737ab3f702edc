"""From a configuration, a model's config and a device's description to every size that the engine runs with.

The same function serves the engine at its start, `python -m jaxpaged.plan` and `python -m jaxpaged.compile`; it needs
neither weights nor the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import CheckpointError, ConfigError
from jaxpaged.engine.memory_plan import MemoryPlan, plan_memory, refusal, temporary_bound
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.execution.logprobs import NUM_TOP
from jaxpaged.execution.sharding import (
    TENSOR,
    Partition,
    axes_tree,
    held_shapes,
    padded,
    partition_of,
    possible_sizes,
    shard_bytes,
)
from jaxpaged.execution.step_functions import Params
from jaxpaged.execution.step_shape import TRANSFER_SIZES, StepShape, step_sizes
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import ModelFamily
from jaxpaged.models.transformer import Transformer
from jaxpaged.pallas_kernels.kv_pages import max_addressable, page_dtype

Report = Callable[[str], None]

# Temporaries are reused from layer to layer: a model of two layers needs as many as the whole one.
TRIAL_LAYERS = 2
TRIAL_BLOCKS = 64
DTYPES = ("float32", "bfloat16", "float16")
MAX_USABLE_SHARE = 0.97  # of a GPU's memory: its driver reserves some


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One device by its facts: platform "cpu" or "cuda", its display name, its memory in bytes."""

    platform: str
    kind: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """A model before its weights are there.

    Attributes:
        config: sizes as the devices hold them; the vocabulary and the MLP may be padded.
        graph: the module's definition.
        shapes: shape and dtype of every parameter on the devices, as nested dicts.
        axes: of every parameter, in the same tree.
        stored: shapes as checkpoints have them, dtypes as on the devices, without padding and what devices hold twice.
        vocab_size: without padding.
    """

    config: ModelConfig
    graph: nnx.GraphDef[Transformer]
    shapes: Params
    axes: dict[Any, Any]
    stored: Params
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        """Padding not counted."""
        return self.config.quant.num_parameters(self.stored)

    def bytes_by_part(self, partition: Partition) -> dict[str, int]:
        """Bytes that each device holds of experts, of MLPs beside them, and of everything else."""
        found = {"experts": 0, "shared": 0}
        for shapes, axes in zip(self.shapes["layers"].values(), self.axes["layers"].values(), strict=True):
            for name, leaf in shapes["mlp"].items():
                part = {"expert": "experts", "shared": "shared"}.get(name.partition("_")[0])
                if part is not None:
                    found[part] += shard_bytes({name: leaf}, {name: axes["mlp"][name]}, partition)
        return found | {"others": shard_bytes(self.shapes, self.axes, partition) - sum(found.values())}

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes))


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Every size that the engine runs with."""

    definition: ModelDefinition
    partition: Partition
    dtype: jnp.dtype
    cache: KVCacheSpec
    shape: StepShape
    max_num_batched_tokens: int
    max_model_len: int
    memory: MemoryPlan


def define(family: ModelFamily, dtype: jnp.dtype, config: ModelConfig, partition: Partition) -> ModelDefinition:
    """The definition of a model partitioned over devices; no weights are made."""
    axis = TENSOR if partition.size > 1 else None

    def split(sizes: ModelConfig) -> tuple[nnx.GraphDef[Transformer], Params]:
        graph, state = nnx.split(family.outline(sizes, dtype, axis))
        return graph, nnx.to_pure_dict(state)

    held = padded(config, partition)
    graph, stored = split(held)
    if held != config:
        stored = split(config)[1]
    stored = config.quant.held(stored)
    axes = axes_tree(stored, family.weights, config, partition)
    return ModelDefinition(held, graph, held_shapes(stored, axes, partition), axes, stored, config.vocab_size)


def temporaries_by_bound(layout: EngineLayout, model: ModelConfig, tokens: int | None = None) -> int:
    """Upper bound on the bytes of the largest step's temporaries on each device, where none is compiled.

    Args:
        tokens: of another largest step.
    """
    tokens = tokens or layout.max_num_batched_tokens
    return temporary_bound(model, num_devices=layout.partition.size, tokens=tokens,
                           samples=layout.shape.samples_of(tokens), itemsize=layout.dtype.itemsize)


def model_dtype(wanted: str, model: ModelConfig, platform: str) -> jnp.dtype:
    """Dtype of weights and activations.

    Raises:
        CheckpointError: the checkpoint's dtype is wanted, and no model runs in it.
    """
    if wanted == "auto":
        wanted = "float32" if platform == "cpu" else model.checkpoint_dtype
    if wanted not in DTYPES:
        raise CheckpointError(f"config.json: no model runs in the dtype {wanted}; choose one of {', '.join(DTYPES)} "
                              "with --dtype")
    return jnp.dtype(wanted)


def make_layout(
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceDescription,
    *,
    dtype: jnp.dtype,
    definition: Callable[[ModelConfig, Partition], ModelDefinition],
    temporaries: Callable[["EngineLayout"], int],
    report: Report,
) -> EngineLayout:
    """Choose every size that the engine runs with.

    Args:
        model: the model as its checkpoint describes it.
        definition: see `define`.
        temporaries: bytes of the largest step's temporaries on each device; called with a layout whose pool is
            small. A step's temporaries do not depend on the pool.
        report: called with a line where the context had to be lowered.

    Raises:
        ConfigError: the model does not fit, or cannot be divided over that number of devices.
    """
    if model.states and config.enable_embeddings:
        raise ConfigError(f"--enable-embeddings is not supported for {model.architecture}, whose layers have a "
                          "recurrent state; start without it")
    on_cpu = device.platform == "cpu"
    partition = partition_of(model, config.tensor_parallel_size)
    cache = KVCacheSpec.of(model, config.block_size, page_dtype(config.kv_cache_dtype, dtype))
    groups = model.kv_layout
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    budget = config.max_num_batched_tokens or (256 if on_cpu else 8192)
    max_model_len = _context(config, model)
    whole = definition(model, partition)
    memory_bytes = device.memory_bytes // partition.size if on_cpu else device.memory_bytes

    def layout_with(num_blocks: int | None, temporary_bytes: int) -> EngineLayout:
        memory = plan_memory(
            num_devices=partition.size, memory_bytes=memory_bytes,
            weight_bytes=shard_bytes(whole.shapes, whole.axes, partition), temporary_bytes=temporary_bytes,
            block_size=config.block_size, block_bytes=cache.block_bytes // partition.kv,
            kv_bytes_per_token=cache.block_bytes * groups.column_units // config.block_size, on_cpu=on_cpu,
            groups=cache.groups(model), max_chunk=budget,
            share=config.gpu_memory_utilization, pool_bytes=config.kv_cache_memory_bytes, num_blocks=num_blocks,
        )
        shape = StepShape(step_sizes(budget, device.platform), max_num_seqs, -(-max_model_len // config.block_size),
                          config.block_size, memory.num_blocks, max(NUM_TOP, config.max_logprobs),
                          config.logprobs_mode == "processed_logprobs", config.enable_embeddings,
                          TRANSFER_SIZES[device.platform] if config.swap_bytes(device.platform) else ())
        return EngineLayout(whole, partition, dtype, cache, shape, budget, max_model_len, memory)

    temporary_bytes = temporaries(layout_with(TRIAL_BLOCKS, 0))
    found = layout_with(config.num_gpu_blocks_override, temporary_bytes)
    numbers = config.block_size * model.num_kv_heads * model.head_dim // partition.kv
    addressable = max_addressable(found.memory.num_blocks, numbers, cache.dtype)
    if not on_cpu and addressable < found.memory.num_blocks:
        report(f"the KV pool is lowered from {found.memory.num_blocks:,} blocks to {addressable:,}: of one-byte "
               "numbers the kernels can address 2 GiB per layer")
        found = layout_with(addressable, temporary_bytes)
    if not found.memory.fits:
        raise ConfigError(refusal(found.memory, _remedies(found, config, model, definition, on_cpu)))
    if found.memory.tokens < max_model_len:
        report(f"the KV pool holds {found.memory.tokens:,} tokens: the context is lowered from {max_model_len:,} to "
               "that; --kv-cache-memory-bytes or --num-gpu-blocks-override make it larger")
        width = -(-found.memory.tokens // config.block_size)
        found = replace(found, max_model_len=found.memory.tokens, shape=replace(found.shape, table_width=width))
    return found


def lengths_of_interest(max_model_len: int) -> tuple[int, ...]:
    """Request lengths for which a memory plan reports the concurrency."""
    return tuple(sorted({max_model_len, *(length for length in (1024, 4096, 16384) if length < max_model_len)}))


def _remedies(
    layout: EngineLayout, config: EngineConfig, model: ModelConfig,
    definition: Callable[[ModelConfig, Partition], ModelDefinition], on_cpu: bool,
) -> list[str]:
    """Flags that would each make room by themselves."""
    memory, size, min_pool = layout.memory, layout.partition.size, 2 * layout.memory.block_bytes
    fixed = memory.temporary_bytes + memory.reserve_bytes + min_pool

    def fits(weight_bytes: int) -> bool:
        return weight_bytes + fixed <= memory.allowed_bytes

    room = memory.allowed_bytes - memory.weight_bytes - memory.temporary_bytes - memory.reserve_bytes
    if room >= min_pool and config.num_gpu_blocks_override is not None:
        return [f"--num-gpu-blocks-override {room // memory.block_bytes} or less"]
    if room >= min_pool and config.kv_cache_memory_bytes is not None:
        return [f"--kv-cache-memory-bytes {room} or less" if memory.num_blocks > 1 else
                f"--kv-cache-memory-bytes {min_pool} or more"]
    found = []
    # On CPU all devices share one memory.
    for count in possible_sizes(model) if not on_cpu else ():
        if count <= size:
            continue
        partition = partition_of(model, count)
        whole = definition(model, partition)
        share = shard_bytes(whole.shapes, whole.axes, partition)
        if fits(share):
            found.append(f"--tensor-parallel-size {count}, whose devices hold {_gib(share)} of weights each")
            break
    if layout.dtype.itemsize == 4 and not model.quant.types and fits(memory.weight_bytes // 2):
        found.append(f"--dtype bfloat16, which halves the weights to {_gib(memory.weight_bytes // 2)}")
    share_needed = math.ceil((memory.weight_bytes + fixed) / memory.memory_bytes * 100) / 100
    if memory.allowed_bytes / memory.memory_bytes < share_needed <= MAX_USABLE_SHARE:
        found.append(f"--gpu-memory-utilization {share_needed:.2f} or more")
    left = memory.allowed_bytes - memory.weight_bytes - memory.reserve_bytes - min_pool
    if 0 < left < memory.temporary_bytes:
        tokens = layout.max_num_batched_tokens * left // memory.temporary_bytes
        while tokens and temporaries_by_bound(layout, model, tokens) > left:
            tokens //= 2
        if tokens:
            found.append(f"--max-num-batched-tokens {tokens} or less")
    return found or ["a device with more memory, or a smaller model"]


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _context(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_model_len
    longest = model.max_stretched_len or model.max_model_len
    if wanted > longest:
        advice = ("lower it: the checkpoint has a learned embedding of each position, and none beyond"
                  if model.learned_positions else "lower it, or raise max_position_embeddings with --hf-overrides")
        raise ConfigError(f"--max-model-len {wanted} is more than the model's context of {longest}; {advice}")
    return wanted
