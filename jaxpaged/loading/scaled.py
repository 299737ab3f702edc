"""Weights of 8 bits, integers or floats, that lie as the plain ones would, with scales beside them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.packed_numbers import FLOATS, read_raw, require, require_dtype, require_shape
from jaxpaged.loading.quantized import Form, Scaling
from jaxpaged.loading.tensor_files import Source
from jaxpaged.models.param_layout import Part

FLOAT8 = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """Weights [out, in] with a scale, and maybe a zero point, for each block of outputs and inputs.

    Attributes:
        block: outputs and inputs of a block.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    weight: Source
    scales: Source
    zeros: Source | None = None
    batched: int = 0

    @property
    def form(self) -> Form:
        """See `QuantizedWeights`."""
        values, scales = (file.raw_dtype(name) for file, name in (self.weight, self.scales))
        return Form({"int8": "I8", "float8_e4m3fn": "F8"}.get(values.name),
                    np.arange(self.shape[1]) // self.block[1], scales, self.zeros is not None)

    def values(self, part: Part) -> np.ndarray:
        """See `QuantizedWeights`."""
        return read_raw(self.weight, part)

    def scaling(self, part: Part) -> Scaling:
        """See `QuantizedWeights`."""
        (rows, row), (columns, column) = (_blocks(item, size) for item, size in zip(part, self.block, strict=True))

        def numbers(source: Source) -> np.ndarray:
            whole = read_raw(source)
            blocks = whole.reshape([-(-size // each) for size, each in zip(self.shape, self.block, strict=True)])
            return blocks[rows, columns][row]

        return Scaling(numbers(self.scales), None if self.zeros is None else numbers(self.zeros), column)


def _blocks(item: slice, size: int) -> tuple[slice, np.ndarray]:
    """The blocks that a part of an axis needs, and the one of each of its numbers among these."""
    first = item.start // size
    return slice(first, -(-item.stop // size)), np.arange(item.start, item.stop) // size - first


def scaled_weights(
    module: str, tensors: Mapping[str, Source], dtypes: tuple[str, ...], scale: str,
    block: tuple[int, int] | None = None,
) -> ScaledWeights:
    """Weights whose scales are one for all, one for each output, for each group of inputs, or for each block.

    Args:
        dtypes: that the weights may have.
        scale: the name of the scales.
        block: outputs and inputs of a block, where the config says so.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    require(module, tensors, ("weight", scale))
    weight, scales, zeros = tensors["weight"], tensors[scale], tensors.get("weight_zero_point")
    require_dtype(module, "weight", weight, dtypes)
    require_dtype(module, scale, scales, FLOATS)
    if zeros is not None:
        require_dtype(module, "weight_zero_point", zeros, ("int8",))
    shape = weight[0].shape(weight[1])
    if len(shape) != 2:
        raise CheckpointError(f"{module}.weight has shape {list(shape)}; of quantized weights two axes are supported")
    size_out, size_in = shape
    found = scales[0].shape(scales[1])
    if block is not None:
        wanted = -(-size_out // block[0]), -(-size_in // block[1])
        if found != wanted:
            raise CheckpointError(f"{module}.{scale} has shape {list(found)}; {list(wanted)} blocks of {list(block)} "
                                  f"make weights {list(shape)}")
    elif found in ((), (1,), (1, 1)) and (size_out, 1) != found:
        block = size_out, size_in
    elif found in ((size_out,), (size_out, 1)):
        block = 1, size_in
    elif len(found) == 2 and found[0] == size_out and found[1] and size_in % found[1] == 0:
        block = 1, size_in // found[1]
    else:
        raise CheckpointError(f"{module}.{scale} has shape {list(found)}, which does not fit weights {list(shape)}: "
                              "neither one scale, nor one for each output or for whole groups of inputs")
    if zeros is not None:
        require_shape(module, "weight_zero_point", zeros, found)
    return ScaledWeights((size_out, size_in), block, weight, scales, zeros)
