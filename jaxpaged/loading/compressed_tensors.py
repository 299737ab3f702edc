"""Reads checkpoints in the layouts of compressed-tensors: packed integers, 8-bit integers, 8-bit floats."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.gptq import input_groups
from jaxpaged.loading.packed_numbers import (
    FLOATS,
    group_size,
    read_packed,
    read_raw,
    require,
    require_dtype,
    require_shape,
)
from jaxpaged.loading.quantized import Form, QuantizedWeights, Scaling
from jaxpaged.loading.scaled import FLOAT8, scaled_weights
from jaxpaged.loading.tensor_files import Source
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import PackedType, StoredType

_FORMATS = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights [out, in]: words [out, in * bits / 32] of numbers plus 2^(bits - 1), scales [out, G].

    Attributes:
        groups: [in], the group of each input.
        zeros: words [out * bits / 32, G], of zero points that are shifted alike, or [out, G] of plain ones.
    """

    shape: tuple[int, int]
    bits: int
    groups: np.ndarray
    words: Source
    scales: Source
    zeros: Source | None
    batched: int = 0

    @property
    def form(self) -> Form:
        """See `QuantizedWeights`."""
        file, name = self.scales
        return Form(f"I{self.bits}", self.groups, file.raw_dtype(name), self.zeros is not None)

    def values(self, part: Part) -> np.ndarray:
        """See `QuantizedWeights`."""
        found = read_packed(self.words, self.bits, 1, (part[0], part[1]))
        return found if self.zeros else (found.astype(np.int16) - (1 << (self.bits - 1))).astype(np.int8)

    def scaling(self, part: Part) -> Scaling:
        """See `QuantizedWeights`."""
        outputs, inputs = part
        needed, groups = np.unique(self.groups[inputs], return_inverse=True)
        columns = slice(int(needed[0]), int(needed[-1]) + 1)
        needed = needed - columns.start
        scales = read_raw(self.scales, (outputs, columns))[:, needed]
        if self.zeros is None:
            return Scaling(scales, None, groups)
        if self.zeros[0].raw_dtype(self.zeros[1]) == np.int32:
            zeros = read_packed(self.zeros, self.bits, 0, (outputs, columns))[:, needed]
        else:
            shifted = read_raw(self.zeros, (outputs, columns)).astype(np.int16)[:, needed] + (1 << (self.bits - 1))
            zeros = shifted.astype(np.uint8)
        return Scaling(scales, zeros, groups)


class CompressedTensors:
    """compressed-tensors, as `quantization_config` describes it. Activations stay in their own dtype.

    The tensors say how each module is quantized.

    Raises:
        UnsupportedModelError: a format that is not supported.
    """

    parts = "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
    unused = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale",
              "v_scale", "q_scale")

    def __init__(self, table: Mapping[str, Any]) -> None:
        groups = table.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        for found in (table.get("format"), *(group.get("format") for group in groups if isinstance(group, dict))):
            if found is not None and found not in _FORMATS:
                raise UnsupportedModelError(f"quantization_config: the format {found!r:.64} of compressed-tensors is "
                                            f"not supported; {', '.join(_FORMATS)} are")
        for key in ("sparsity_config", "transform_config"):
            found = table.get(key)
            if found and not (isinstance(found, dict) and found.get("format", "dense") == "dense"
                              and not found.get("config_groups")):
                raise UnsupportedModelError(f"quantization_config: {key} of compressed-tensors is not supported")
        self._weights = [dict(group.get("weights") or {}) for group in groups if isinstance(group, dict)]
        self._plain = list(table.get("ignore") or ())

    def expected(self, module: str, dtype: str) -> StoredType:
        """See `Method`: all as the first group says."""
        plain = any(re.match(name[3:], module) if str(name).startswith("re:") else name == module
                    for name in self._plain)
        if plain or not self._weights:
            return dtype
        found = self._weights[0]
        block = found.get("block_structure") or (0, found.get("group_size") or 0)
        scale = {"float16": "F16", "bfloat16": "BF16"}.get(dtype, "F32")
        kind = "F8" if found.get("type") == "float" else f"I{found.get('num_bits', 4)}"
        group = max(0, int(block[1]))
        return PackedType(f"{kind}_{scale}", group, not found.get("symmetric", True) and kind != "F8",
                          "own" if found.get("actorder") in ("group", "dynamic") and group else "")

    def weights(self, module: str, tensors: Mapping[str, Source]) -> QuantizedWeights | None:
        """See `Method`."""
        if "weight_packed" in tensors:
            return self._packed(module, tensors)
        if tensors.keys() == {"weight"}:
            file, name = tensors["weight"]
            if file.raw_dtype(name).name not in (*FLOAT8, "int8"):
                return None
        blocks = {tuple(found) for weights in self._weights if (found := weights.get("block_structure"))}
        if len(blocks) > 1:
            raise CheckpointError(f"{module}: blocks of several sizes are not supported")
        return scaled_weights(module, tensors, (*FLOAT8, "int8"), "weight_scale", blocks.pop() if blocks else None)

    def _packed(self, module: str, tensors: Mapping[str, Source]) -> PackedWeights:
        require(module, tensors, ("weight_packed", "weight_scale", "weight_shape"))
        words, scales, zeros = (tensors.get(name) for name in ("weight_packed", "weight_scale", "weight_zero_point"))
        assert words and scales
        require_dtype(module, "weight_packed", words, ("int32",))
        require_dtype(module, "weight_scale", scales, FLOATS)
        require_shape(module, "weight_shape", tensors["weight_shape"], (2,))
        size_out, size_in = map(int, read_raw(tensors["weight_shape"]))
        found = words[0].shape(words[1])
        bits = next((bits for bits in (4, 8) if found == (size_out, -(-size_in * bits // 32))), None)
        if bits is None:
            raise CheckpointError(f"{module}.weight_packed has shape {list(found)}, which is not that of weights "
                                  f"{[size_out, size_in]} of 4 or 8 bits")
        columns = scales[0].shape(scales[1])[-1]
        require_shape(module, "weight_scale", scales, (size_out, columns))
        size = group_size(module, size_in, columns, None)
        if zeros is not None:
            require_dtype(module, "weight_zero_point", zeros, ("int32", "int8"))
            packed = zeros[0].raw_dtype(zeros[1]) == np.int32
            require_shape(module, "weight_zero_point", zeros,
                          (-(-size_out * bits // 32) if packed else size_out, columns))
        return PackedWeights((size_out, size_in), bits,
                             input_groups(module, "weight_g_idx", tensors, size_in, size), words, scales, zeros)
