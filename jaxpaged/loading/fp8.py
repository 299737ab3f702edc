"""Reads checkpoints of 8-bit floats with a scale for each tensor, output or block, as DeepSeek-V3 and Qwen3-FP8."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.quantized import named_by
from jaxpaged.loading.scaled import FLOAT8, ScaledWeights, scaled_weights
from jaxpaged.loading.tensor_files import Source
from jaxpaged.models.quantization import PackedType, StoredType


class Fp8:
    """fp8, as `quantization_config` describes it. Activations stay in their own dtype, whatever it says of them.

    Raises:
        UnsupportedModelError: `weight_block_size` is not two positive integers.
    """

    parts = "weight", "weight_scale", "weight_scale_inv"
    unused = "input_scale", "activation_scale", "k_scale", "v_scale", "kv_scale"

    def __init__(self, table: Mapping[str, Any]) -> None:
        block = table.get("weight_block_size")
        if block is not None and not (isinstance(block, list | tuple) and len(block) == 2 and
                                      all(isinstance(size, int) and size > 0 for size in block)):
            raise UnsupportedModelError(f"quantization_config: weight_block_size must be two positive integers, not "
                                        f"{block!r:.64}")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        self._plain = [*(table.get("ignored_layers") or ()), *(table.get("modules_to_not_convert") or ())]

    def expected(self, module: str, dtype: str) -> StoredType:
        """See `Method`."""
        return dtype if named_by(self._plain, module) else PackedType("F8_F32", self._block[1] if self._block else 0)

    def weights(self, module: str, tensors: Mapping[str, Source]) -> ScaledWeights | None:
        """See `Method`."""
        scales = [name for name in self.parts[1:] if name in tensors]
        file, name = tensors.get("weight", (None, ""))
        if not scales and (file is None or file.raw_dtype(name).name not in FLOAT8):
            return None
        if len(scales) != 1:
            raise CheckpointError(f"{module}: weight is stored in 8-bit floats "
                                  f"{'with two kinds of scales' if scales else 'without scales'}, not with one of "
                                  f"{' and '.join(self.parts[1:])}")
        return scaled_weights(module, tensors, FLOAT8, scales[0], self._block)
