"""Reads 4-bit checkpoints of AutoAWQ in its layout "gemm" (Lin et al., 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.loading.packed_numbers import (
    FLOATS,
    group_size,
    read_packed,
    read_raw,
    require,
    require_dtype,
    require_shape,
)
from jaxpaged.loading.quantized import Form, Scaling, named_by
from jaxpaged.loading.tensor_files import Source
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import PackedType, StoredType

# Where among the numbers of a word, from its lowest bits on, each of eight neighboring outputs is.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True, slots=True)
class AwqWeights:
    """Weights [out, in]: words [in, out / 8], their zero points [G, out / 8], scales [G, out]."""

    shape: tuple[int, int]
    group: int
    words: Source
    zeros: Source
    scales: Source
    batched: int = 1

    @property
    def form(self) -> Form:
        """See `QuantizedWeights`."""
        file, name = self.scales
        return Form("I4", np.arange(self.shape[1]) // self.group, file.raw_dtype(name), True)

    def values(self, part: Part) -> np.ndarray:
        """See `QuantizedWeights`."""
        return _numbers(self.words, part[1], part[0])

    def scaling(self, part: Part) -> Scaling:
        """See `QuantizedWeights`."""
        outputs, inputs = part
        rows = slice(inputs.start // self.group, -(-inputs.stop // self.group))
        return Scaling(read_raw(self.scales, (rows, outputs)).T, _numbers(self.zeros, rows, outputs),
                       np.arange(inputs.start, inputs.stop) // self.group - rows.start)


def _numbers(source: Source, rows: slice, outputs: slice) -> np.ndarray:
    """uint8 [out, rows], a part of a tensor of words [rows, out / 8]."""
    # Whole words: the outputs of one are not in order.
    whole = slice(outputs.start // 8 * 8, -(-outputs.stop // 8) * 8)
    found = read_packed(source, 4, 1, (rows, whole)).reshape(rows.stop - rows.start, -1, 8)
    return found[..., _PLACES].reshape(len(found), -1)[:, outputs.start - whole.start : outputs.stop - whole.start].T


class Awq:
    """AWQ, as `quantization_config` or quant_config.json describes it.

    Raises:
        UnsupportedModelError: another layout, or another number of bits.
    """

    parts = "qweight", "qzeros", "scales"
    unused = ()

    def __init__(self, table: Mapping[str, Any]) -> None:
        bits, version = table.get("bits", table.get("w_bit", 4)), str(table.get("version") or "gemm").lower()
        if bits != 4:
            raise UnsupportedModelError(f"quantization_config: awq with {bits} bits is not supported; only 4 are")
        if version != "gemm":
            raise UnsupportedModelError(f"quantization_config: the layout {version} of awq is not supported; only gemm "
                                        "is")
        self._group = table.get("group_size", table.get("q_group_size"))
        self._plain = table.get("modules_to_not_convert")

    def expected(self, module: str, dtype: str) -> StoredType:
        """See `Method`."""
        return dtype if named_by(self._plain, module) else PackedType("I4_F16", max(0, self._group or 0), True)

    def weights(self, module: str, tensors: Mapping[str, Source]) -> AwqWeights:
        """See `Method`."""
        require(module, tensors, self.parts)
        words, zeros, scales = (tensors[name] for name in self.parts)
        for name in ("qweight", "qzeros"):
            require_dtype(module, name, tensors[name], ("int32",))
        require_dtype(module, "scales", scales, FLOATS)
        size_in, columns = words[0].shape(words[1])
        count = zeros[0].shape(zeros[1])[0]
        require_shape(module, "qzeros", zeros, (count, columns))
        require_shape(module, "scales", scales, (count, 8 * columns))
        size = group_size(module, size_in, count, self._group)
        return AwqWeights((8 * columns, size_in), size, words, zeros, scales)
