"""From a checkpoint's tensors to the arrays of a model's parameters."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, Part
from jaxpaged.loading.host_memory import ByteBudget, HostArena, zeros
from jaxpaged.loading.param_tree import KeyPath, insert, leaves, mismatch
from jaxpaged.models.weight_rules import Transform, WeightRule

# Dequantizing releases the interpreter lock; more threads than this gain little.
_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Task:
    """One parameter, its tensor in the checkpoint, the transform between them, and its shards.

    Attributes:
        shape: as the checkpoint has it, after the transform.
        axes: the transform puts the tensor's axes into this order and does nothing else; None if it does more.
        wanted_shape: on the devices.
        shards: parts of the array, each with the devices that hold it.
    """

    path: KeyPath
    tensor: str
    shape: tuple[int, ...]
    transform: Transform
    axes: tuple[int, ...] | None
    wanted_shape: tuple[int, ...]
    sharding: Sharding
    shards: tuple[tuple[Part, tuple[jax.Device, ...]], ...]


def load_params(
    shapes: Mapping[Any, Any],
    rules: Sequence[WeightRule],
    checkpoint: Checkpoint,
    *,
    num_layers: int,
    ignored: Sequence[str] = (),
    tied: bool = False,
    dtype: DTypeLike = np.float32,
    wanted: Mapping[Any, Any] | None = None,
    keep_in_place: bool = False,
    progress: bool = False,
) -> dict[Any, Any]:
    """Load all parameters. Each device reads only its shard; besides them the host holds at most the largest tensor.

    Args:
        shapes: nested dict of the parameters, leaves with a `shape`, as `nnx.to_pure_dict` gives it.
        rules: the family's weight table.
        checkpoint: where the tensors are.
        num_layers: a rule with `{i}` applies to each.
        ignored: fnmatch patterns of tensors that need no parameter.
        tied: the output head is the embedding, so that a head in the checkpoint needs no parameter.
        dtype: of the parameters.
        wanted: shape and sharding of each parameter on its devices, in the tree of `shapes`; zeros fill up what is
            larger than stored. Without it, all are on the default device.
        keep_in_place: the devices are CPUs and use the host's memory itself: all arrays are allocated from one arena in
            huge pages.
        progress: show a bar.

    Returns:
        `shapes` with arrays as leaves.

    Raises:
        CheckpointError: the checkpoint and the model do not match. It lists every parameter without a rule, rule
            without a tensor, tensor without a parameter and wrong shape; no weight has been read then.
    """
    target = np.dtype(dtype)
    tasks = _match(shapes, shapes if wanted is None else wanted, rules, checkpoint, num_layers,
                  [*ignored, *(["lm_head.weight"] if tied else [])])
    # The largest first, so that the threads finish together.
    tasks.sort(key=lambda task: -math.prod(task.shape))
    params: dict[Any, Any] = {}
    sizes = [_size(part) * target.itemsize for task in tasks for part, _ in task.shards]
    loader = _Loader(checkpoint, target, HostArena(sum(sizes), len(sizes)) if keep_in_place else None,
                     ByteBudget(max((math.prod(task.shape) for task in tasks), default=0) * target.itemsize))
    total = sum(math.prod(task.shape) for task in tasks) * target.itemsize
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="load-weights") as pool,
    ):
        futures = {pool.submit(loader.load, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                task = futures[future]
                insert(params, task.path, future.result())
                bar.update(math.prod(task.shape) * target.itemsize)
        except BaseException:  # an interrupt, too: leaving the pool would wait for all tasks that have not started
            pool.shutdown(cancel_futures=True)
            raise
    return params


def _match(
    shapes: Mapping[Any, Any], wanted: Mapping[Any, Any], rules: Sequence[WeightRule], checkpoint: Checkpoint,
    num_layers: int, ignored: Sequence[str],
) -> list[_Task]:
    """Match parameters with tensors, or raise with everything that does not match."""
    sources: dict[str, tuple[str, Transform]] = {}
    for rule in rules:
        for layer in range(num_layers) if "{i}" in rule.path else (0,):
            sources[_numbered(rule.path, layer)] = _numbered(rule.tensor, layer), rule.transform
    names, targets = checkpoint.names(), dict(leaves(wanted))
    default = SingleDeviceSharding(jax.local_devices()[0])
    tasks, problems, used = [], [], set()
    for path, leaf in leaves(shapes):
        dotted = ".".join(map(str, path))
        if dotted not in sources:
            problems.append(f"parameter {dotted} has no rule in the weight table")
            continue
        tensor, transform = sources[dotted]
        if tensor not in names:
            problems.append(f"tensor {tensor} is missing")
            continue
        used.add(tensor)
        try:
            stored = checkpoint.shape(tensor)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        found = _shape_after(transform, stored)
        if found != tuple(leaf.shape):
            problems.append(f"tensor {tensor} has shape {list(stored)}, which does not fit parameter {dotted} "
                            f"{list(leaf.shape)}")
        target = tuple(targets[path].shape)
        sharding = getattr(targets[path], "sharding", None) or default
        tasks.append(_Task(path, tensor, tuple(leaf.shape), transform, _order_of_axes(transform, len(stored)), target,
                           sharding, _shards(target, sharding)))
    problems += [f"tensor {name} is not used by the model" for name in sorted(names - used)
                 if not any(fnmatchcase(name, pattern) for pattern in ignored)]
    if problems:
        raise mismatch(checkpoint.path, problems)
    return tasks


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads parameters onto their devices; `load` may be called from several threads.

    Attributes:
        arena: memory that the parameters use for good; else each shard has its own, within `budget`, until copied.
    """

    checkpoint: Checkpoint
    dtype: np.dtype
    arena: HostArena | None
    budget: ByteBudget

    def load(self, task: _Task) -> jax.Array:
        """One parameter."""
        arrays: list[jax.Array] = []
        for part, devices in task.shards:
            size = _size(part) * self.dtype.itemsize
            with nullcontext() if self.arena else self.budget.reserve(size):
                memory = self.arena.allocate(size) if self.arena else zeros(size)
                host = memory.view(self.dtype).reshape([item.stop - item.start for item in part])
                _read(self.checkpoint, task, part, host)
                # Waiting bounds the host arrays that copies are still reading.
                arrays += jax.block_until_ready([jax.device_put(host, device) for device in devices])
                del memory, host
        return jax.make_array_from_single_device_arrays(task.wanted_shape, task.sharding, arrays)


