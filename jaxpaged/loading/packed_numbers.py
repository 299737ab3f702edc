"""Numbers of 4 or 8 bits in words of 32, the lowest bits first, and how groups of inputs are checked."""

from collections.abc import Collection, Mapping

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.tensor_files import Source


def read_raw(source: Source, part: tuple[slice, ...] | None = None) -> np.ndarray:
    """A tensor, or a part of it, in the dtype that it is stored in."""
    file, name = source
    shape = file.shape(name) if part is None else tuple(item.stop - item.start for item in part)
    out = np.empty(shape, file.raw_dtype(name))
    file.read_tensor(name, out, part)
    return out


def read_packed(source: Source, bits: int, axis: int, part: tuple[slice, slice]) -> np.ndarray:
    """uint8 [rows, columns], a part of a matrix of numbers that lie in the words of a tensor.

    Args:
        axis: along which a word's numbers follow one another.
        part: of the matrix.
    """
    count, bounds = 32 // bits, list(part)
    wanted = part[axis]
    bounds[axis] = slice(wanted.start // count, -(-wanted.stop // count))
    numbers = unpacked(read_raw(source, tuple(bounds)), bits, axis)
    first = wanted.start % count
    kept = slice(first, first + wanted.stop - wanted.start)
    return numbers[:, kept] if axis else numbers[kept]


def unpacked(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """uint8 numbers [rows, columns] of 32-bit words; along `axis` there are 32 / bits of them for each word."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    numbers = octets if bits == 8 else np.stack([octets & 15, octets >> 4], -1).reshape(*words.shape, 8)
    if axis == 1:
        return numbers.reshape(len(words), -1)
    return numbers.transpose(0, 2, 1).reshape(-1, words.shape[1])


def require(module: str, tensors: Mapping[str, Source], names: Collection[str]) -> None:
    """Raises:
        CheckpointError: one of these tensors is missing.
    """
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CheckpointError(f"{module} has {', '.join(sorted(tensors))}, but no {', '.join(missing)}; the "
                              "checkpoint is incomplete")


def require_dtype(module: str, name: str, source: Source, dtypes: Collection[str]) -> None:
    """Raises:
        CheckpointError: the tensor has another dtype than these.
    """
    file, stored = source
    found = file.raw_dtype(stored).name
    if found not in dtypes:
        raise CheckpointError(f"{module}.{name} is stored as {found}, not as {' or '.join(dtypes)}")


def require_shape(module: str, name: str, source: Source, wanted: tuple[int, ...]) -> None:
    """Raises:
        CheckpointError: the tensor has another shape.
    """
    file, stored = source
    if file.shape(stored) != wanted:
        raise CheckpointError(f"{module}.{name} has shape {list(file.shape(stored))}, not {list(wanted)}")


def group_size(module: str, size_in: int, count: int, wanted: int | None) -> int:
    """The number of inputs in each of `count` groups.

    Args:
        wanted: what the config says: -1 for one group of all inputs; None where the tensors decide.

    Raises:
        CheckpointError: the inputs are not whole groups, or the config says otherwise.
    """
    size = size_in if wanted == -1 else wanted or size_in // max(1, count)
    if not count or size < 1 or size_in % size:
        raise CheckpointError(f"{module}: {size_in} inputs are not whole groups of {size}")
    if count * size != size_in:
        raise CheckpointError(f"{module}: the scales are those of {count} groups, but {size_in} inputs are "
                              f"{size_in // size} groups of {size}, as the config says")
    return size


FLOATS = ("float16", "bfloat16", "float32")
