"""From a checkpoint's tensors to the arrays of a model's parameters."""

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint
from jaxpaged.loading.host_memory import ByteBudget, HostArena, zeros
from jaxpaged.loading.param_tree import KeyPath, insert, leaves, mismatch
from jaxpaged.loading.weight_sources import (
    Source,
    find_packed_source,
    find_source,
    name_of,
    read_sources,
    size_of,
)
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.param_layout import ParamAxes, Part, shard_sources
from jaxpaged.models.weight_rules import WeightRule, numbered, tensor_of, with_packed

# Dequantizing releases the interpreter lock; more threads than this gain little.
_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Task:
    """One parameter, its tensors in the checkpoint, and its shards.

    Attributes:
        shape: as the checkpoint has it, after the transform.
        axes: of the parameter.
        sources: of the whole parameter; where experts are stacked, of each expert.
        is_stack: experts are stacked along the first axis.
        dtype: on the devices.
        wanted_shape: on the devices.
        shards: parts of the array, each with the devices that hold it.
    """

    path: KeyPath
    shape: tuple[int, ...]
    axes: ParamAxes
    sources: tuple[tuple[Source, ...], ...]
    is_stack: bool
    dtype: np.dtype
    wanted_shape: tuple[int, ...]
    sharding: Sharding
    shards: tuple[tuple[Part, tuple[jax.Device, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, padding not counted."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def unit_bytes(self) -> int:
        """Bytes that are on the host at a time: all, or those of one expert."""
        return math.prod(self.shape[self.is_stack :]) * self.dtype.itemsize


def load_params(
    shapes: Mapping[Any, Any],
    rules: Sequence[WeightRule],
    checkpoint: Checkpoint,
    *,
    config: ModelConfig,
    ignored: Sequence[str] = (),
    dtype: DTypeLike = np.float32,
    wanted: Mapping[Any, Any] | None = None,
    axes: Mapping[Any, Any] | None = None,
    keep_in_place: bool = False,
    progress: bool = False,
) -> dict[Any, Any]:
    """Load all parameters. Each device reads only its shard.

    Besides them the host holds at most the largest one; of stacked experts, one expert's.

    Args:
        shapes: nested dict of the parameters, leaves with a `shape`, as `nnx.to_pure_dict` gives it.
        rules: the family's weight table.
        checkpoint: where the tensors are.
        config: of the model as stored. Its scheme says which weights stay in their stored dtype. A rule with `{i}`
            applies to each of its layers; where its output head is the embedding, a head in the checkpoint needs no
            parameter.
        ignored: fnmatch patterns of tensors that need no parameter; in them `{n}` is the number of layers, the first
            layer that the model does not have.
        dtype: of all other parameters, but for those whose rule is wide.
        wanted: shape and sharding of each parameter on its devices, in the tree of `shapes`; zeros fill up what is
            larger than stored. Without it, all are on the default device.
        axes: of each parameter on these devices, in the same tree; may be left out where none is fused.
        keep_in_place: the devices are CPUs and use the host's memory itself: all arrays are allocated from one arena in
            huge pages.
        progress: show a bar.

    Returns:
        `shapes` with arrays as leaves.

    Raises:
        CheckpointError: the checkpoint and the model do not match. It lists every parameter without a rule, rule
            without a tensor, tensor without a parameter and wrong shape; no weight has been read then.
    """
    tasks = _match(shapes, shapes if wanted is None else wanted, axes or {}, rules, checkpoint, config, np.dtype(dtype),
                   [*ignored, *(["lm_head.weight", tensor_of(rules, "head.kernel")] if config.tie_embeddings else [])])
    # The largest first, so that the threads finish together.
    tasks.sort(key=lambda task: -task.nbytes)
    params: dict[Any, Any] = {}
    sizes = [size_of(part) * task.dtype.itemsize for task in tasks for part, _ in task.shards]
    loader = _Loader(checkpoint, HostArena(sum(sizes), len(sizes)) if keep_in_place else None,
                     ByteBudget(max((task.unit_bytes for task in tasks), default=0)))
    total = sum(task.nbytes for task in tasks)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="load-weights") as pool,
    ):
        futures = {pool.submit(loader.load, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                task = futures[future]
                insert(params, task.path, future.result())
                bar.update(task.nbytes)
        except BaseException:  # an interrupt, too: leaving the pool would wait for all tasks that have not started
            pool.shutdown(cancel_futures=True)
            raise
    return params


def _match(
    shapes: Mapping[Any, Any], wanted: Mapping[Any, Any], axes: Mapping[Any, Any], rules: Sequence[WeightRule],
    checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype, ignored: Sequence[str],
) -> list[_Task]:
    """Match parameters with tensors, or raise with everything that does not match."""
    names, targets, axes_of = checkpoint.names(), dict(leaves(wanted)), dict(leaves(axes))
    table = _by_path(with_packed(rules), config, names)
    default = SingleDeviceSharding(jax.local_devices()[0])
    kept, packed = config.quant.kept_dtypes, config.quant.packed
    tasks: list[_Task] = []
    problems: list[str] = []
    used: dict[str, int] = {}  # how many numbers of each tensor have a parameter
    for path, leaf in leaves(shapes):
        dotted, shape = ".".join(map(str, path)), tuple(leaf.shape)
        if dotted not in table:
            problems.append(f"parameter {dotted} has no rule in the weight table")
            continue
        rule, layer = table[dotted]
        is_stack = any("{e}" in item.tensor for item in rule.sources)
        sources: list[list[Source]] = []
        for expert in range(shape[0] if is_stack else 1):
            sources.append([])
            for item, filled in zip(rule.sources, _filled(rule, layer, config, shape), strict=True):
                name = name_of(item, layer, expert, names)
                used.setdefault(name, 0)
                try:
                    if rule.packed:
                        source = find_packed_source(
                            checkpoint, name, packed[numbered(rule.module, layer).rpartition(".")[0]], rule.packed,
                            filled, item.order(config, layer))
                        sources[-1].append(source)
                        used[name] = math.prod(checkpoint.shape(name))
                        continue
                    rows = item.rows(config.layers[layer].mixer) if item.rows else None
                    source = find_source(checkpoint, names, name, item.bounds(config, layer), rule.transform_of(config),
                                     filled[is_stack:], dotted, shape, rows)
                    if order := item.order(config, layer):
                        source = replace(source, heads_axis=item.heads_axis, head_order=order)
                except CheckpointError as error:
                    problems.append(str(error))
                    continue
                used[name] += size_of(source.bounds)
                sources[-1].append(source)
        target = tuple(targets[path].shape)
        sharding = getattr(targets[path], "sharding", None) or default
        kept_in = np.dtype(np.float32) if rule.wide else kept.get(dotted, dtype)
        tasks.append(_Task(path, shape, axes_of.get(path, ()), tuple(map(tuple, sources)), is_stack, kept_in, target,
                           sharding, _shards(target, sharding)))
    patterns = [pattern.replace("{n}", str(config.num_layers)) for pattern in ignored]
    for name in sorted(names) if not problems else sorted(names - used.keys()):
        count, size = used.get(name), 0 if name not in used else math.prod(checkpoint.shape(name))
        if count is None and not any(fnmatchcase(name, pattern) for pattern in patterns):
            problems.append(f"tensor {name} is not used by the model")
        elif count is not None and count < size:
            problems.append(f"tensor {name} has {size:,} numbers, of which the model uses {count:,}")
    if problems:
        raise mismatch(checkpoint.path, problems)
    return tasks


def shapes_of_parts(shapes: Mapping[Any, Any], rules: Sequence[WeightRule], config: ModelConfig) -> dict[Any, Any]:
    """The shapes of the parameters, fused ones replaced by those of their parts: see `WeightRule.parts`."""
    table, found = _by_path(rules, config), dict[Any, Any]()
    for path, leaf in leaves(shapes):
        rule, layer = table.get(".".join(map(str, path)), (None, 0))
        if rule is None or len(rule.parts) == 1:
            insert(found, path, leaf)
            continue
        for index, part in enumerate(_filled(rule, layer, config, leaf.shape)):
            insert(found, (*path, index), jax.ShapeDtypeStruct([item.stop - item.start for item in part], leaf.dtype))
    return found


def _by_path(
    rules: Sequence[WeightRule], config: ModelConfig, names: Collection[str] = ()
) -> dict[str, tuple[WeightRule, int]]:
    """The rule and the layer of each parameter; of several rules the first whose tensors are among `names`."""
    found: dict[str, tuple[WeightRule, int]] = {}
    for rule in rules:
        for layer in range(config.num_layers) if "{i}" in rule.path else (0,):
            path = numbered(rule.path, layer)
            if path not in found or (_is_stored(rule, layer, names) and not _is_stored(*found[path], names)):
                found[path] = rule, layer
    return found


def _is_stored(rule: WeightRule, layer: int, names: Collection[str]) -> bool:
    return any(numbered(name, layer) in names for item in rule.sources for name in (item.tensor, item.other) if name)


def _filled(rule: WeightRule, layer: int, config: ModelConfig, shape: tuple[int, ...]) -> list[Part]:
    """The part of a parameter of this shape that each of a rule's tensors becomes."""
    whole = tuple(slice(0, size) for size in shape)
    if len(rule.sources) == 1:
        return [whole]
    axis, sizes = rule.fused_axis, rule.fused_sizes(config, layer)
    assert axis is not None and sum(sizes) == shape[axis], f"{rule.path} {shape}: parts of {sizes}"
    return [(*whole[:axis], slice(stop - size, stop), *whole[axis + 1 :])
            for size, stop in zip(sizes, accumulate(sizes), strict=True)]


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads parameters onto their devices; `load` may be called from several threads.

    Attributes:
        arena: memory that the parameters use for good; else each shard has its own, within `budget`, until copied.
    """

    checkpoint: Checkpoint
    arena: HostArena | None
    budget: ByteBudget

    def load(self, task: _Task) -> jax.Array:
        """One parameter."""
        arrays: list[jax.Array] = []
        for part, devices in task.shards:
            if task.is_stack and self.arena is None:
                arrays += self._load_stack(task, part, devices)
                continue
            size = size_of(part) * task.dtype.itemsize
            with nullcontext() if self.arena else self.budget.reserve(size):
                memory = self.arena.allocate(size) if self.arena else zeros(size)
                host = memory.view(task.dtype).reshape([item.stop - item.start for item in part])
                _read(self.checkpoint, task, part, host)
                # Waiting bounds the host arrays that copies are still reading.
                arrays += jax.block_until_ready([jax.device_put(host, device) for device in devices])
                del memory, host
        return jax.make_array_from_single_device_arrays(task.wanted_shape, task.sharding, arrays)

    def _load_stack(self, task: _Task, part: Part, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """A shard of stacked experts, filled on the devices one after the other."""
        shape = [item.stop - item.start for item in part]
        arrays = [jnp.zeros(shape, task.dtype, device=device) for device in devices]
        size = math.prod(shape[1:]) * task.dtype.itemsize
        with self.budget.reserve(size):
            # One buffer for all: the C library would not return each to the system at once.
            host = zeros(size).view(task.dtype).reshape([1, *shape[1:]])
            for row, expert in enumerate(range(part[0].start, part[0].stop)):
                host[...] = 0
                _read(self.checkpoint, task, (slice(expert, expert + 1), *part[1:]), host)
                arrays = jax.block_until_ready([_set_row(array, jax.device_put(host, device), row)
                                                for array, device in zip(arrays, devices, strict=True)])
        return arrays


@partial(jax.jit, donate_argnums=0)
def _set_row(array: jax.Array, row: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, row, index, 0)


def _read(checkpoint: Checkpoint, task: _Task, part: Part, out: np.ndarray) -> None:
    """Read a part of a parameter, as on its devices, into zeros, which remain where it exceeds the stored shape."""
    for inside, stored in shard_sources(part, task.shape, task.axes):
        if not task.is_stack:
            read_sources(checkpoint, task.sources[0], stored, out[inside])
            continue
        for row, expert in enumerate(range(stored[0].start, stored[0].stop)):
            read_sources(checkpoint, task.sources[expert], stored[1:], out[inside][row, ...])


def _shards(shape: tuple[int, ...], sharding: Sharding) -> tuple[tuple[Part, tuple[jax.Device, ...]], ...]:
    """The parts of an array that devices of this process hold, each part once."""
    found: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None, sharding
        bounds = tuple(item.indices(size)[:2] for item, size in zip(index, shape, strict=True))
        found.setdefault(bounds, []).append(device)
    return tuple((tuple(slice(*item) for item in bounds), tuple(devices)) for bounds, devices in found.items())
