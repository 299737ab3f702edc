"""Which method a checkpoint's weights are quantized by: what config.json says, or a file next to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.loading.awq import Awq
from jaxpaged.loading.compressed_tensors import CompressedTensors
from jaxpaged.loading.fp8 import Fp8
from jaxpaged.loading.gptq import Gptq
from jaxpaged.loading.json_files import read_json
from jaxpaged.loading.mxfp4 import Mxfp4
from jaxpaged.loading.quantized import Method
from jaxpaged.models.config_checks import check_quantization, quantization_name, quantization_table

# Of AutoGPTQ, AutoAWQ and ModelOpt.
_FILES = "quantize_config.json", "quant_config.json", "hf_quant_config.json"
_METHODS: dict[str, Callable[[dict[str, Any]], Method | Mxfp4]] = {
    "awq": Awq, "gptq": Gptq, "compressed-tensors": CompressedTensors, "fp8": Fp8, "mxfp4": Mxfp4,
}


def find_method(folder: Path, config: dict[str, Any]) -> tuple[str, Method | Mxfp4] | None:
    """The method, and its name in config files; None where weights are plain.

    A config that says null says that they are, whatever lies next to it.

    Raises:
        UnsupportedModelError: the method, or what it is told, is not supported.
    """
    check_quantization(config)
    table: Any = quantization_table(config)
    if table is None and "quantization_config" not in config:
        for file in map(folder.joinpath, _FILES):
            if file.exists():
                table = read_json(file)
                check_quantization({file.name: table}, file.name, f"{file} says")
                break
    if table is None:
        return None
    name = quantization_name(table)
    try:
        return name, _METHODS[name](table)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{folder}: quantization_config does not describe {name}: {error}") from error
