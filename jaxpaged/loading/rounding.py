"""Quantizes plain weights of 16 or 32 bits as they are loaded: to 8 bits, with a scale for each output."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.core.errors import ConfigError
from jaxpaged.loading.checkpoint import Checkpoint
from jaxpaged.loading.packing import packed_type, read_packed
from jaxpaged.loading.quantization_config import is_quantizable
from jaxpaged.loading.quantized import Form, Scaling
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import PackedType, StoredType

# Each method's values: their kind, dtype, and the largest one.
METHODS: dict[str, tuple[str, Any, float]] = {
    "int8": ("I8", np.int8, 127.0), "fp8": ("F8", ml_dtypes.float8_e4m3fn, 448.0)}
_FLOATS = "float32", "float16", "bfloat16"


@dataclass(frozen=True, slots=True)
class RoundedWeights:
    """Weights [out, in] of a plain tensor, each rounded to the nearest value."""

    shape: tuple[int, int]
    method: str
    read: Callable[[slice], np.ndarray]  # rows, in float32
    batched: int = 0

    @property
    def form(self) -> Form:
        """See `QuantizedWeights`."""
        return Form(METHODS[self.method][0], np.zeros(self.shape[1], np.int64), np.dtype(np.float32), False)

    def values(self, part: Part) -> np.ndarray:
        """See `QuantizedWeights`."""
        rows, (_, dtype, most) = self.read(part[0]), METHODS[self.method]
        with np.errstate(all="ignore"):  # as of plain tensors, the sampler reports what is not finite
            found = (rows / _scales(rows, most))[:, part[1]]
            return (np.rint(found) if dtype is np.int8 else found).clip(-most, most).astype(dtype)

    def scaling(self, part: Part) -> Scaling:
        """See `QuantizedWeights`."""
        return Scaling(_scales(self.read(part[0]), METHODS[self.method][2]), None,
                       np.zeros(part[1].stop - part[1].start, np.int64))


def _scales(rows: np.ndarray, most: float) -> np.ndarray:
    """[out, 1]; one for an output without weights."""
    found: np.ndarray = np.abs(rows).max(axis=1, keepdims=True) / np.float32(most)
    return np.where(found > 0, found, np.float32(1))


def expected_type(method: str, plain: Callable[[str], StoredType]) -> Callable[[str], StoredType]:
    """As `quantization_config.expected_type`, for weights that are quantized as they are loaded.

    Args:
        plain: the type in which a tensor will be stored.
    """
    return lambda name: PackedType(f"{METHODS[method][0]}_F32", 0) if is_quantizable(name) else plain(name)


class RoundedCheckpoint:
    """A checkpoint of plain weights some of which are quantized as they are loaded, if they can stay so.

    Args:
        method: int8 or fp8.
        names: tensors that are quantized.

    Raises:
        ConfigError: the weights are quantized already.
    """

    def __init__(self, checkpoint: Checkpoint, method: str, names: Collection[str]) -> None:
        if checkpoint.quantization not in (None, "gguf"):
            raise ConfigError(f"--quantization {method} quantizes plain weights, but those of {checkpoint.path} are "
                              f"quantized by {checkpoint.quantization}; leave the flag out")
        self.path: Path = checkpoint.path
        self.config, self.generation_config = checkpoint.config, checkpoint.generation_config
        self.quantization: str | None = method
        self._inner, self._method, self._names = checkpoint, method, frozenset(names)

    def names(self) -> set[str]:
        """See `Checkpoint`."""
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._inner.shape(name)

    def stored_type(self, name: str) -> StoredType:
        """See `Checkpoint`."""
        found = self._inner.stored_type(name)
        if name not in self._names or found not in _FLOATS or len(self.shape(name)) != 2:
            return found
        return packed_type(self._weights(name)) or found

    def read_tensor(self, name: str, out: np.ndarray | None = None, part: Part | None = None) -> np.ndarray:
        """See `Checkpoint`: plain weights."""
        return self._inner.read_tensor(name, out, part)

    def read_packed(
        self, name: str, kind: PackedType, leaf: str, rows: np.ndarray, columns: slice, out: np.ndarray
    ) -> None:
        """See `Checkpoint`."""
        if self._inner.stored_type(name) in _FLOATS:
            read_packed(self._weights(name), name, kind, leaf, rows, columns, out)
        else:
            self._inner.read_packed(name, kind, leaf, rows, columns, out)

    def _weights(self, name: str) -> RoundedWeights:
        size_out, size_in = self.shape(name)

        def read(rows: slice) -> np.ndarray:
            out = np.empty((rows.stop - rows.start, size_in), np.float32)
            return self._inner.read_tensor(name, out, (rows, slice(0, size_in)))

        return RoundedWeights((size_out, size_in), self._method, read)
