"""Reads checkpoints of GPTQ (Frantar et al., 2023) with 4 or 8 bits, as AutoGPTQ and GPTQModel write them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.packed_numbers import (
    FLOATS,
    group_size,
    read_packed,
    read_raw,
    require,
    require_dtype,
    require_shape,
    unpacked,
)
from jaxpaged.loading.quantized import Form, Scaling, named_by
from jaxpaged.loading.tensor_files import Source
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import PackedType, StoredType

_BITS = 4, 8
_FORMATS = "gptq", "gptq_v2"


@dataclass(frozen=True, slots=True)
class GptqWeights:
    """Weights [out, in]: words [in * bits / 32, out], zero points [G, out * bits / 32], scales [G, out].

    Attributes:
        groups: [in], the group of each input.
        less_one: the zero points are stored less one, as words: what is below zero borrows from the next.
    """

    shape: tuple[int, int]
    bits: int
    groups: np.ndarray
    words: Source
    zeros: Source
    scales: Source
    less_one: bool
    batched: int = 1

    @property
    def form(self) -> Form:
        """See `QuantizedWeights`."""
        file, name = self.scales
        return Form(f"I{self.bits}", self.groups, file.raw_dtype(name), True)

    def values(self, part: Part) -> np.ndarray:
        """See `QuantizedWeights`."""
        return read_packed(self.words, self.bits, 0, (part[1], part[0])).T

    def scaling(self, part: Part) -> Scaling:
        """See `QuantizedWeights`."""
        outputs, inputs = part
        needed, groups = np.unique(self.groups[inputs], return_inverse=True)
        rows = slice(int(needed[0]), int(needed[-1]) + 1)
        count = 32 // self.bits
        columns = slice(outputs.start // count, -(-outputs.stop // count))
        words = read_raw(self.zeros, (rows, columns)).view(np.uint32)
        if self.less_one:
            words = words + np.uint32(0x11111111 if self.bits == 4 else 0x01010101)
        first = outputs.start - columns.start * count
        zeros = unpacked(words, self.bits, 1)[:, first : first + outputs.stop - outputs.start]
        needed = needed - rows.start
        return Scaling(read_raw(self.scales, (rows, outputs))[needed].T, zeros[needed].T, groups)


class Gptq:
    """GPTQ, as `quantization_config` or quantize_config.json describes it.

    Where modules differ (`dynamic`), the tensors say each one's bits and groups.

    Raises:
        UnsupportedModelError: another layout, or another number of bits.
    """

    parts = "qweight", "qzeros", "scales", "g_idx"
    unused = ()

    def __init__(self, table: Mapping[str, Any]) -> None:
        bits = table.get("bits", table.get("wbits", 4))
        layout = str(table.get("checkpoint_format") or table.get("format") or "gptq").lower()
        if bits not in _BITS:
            raise UnsupportedModelError(f"quantization_config: gptq with {bits} bits is not supported; "
                                        f"{' and '.join(map(str, _BITS))} are")
        if table.get("is_marlin_format") or layout not in _FORMATS:
            raise UnsupportedModelError(
                f"quantization_config: the layout {layout if layout not in _FORMATS else 'marlin'} of gptq is not "
                f"supported; {' and '.join(_FORMATS)} are")
        differ = bool(table.get("dynamic"))
        self._bits: int | None = None if differ else bits
        self._group: int | None = None if differ else table.get("group_size")
        self._less_one = layout == "gptq"
        group = max(0, table.get("group_size") or 0)
        self._expected = PackedType(f"I{bits}_F16", group, True, "own" if table.get("desc_act") and group else "")
        self._plain = table.get("modules_to_not_convert")

    def expected(self, module: str, dtype: str) -> StoredType:
        """See `Method`. Modules that differ are not told apart."""
        return dtype if named_by(self._plain, module) else self._expected

    def weights(self, module: str, tensors: Mapping[str, Source]) -> GptqWeights | None:
        """See `Method`."""
        require(module, tensors, ("qweight", "qzeros", "scales"))
        words, zeros, scales = (tensors[name] for name in self.parts[:3])
        for name in tensors.keys() - {"scales"}:
            require_dtype(module, name, tensors[name], ("int32",))
        require_dtype(module, "scales", scales, FLOATS)
        (rows, size_out), (count, columns) = words[0].shape(words[1]), zeros[0].shape(zeros[1])
        bits = next((bits for bits in _BITS if columns * 32 == size_out * bits), None)
        if bits is None or self._bits not in (None, bits):
            raise CheckpointError(f"{module}: zero points {[count, columns]} of {size_out} outputs are not those of "
                                  f"{self._bits or '4 or 8'} bits")
        require_shape(module, "scales", scales, (count, size_out))
        size_in = rows * 32 // bits
        size = group_size(module, size_in, count, self._group)
        return GptqWeights((size_out, size_in), bits, input_groups(module, "g_idx", tensors, size_in, size), words,
                           zeros, scales, self._less_one)


def input_groups(module: str, name: str, tensors: Mapping[str, Source], size_in: int, size: int) -> np.ndarray:
    """[in], the group of each input: what a tensor says, if there is one, or runs of `size`.

    Raises:
        CheckpointError: the tensor has another shape, or numbers that are not those of groups.
    """
    runs = np.arange(size_in) // size
    if name not in tensors:
        return runs
    require_shape(module, name, tensors[name], (size_in,))
    found = read_raw(tensors[name])
    if not found.any():  # as some old files have it where inputs are not sorted by their importance
        return runs
    if found.min() < 0 or found.max() > runs[-1]:
        raise CheckpointError(f"{module}.{name} has groups {found.min()} to {found.max()}; there are {runs[-1] + 1}")
    return found
