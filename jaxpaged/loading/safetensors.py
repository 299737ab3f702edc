"""Reading a safetensors file in batches of rows.

The safetensors package checks the header. Whole rows are read by plain file reads; parts of rows through a memory map,
whose pages are released after each batch: they would count as this process's memory.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.host_memory import forget_pages
from jaxpaged.loading.stored_dtype import stored_dtype

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Of quantized weights.
_RAW_DTYPES = _DTYPES | {"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "I32": np.dtype(np.int32),
                         "I64": np.dtype(np.int64), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
                         "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}
# Elements read at a time.
_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Location of a tensor: `offset` in bytes from the start of the file, `dtype` as the format spells it."""

    shape: tuple[int, ...]
    dtype: str
    offset: int


class SafetensorsFile:
    """The tensors of one file.

    Raises:
        CheckpointError: the file cannot be read, is truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; download it again") from error
        self._tensors = {
            name: _Tensor(tuple(item["shape"]), item["dtype"], 8 + size + item["data_offsets"][0])
            for name, item in header.items() if name != "__metadata__"
        }

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor of plain weights; CheckpointError if it is not supported."""
        return stored_dtype(self.path, name, self._tensors[name].dtype, _DTYPES)

    def raw_dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor that may be a part of quantized weights; CheckpointError if it is not supported."""
        return stored_dtype(self.path, name, self._tensors[name].dtype, _RAW_DTYPES)

    def read_tensor(self, name: str, out: np.ndarray, part: tuple[slice, ...] | None = None) -> None:
        """Read a tensor, or a part of it, into `out`: its shape, any dtype that holds it, any strides."""
        tensor, dtype = self._tensors[name], self.raw_dtype(name)
        part = part or tuple(slice(0, size) for size in tensor.shape)
        assert out.shape == tuple(item.stop - item.start for item in part), (name, out.shape, part)
        if not out.size:
            return
        # Values too large for `out` become infinite: the sampler reports them, not a warning.
        with np.errstate(all="ignore"):
            if out.shape[1:] == tensor.shape[1:]:
                self._read_rows(tensor, dtype, part[0].start if part else 0, out if out.ndim else out[np.newaxis])
            else:
                self._read_columns(tensor, dtype, part, out)

    def _read_rows(self, tensor: _Tensor, dtype: np.dtype, first: int, out: np.ndarray) -> None:
        row = math.prod(tensor.shape[1:])
        step = max(1, _BATCH // row)
        with self.path.open("rb") as file:
            file.seek(tensor.offset + first * row * dtype.itemsize)
            for start in range(0, len(out), step):
                batch = np.empty(out[start:start + step].shape, dtype)
                if file.readinto(batch.view(np.uint8).data) != batch.nbytes:
                    raise CheckpointError(f"{self.path} was truncated while it was read")
                out[start:start + step] = batch

    def _read_columns(self, tensor: _Tensor, dtype: np.dtype, part: tuple[slice, ...], out: np.ndarray) -> None:
        row = math.prod(tensor.shape[1:])
        step = max(1, _BATCH // row)
        with self.path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if tensor.offset + math.prod(tensor.shape) * dtype.itemsize > len(data):
            raise CheckpointError(f"{self.path} was truncated while it was read")
        stored = np.frombuffer(data, dtype, math.prod(tensor.shape), tensor.offset).reshape(tensor.shape)
        for start in range(0, len(out), step):
            batch, first = out[start:start + step], part[0].start + start
            batch[...] = stored[(slice(first, first + len(batch)), *part[1:])]
            forget_pages(data, tensor.offset + first * row * dtype.itemsize, len(batch) * row * dtype.itemsize)
