"""What a parameter is made from: tensors of a checkpoint or slices of them, checked and read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import PANEL, PackedType
from jaxpaged.models.weight_rules import TensorSlice, Transform, as_is, numbered


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor, or a slice of one, and what it becomes.

    Attributes:
        bounds: of the slice.
        order: the transform puts the tensor's axes into this order and does nothing else; None if it does more.
        filled: the part of the parameter (of one expert's, where they are stacked) that it becomes.
        rows: the rows of the tensor that it is, where these do not follow one another; `bounds` are of what they make.
        packed: the type in which it stays packed, and which array of `PackedType.shapes` it is; `bounds` are of that.
        heads_axis, head_order: the axis of the tensor with heads whose numbers lie in this order there, if in another.
    """

    tensor: str
    bounds: Part
    transform: Transform
    order: tuple[int, ...] | None
    filled: Part
    heads_axis: int | None = None
    head_order: tuple[int, ...] | None = None
    rows: np.ndarray | None = None
    packed: tuple[PackedType, str] | None = None

    def ordered(self, tensor: np.ndarray) -> np.ndarray:
        """Whole heads of the tensor with their numbers in the parameter's order."""
        if self.heads_axis is None or self.head_order is None:
            return tensor
        before, after = tensor.shape[: self.heads_axis], tensor.shape[self.heads_axis + 1 :]
        heads = tensor.reshape(*before, -1, len(self.head_order), *after)
        return heads.take(self.head_order, self.heads_axis + 1).reshape(tensor.shape)


def name_of(item: TensorSlice, layer: int, expert: int, names: set[str]) -> str:
    """The tensor's name, or the other one if the checkpoint has that."""
    name = numbered(item.tensor, layer, expert)
    other = name if item.other is None else numbered(item.other, layer, expert)
    return other if name not in names and other in names else name


def find_source(
    checkpoint: Checkpoint, names: set[str], tensor: str, bounds: Part, transform: Transform, filled: Part, path: str,
    shape: tuple[int, ...], rows: np.ndarray | None = None,
) -> Source:
    """The source that fills this part of the parameter at `path`, or of one expert's.

    Raises:
        CheckpointError: there is no such tensor, or it does not fit.
    """
    if tensor not in names:
        raise CheckpointError(f"tensor {tensor} is missing")
    stored = checkpoint.shape(tensor)
    if rows is not None and stored and rows.max(initial=-1) < stored[0]:
        stored = len(rows), *stored[1:]
    taken = bounds + tuple(slice(0, size) for size in stored[len(bounds) :])
    wanted = tuple(item.stop - item.start for item in filled)
    inside = len(taken) == len(stored) and all(item.stop <= size for item, size in zip(taken, stored, strict=True))
    found = _shape_after(transform, tuple(item.stop - item.start for item in taken)) if inside else None
    if found != wanted:
        sliced = f", of which {_bounds_text(taken)} is taken" if bounds else ""
        part = "" if wanted == shape else f"the part {list(wanted)} of "
        raise CheckpointError(f"tensor {tensor} has shape {list(stored)}{sliced}, which does not fit {part}parameter "
                              f"{path} {list(shape)}")
    return Source(tensor, taken, transform, _order_of_axes(transform, len(stored)), filled, rows=rows)


def find_packed_source(
    checkpoint: Checkpoint, tensor: str, kind: PackedType, leaf: str, filled: Part, head_order: tuple[int, ...] | None
) -> Source:
    """One array of a packed tensor; that it fits is known, since the scheme keeps it."""
    size_out, size_in = checkpoint.shape(tensor)
    shape = kind.shapes(size_in, size_out)[leaf].shape
    assert shape == tuple(item.stop - item.start for item in filled), (tensor, leaf, shape, filled)
    return Source(tensor, tuple(slice(0, size) for size in shape), as_is, None, filled, 0, head_order, None,
                  (kind, leaf))


def read_sources(checkpoint: Checkpoint, sources: Sequence[Source], part: Part, out: np.ndarray) -> None:
    """Read a part of what the sources become together."""
    for source in sources:
        shared = tuple(_overlap(*items) for items in zip(part, source.filled, strict=True))
        if len(sources) > 1 and not size_of(shared):
            continue
        to: tuple[Any, ...] = tuple(_shifted(item, -base.start) for item, base in zip(shared, part, strict=True))
        taken = tuple(_shifted(item, -base.start) for item, base in zip(shared, source.filled, strict=True))
        if source.packed:
            rows = source.ordered(np.arange(checkpoint.shape(source.tensor)[0]))
            checkpoint.read_packed(source.tensor, *source.packed, rows[PANEL * taken[0].start : PANEL * taken[0].stop],
                                   taken[1 if len(taken) > 1 else 0], out[(*to, ...)])
        elif source.order is None:
            whole = source.ordered(checkpoint.read_tensor(source.tensor, part=source.bounds))
            out[(*to, ...)] = source.transform(whole)[taken]
        else:
            back = sorted(range(len(source.order)), key=source.order.__getitem__)
            view = out[(*to, ...)].transpose(back)
            wanted = tuple(_shifted(taken[axis], base.start) for axis, base in zip(back, source.bounds, strict=True))
            if source.rows is None:
                checkpoint.read_tensor(source.tensor, view, wanted)
            else:
                rows = source.rows[wanted[0]]
                first = int(rows.min())
                read = checkpoint.read_tensor(source.tensor, part=(slice(first, int(rows.max()) + 1), *wanted[1:]))
                view[...] = read[rows - first]
            if source.head_order is not None:  # shards hold whole heads
                view[...] = source.ordered(view)


def _overlap(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


def _shifted(item: slice, by: int) -> slice:
    return slice(item.start + by, item.stop + by)


def size_of(part: Part) -> int:
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


def _bounds_text(part: Part) -> str:
    return f"[{', '.join(f'{item.start}:{item.stop}' for item in part)}]"