def _read(checkpoint: Checkpoint, task: _Task, part: Part, out: np.ndarray) -> None:
    """Read a part of a parameter into zeros, which remain where it exceeds the stored shape."""
    stored = tuple(slice(min(item.start, size), min(item.stop, size))
                  for item, size in zip(part, task.shape, strict=True))
    inside: tuple[Any, ...] = (*(slice(item.stop - item.start) for item in stored), ...)  # a view, of scalars too
    out = out[inside]
    if task.axes is None:
        out[...] = task.transform(checkpoint.read_tensor(task.tensor))[stored]
    else:
        back = sorted(range(len(task.axes)), key=task.axes.__getitem__)
        checkpoint.read_tensor(task.tensor, out.transpose(back), tuple(stored[axis] for axis in back))


def _shards(shape: tuple[int, ...], sharding: Sharding) -> tuple[tuple[Part, tuple[jax.Device, ...]], ...]:
    """The parts of an array that devices of this process hold, each part once."""
    found: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None, sharding
        bounds = tuple(item.indices(size)[:2] for item, size in zip(index, shape, strict=True))
        found.setdefault(bounds, []).append(device)
    return tuple((tuple(slice(*item) for item in bounds), tuple(devices)) for bounds, devices in found.items())


def _size(part: Part) -> int:
    return math.prod(item.stop - item.start for item in part)


def _order_of_axes(transform: Transform, ndim: int) -> tuple[int, ...] | None:
    """The order that a transform puts the axes of a tensor into; None if it does more than that."""
    probe = np.empty(range(2, 2 + ndim), np.uint8)
    try:
        found = transform(probe)
    except ValueError:  # a transform for certain sizes only
        return None
    axes = tuple(size - 2 for size in found.shape)
    if sorted(axes) != list(range(ndim)) or found.ctypes.data != probe.ctypes.data:
        return None
    return axes if found.strides == probe.transpose(axes).strides else None


def _shape_after(transform: Transform, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return transform(np.broadcast_to(np.float32(0), shape)).shape
    except ValueError:  # a reshape that cannot work
        return None


def _numbered(template: str, layer: int) -> str:
    return template.replace("{i}", str(layer))
