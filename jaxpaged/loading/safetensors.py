"""Reading a safetensors file piece by piece.

The safetensors package checks the header. The data is read by plain file reads, not through its memory map, whose pages
would count as this process's memory beside the parameters made from them.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpaged.errors import CheckpointError

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Elements read at a time.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies: `offset` in bytes from the start of the file, `dtype` as the format spells it."""

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
        """Dtype of a tensor.

        Raises:
            CheckpointError: it is not one of those supported.
        """
        stored = self._tensors[name].dtype
        if stored not in _DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name} is stored as {stored}, which is not supported; "
                                  f"supported are {', '.join(_DTYPES)}")
        return _DTYPES[stored]

    def read(self, name: str, out: np.ndarray) -> None:
        """Read a tensor into `out`: its shape, any float dtype, any strides."""
        tensor, dtype = self._tensors[name], self.dtype(name)
        assert out.shape == tensor.shape, (name, out.shape, tensor.shape)
        if not out.size:
            return
        out = out if out.ndim else out[np.newaxis]
        step = max(1, _PIECE // math.prod(out.shape[1:]))
        # Values too large for `out` become infinite: they are the sampler's to report, not a warning's.
        with self.path.open("rb") as file, np.errstate(all="ignore"):
            file.seek(tensor.offset)
            for start in range(0, len(out), step):
                piece = np.empty(out[start:start + step].shape, dtype)
                if file.readinto(piece.view(np.uint8).data) != piece.nbytes:
                    raise CheckpointError(f"{self.path} was truncated while it was read")
                out[start:start + step] = piece
