"""Quantized weights of checkpoints: what a method's reader gives, and a view of it as plain tensors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.param_tree import mismatch
from jaxpaged.loading.tensor_files import Source
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import StoredType

_BATCH = 1 << 18  # numbers that are dequantized at a time


@dataclass(frozen=True, slots=True)
class Scaling:
    """What turns values into weights: weights [out, in] = (values - zeros) * scales.

    Attributes:
        scales: [out, G], 16 or 32-bit floats.
        zeros: [out, G], 8-bit integers; None: zero.
        groups: [in], the column of scales and zeros of each input.
    """

    scales: np.ndarray
    zeros: np.ndarray | None
    groups: np.ndarray

    def weights(self, values: np.ndarray) -> np.ndarray:
        """float32 [out, in] of values that it holds exactly, rounded once."""
        found = values.astype(np.float32)
        if self.zeros is not None:
            found -= self.zeros.astype(np.float32)[:, self.groups]
        found *= self.scales.astype(np.float32)[:, self.groups]
        return found


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are quantized, all parts alike.

    Attributes:
        kind: I4, I8 or F8, the values' as native/packed_types.h has them; None: another.
        groups: [in], the group of each input.
        scale_dtype: of the scales.
        zeros: there are zero points besides.
    """

    kind: str | None
    groups: np.ndarray
    scale_dtype: np.dtype
    zeros: bool


class QuantizedWeights(Protocol):
    """The weights [out, in] of one product as a checkpoint holds them. May be read from several threads."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""

    @property
    def batched(self) -> int:
        """The axis along which parts are best read one after the other."""

    @property
    def form(self) -> Form:
        """How they are quantized."""

    def values(self, part: Part) -> np.ndarray:
        """The values of a part, [out, in]: of the kinds of `Form` in uint8, int8 or 8-bit floats."""

    def scaling(self, part: Part) -> Scaling:
        """The scales of a part."""


class Method(Protocol):
    """A method of quantization, as a checkpoint's config describes it."""

    @property
    def parts(self) -> Collection[str]:
        """The last words of the names of the tensors that quantized weights consist of."""

    @property
    def unused(self) -> Collection[str]:
        """Those of tensors that serve activations or the KV cache alone, which stay in their own dtype here."""

    def weights(self, module: str, tensors: Mapping[str, Source]) -> QuantizedWeights | None:
        """The weights of a module, by its name, from those of its tensors that are `parts`; None if they are plain.

        Raises:
            CheckpointError: a tensor is missing or does not fit the others; the text names the module.
        """

    def expected(self, module: str, dtype: str) -> StoredType:
        """The type that the weights of a module in a layer will have, where only the config is there.

        Args:
            dtype: the model's.
        """


def named_by(names: Any, module: str) -> bool:
    """Whether a config's list of names, or parts of names, has a module."""
    return isinstance(names, list | tuple) and any(str(name) in module for name in names)


class QuantizedFile:
    """Dequantized weights as the tensors of a file, computed in batches as they are read.

    Args:
        dtype: a name; which the file says they have.
    """

    def __init__(
        self, path: Path, weights: Mapping[str, QuantizedWeights], dtype: str = "float32"
    ) -> None:
        self.path = path
        self.weights = weights
        self._dtype = jnp.dtype(dtype)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """[out, in]."""
        return self.weights[name].shape

    def dtype(self, name: str) -> np.dtype:
        """The one of all."""
        return self._dtype

    def raw_dtype(self, name: str) -> np.dtype:
        """The one of all."""
        return self._dtype

    def read_tensor(self, name: str, out: np.ndarray, part: Part | None = None) -> None:
        """Dequantize a tensor, or a part of it, into `out`: its shape, any float dtype, any strides."""
        weights = self.weights[name]
        bounds = list(part or (slice(0, size) for size in weights.shape))
        assert out.shape == tuple(item.stop - item.start for item in bounds), (name, out.shape, bounds)
        axis = weights.batched
        whole = bounds[axis]
        # A multiple of 32, so that batches along packed numbers begin with a whole word.
        step = max(32, _BATCH // max(1, out.shape[1 - axis]) // 32 * 32)
        for first in range(whole.start, whole.stop, step):
            last = min(whole.stop, first + step)
            bounds[axis] = slice(first, last)
            to = [slice(None), slice(None)]
            to[axis] = slice(first - whole.start, last - whole.start)
            with np.errstate(all="ignore"):  # as of plain tensors, what is too large becomes infinite
                out[tuple(to)] = weights.scaling(tuple(bounds)).weights(weights.values(tuple(bounds)))


def as_plain(sources: Mapping[str, Source], method: Method, path: Path) -> dict[str, Source]:
    """A checkpoint's tensors, with the weights of each quantized module as one of them, called `weight`.

    Args:
        path: the checkpoint's, for errors.

    Raises:
        CheckpointError: tensors are missing or do not fit each other, or nothing is quantized.
    """
    modules: dict[str, dict[str, Source]] = {}
    plain: dict[str, Source] = {}
    for name, source in sources.items():
        module, _, last = name.rpartition(".")
        if last in method.parts:
            modules.setdefault(module, {})[last] = source
        elif last not in method.unused:
            plain[name] = source
    found: dict[str, QuantizedWeights] = {}
    problems: list[str] = []
    for module, tensors in sorted(modules.items()):
        try:
            weights = method.weights(module, tensors)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if weights is None:
            plain |= {f"{module}.{last}": source for last, source in tensors.items()}
        else:
            found[f"{module}.weight"] = weights
    if problems:
        raise mismatch(path, problems)
    return without_quantized(plain, QuantizedFile(path, found), path)


def without_quantized(plain: Mapping[str, Source], file: QuantizedFile, path: Path) -> dict[str, Source]:
    """The plain tensors of a checkpoint, and its dequantized ones.

    Raises:
        CheckpointError: there are none of these.
    """
    if not file.weights:
        raise CheckpointError(
            f"{path}: the config says that the weights are quantized, but no tensor is; if they are plain after all, "
            "start with --hf-overrides '{\"quantization_config\": null}'")
    return dict(plain) | {name: (file, name) for name in file.names()}
