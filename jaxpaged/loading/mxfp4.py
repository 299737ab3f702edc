"""Reads the experts of gpt-oss as released: 4-bit floats with a power of two for each 32 of them (OCP MX, MXFP4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.packed_numbers import read_raw, require_dtype, require_shape
from jaxpaged.loading.param_tree import mismatch
from jaxpaged.loading.quantized import Form, QuantizedFile, Scaling, without_quantized
from jaxpaged.loading.tensor_files import Source
from jaxpaged.models.param_layout import Part

_BLOCK = 32
_BIAS = 127  # of the exponents
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# What experts' tensors hold, and its rows: from which one on, and every how many.
_PARTS = {"gate_up_proj": {"gate_proj": (0, 2), "up_proj": (1, 2)}, "down_proj": {"down_proj": (0, 1)}}


@dataclass(frozen=True, slots=True)
class Mxfp4Weights:
    """The weights [out, in] of one product of one expert: every `step`-th row of its tensors, from `first` on.

    Attributes:
        blocks: uint8 [E, rows, in / 32, 16], of each byte the lower half first.
        scales: uint8 [E, rows, in / 32], exponents of two.
    """

    shape: tuple[int, int]
    blocks: Source
    scales: Source
    expert: int
    first: int
    step: int
    batched: int = 0

    @property
    def form(self) -> Form:
        """See `QuantizedWeights`."""
        return Form(None, np.arange(self.shape[1]) // _BLOCK, np.dtype(np.float32), False)

    def values(self, part: Part) -> np.ndarray:
        """See `QuantizedWeights`."""
        expert, rows, columns, kept = self._stored(part)
        octets = read_raw(self.blocks, (expert, rows, columns, slice(0, _BLOCK // 2)))[0, :: self.step]
        numbers: np.ndarray = _VALUES[np.stack([octets & 15, octets >> 4], -1).reshape(len(octets), -1)]
        return numbers[:, kept]

    def scaling(self, part: Part) -> Scaling:
        """See `QuantizedWeights`."""
        expert, rows, columns, kept = self._stored(part)
        exponents = read_raw(self.scales, (expert, rows, columns))[0, :: self.step]
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
        return Scaling(scales, None, np.arange(_BLOCK * scales.shape[1])[kept] // _BLOCK)

    def _stored(self, part: Part) -> tuple[slice, slice, slice, slice]:
        """Where a part is stored: its expert, rows and blocks; and which inputs of these it is."""
        outputs, inputs = part
        rows = slice(self.first + self.step * outputs.start, self.first + self.step * (outputs.stop - 1) + 1)
        first = inputs.start % _BLOCK
        return (slice(self.expert, self.expert + 1), rows, slice(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK)),
                slice(first, first + inputs.stop - inputs.start))


class Mxfp4:
    """mxfp4, as `quantization_config` names it; the tensors say the rest."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        pass

    def as_plain(self, sources: Mapping[str, Source], path: Path) -> dict[str, Source]:
        """See `without_quantized`: each expert's weights are tensors of its own, in bfloat16, which holds them."""
        plain = dict(sources)
        found: dict[str, Mxfp4Weights] = {}
        problems: list[str] = []
        for name in sorted(sources):
            module, _, last = name.rpartition(".")
            kind = last.removesuffix("_blocks")
            if kind == last or kind not in _PARTS:
                continue
            try:
                found |= self._experts(module, kind, sources)
            except CheckpointError as error:
                problems.append(str(error))
            for part in ("blocks", "scales"):
                plain.pop(f"{module}.{kind}_{part}", None)
        if problems:
            raise mismatch(path, problems)
        return without_quantized(plain, QuantizedFile(path, found, "bfloat16"), path)

    def _experts(self, module: str, kind: str, sources: Mapping[str, Source]) -> dict[str, Mxfp4Weights]:
        blocks, scales = sources[f"{module}.{kind}_blocks"], sources.get(f"{module}.{kind}_scales")
        if scales is None:
            raise CheckpointError(f"{module} has {kind}_blocks, but no {kind}_scales; the checkpoint is incomplete")
        shape = blocks[0].shape(blocks[1])
        if len(shape) != 4 or shape[3] != _BLOCK // 2 or 0 in shape:
            raise CheckpointError(f"{module}.{kind}_blocks has shape {list(shape)}, not [experts, rows, blocks, 16]")
        for name, source in ((f"{kind}_blocks", blocks), (f"{kind}_scales", scales)):
            require_dtype(module, name, source, ("uint8",))
        require_shape(module, f"{kind}_scales", scales, shape[:3])
        count, rows, groups, _ = shape
        return {f"{module}.{expert}.{name}.weight": Mxfp4Weights(
            (len(range(first, rows, step)), _BLOCK * groups), blocks, scales, expert, first, step)
            for name, (first, step) in _PARTS[kind].items() for expert in range(count)}
