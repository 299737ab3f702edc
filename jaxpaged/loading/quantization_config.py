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
from jaxpaged.models.quantization import StoredType

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
    return None if table is None else _method(table, folder)


def expected_type(config: dict[str, Any], dtype: str) -> Callable[[str], StoredType]:
    """Says of a tensor in which type it will be stored, where a config.json is all there is.

    Args:
        dtype: the model's.

    Raises:
        UnsupportedModelError: the method, or what it is told, is not supported.
    """
    table = quantization_table(config)
    method = None if table is None else _method(table, Path("config.json"))[1]
    if method is None or isinstance(method, Mxfp4):
        return lambda name: dtype

    def expected(name: str) -> StoredType:
        module = name.removesuffix(".weight")
        return method.expected(module, dtype) if is_quantizable(name) else dtype

    return expected


def is_quantizable(name: str) -> bool:
    """Whether methods quantize a tensor of this name: those of a layer's products, but not its router's."""
    return ".layers." in name and not name.endswith((".gate.weight", ".router.weight"))


def _method(table: Any, where: Path) -> tuple[str, Method | Mxfp4]:
    name = quantization_name(table)
    try:
        return name, _METHODS[name](table)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{where}: quantization_config does not describe {name}: {error}") from error
