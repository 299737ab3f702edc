"""From a checkpoint's tensors to the arrays of a model's parameters."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint
from jaxpaged.loading.host_memory import HostArena, zeros
from jaxpaged.models.weight_rules import Transform, WeightRule

KeyPath = tuple[str | int, ...]
Place = Callable[[KeyPath, np.ndarray], jax.Array]

# Dequantising releases the interpreter lock; more threads than this gain little and each holds a tensor.
_THREADS = 2
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class _Task:
    """One parameter, the tensor it comes from, and how one becomes the other."""

    path: KeyPath
    tensor: str
    shape: tuple[int, ...]
    transform: Transform


def load_params(
    shapes: Mapping[Any, Any],
    rules: Sequence[WeightRule],
    checkpoint: Checkpoint,
    *,
    num_layers: int,
    ignored: Sequence[str] = (),
    tied: bool = False,
    dtype: DTypeLike = np.float32,
    place: Place | None = None,
    keep_in_place: bool = False,
    progress: bool = False,
) -> dict[Any, Any]:
    """Load all parameters; the host holds no more than two tensors besides them.

    Args:
        shapes: nested dict of the parameters, leaves with a `shape`, as `nnx.to_pure_dict` gives it.
        rules: the family's weight table.
        checkpoint: where the tensors are.
        num_layers: how often a rule with `{i}` applies.
        ignored: fnmatch patterns of tensors that need no parameter.
        tied: the output head is the embedding, so that a head in the checkpoint needs no parameter.
        dtype: of the parameters.
        place: puts a parameter's finished host array on its devices; by default on the default device. The array is
            C-contiguous and 64-byte aligned, and nobody writes to it afterwards.
        keep_in_place: `place` keeps using the host array itself, as on the CPU backend: all are cut from one piece of
            memory, in huge pages.
        progress: show a bar.

    Returns:
        `shapes` with arrays as leaves.

    Raises:
        CheckpointError: the checkpoint and the model do not match. It lists every parameter without a rule, rule
            without a tensor, tensor without a parameter and wrong shape; no weight has been read then.
    """
    target = np.dtype(dtype)
    tasks = _plan(shapes, rules, checkpoint, num_layers, [*ignored, *(["lm_head.weight"] if tied else [])])
    # The largest first, so that the threads finish together.
    tasks.sort(key=lambda task: -math.prod(task.shape))
    place = place or (lambda path, array: jax.device_put(array))
    params: dict[Any, Any] = {}
    total = sum(math.prod(task.shape) for task in tasks) * target.itemsize
    take = HostArena(total, len(tasks)).take if keep_in_place else zeros
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="load-weights") as pool,
    ):
        futures = {pool.submit(_load, checkpoint, task, target, place, take): task for task in tasks}
        try:
            for future in as_completed(futures):
                task = futures[future]
                _insert(params, task.path, future.result())
                bar.update(math.prod(task.shape) * target.itemsize)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return params


def _plan(
    shapes: Mapping[Any, Any], rules: Sequence[WeightRule], checkpoint: Checkpoint, num_layers: int,
    ignored: Sequence[str],
) -> list[_Task]:
    """Match parameters with tensors, or raise with everything that does not match."""
    sources: dict[str, tuple[str, Transform]] = {}
    for rule in rules:
        for layer in range(num_layers) if "{i}" in rule.path else (0,):
            sources[_numbered(rule.path, layer)] = _numbered(rule.tensor, layer), rule.transform
    names = checkpoint.names()
    tasks, problems, used = [], [], set()
    for path, leaf in _leaves(shapes):
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
        tasks.append(_Task(path, tensor, tuple(leaf.shape), transform))
    problems += [f"tensor {name} is not used by the model" for name in sorted(names - used)
                 if not any(fnmatchcase(name, pattern) for pattern in ignored)]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems[:_MAX_PROBLEMS])
        more = f"\n  and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise CheckpointError(f"{checkpoint.path} does not match the model its config describes:{listed}{more}")
    return tasks


def _load(
    checkpoint: Checkpoint, task: _Task, dtype: np.dtype, place: Place, take: Callable[[int], np.ndarray]
) -> jax.Array:
    stored = checkpoint.shape(task.tensor)
    memory = take(math.prod(task.shape) * dtype.itemsize).view(dtype)
    # If the transform only relabels axes, the tensor is read straight into the parameter's memory: one of these two
    # orders makes it contiguous once relabelled.
    orders: tuple[Literal["C", "F"], ...] = ("C", "F")
    for order in orders:
        buffer = memory.reshape(stored, order=order)
        param = task.transform(buffer)
        if param.flags.c_contiguous and np.may_share_memory(param, buffer):
            checkpoint.read(task.tensor, buffer)
            break
    else:
        param = memory.reshape(task.shape)
        param[...] = task.transform(checkpoint.read(task.tensor))
    # Waiting bounds the host arrays that copies are still reading.
    return jax.block_until_ready(place(task.path, param))


def _shape_after(transform: Transform, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return transform(np.broadcast_to(np.float32(0), shape)).shape
    except ValueError:  # a reshape that cannot work
        return None


def _leaves(tree: Mapping[Any, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _insert(tree: dict[Any, Any], path: KeyPath, leaf: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _numbered(template: str, layer: int) -> str:
    return template.replace("{i}", str(layer))
