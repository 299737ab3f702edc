"""Checkpoints with quantized weights, packed here as AutoAWQ, GPTQModel, compressed-tensors and DeepSeek publish them.

Weights are what the numbers stand for, in float64 and rounded once: nothing is read back with the product's readers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Numbers:
    """Weights [out, in] = scales * (q - zeros), with the group of each input."""

    q: np.ndarray  # [out, in]
    scales: np.ndarray  # [out, G]
    zeros: np.ndarray  # [out, G]
    groups: np.ndarray  # [in]

    @property
    def weights(self) -> np.ndarray:
        exact = (self.q.astype(np.float64) - self.zeros[:, self.groups]) * self.scales.astype(np.float64)[
            :, self.groups]
        return exact.astype(np.float32)


def random_numbers(
    rng: np.random.Generator, shape: tuple[int, int], size: int, *, bits: int = 4, dtype: Any = np.float16,
    symmetric: bool = False, shuffled: bool = False, least: int = 0,
) -> Numbers:
    """Numbers of weights as large as those of trained models.

    Args:
        size: inputs of a group; -1: all.
        least: the smallest zero point.
    """
    size_out, size_in = shape
    size = size_in if size == -1 else size
    groups = np.arange(size_in) // size
    if shuffled:
        np.random.default_rng(size_in).shuffle(groups)  # alike for all products of the same inputs
    count, most = size_in // size, (1 << bits) - 1
    middle = np.full((size_out, count), 1 << (bits - 1))
    zeros = middle if symmetric else rng.integers(least, most + 1, (size_out, count))
    q = rng.integers(0, most + 1, shape)
    scales = (rng.uniform(0.5, 2, (size_out, count)) * 4 / most * size_in**-0.5).astype(dtype)
    return Numbers(q, scales, zeros, groups)


def words(numbers: np.ndarray, bits: int, axis: int, order: Iterable[int] | None = None) -> np.ndarray:
    """int32 words of unsigned numbers along an axis, the first in the lowest bits; zeros fill the last one."""
    count = 32 // bits
    columns = np.moveaxis(np.asarray(numbers, np.int64), axis, 0)
    columns = np.concatenate([columns, np.zeros((-len(columns) % count, *columns.shape[1:]), np.int64)])
    found = np.zeros((len(columns) // count, *columns.shape[1:]), np.int64)
    for place, column in enumerate(order or range(count)):
        found |= columns[column::count] << (bits * place)
    return np.moveaxis(found, 0, axis).astype(np.uint32).view(np.int32)


def awq(numbers: Numbers) -> Tensors:
    """AutoAWQ, gemm: eight outputs in a word, first the even ones."""
    order = 0, 2, 4, 6, 1, 3, 5, 7
    return {"qweight": words(numbers.q.T, 4, 1, order), "qzeros": words(numbers.zeros.T, 4, 1, order),
            "scales": np.ascontiguousarray(numbers.scales.T)}


def gptq(numbers: Numbers, bits: int = 4, *, less_one: bool = True, with_groups: bool = True) -> Tensors:
    """GPTQ: inputs in a word; zero points less one, except in version 2."""
    found = {"qweight": words(numbers.q.T, bits, 0), "qzeros": words(numbers.zeros.T - less_one, bits, 1),
             "scales": np.ascontiguousarray(numbers.scales.T)}
    return found | ({"g_idx": numbers.groups.astype(np.int32)} if with_groups else {})


def packed(numbers: Numbers, bits: int = 4, *, zeros: bool = False, shuffled: bool = False) -> Tensors:
    """compressed-tensors, pack-quantized."""
    found = {"weight_packed": words(numbers.q, bits, 1), "weight_scale": numbers.scales,
             "weight_shape": np.array(numbers.q.shape, np.int64)}
    found |= {"weight_zero_point": words(numbers.zeros, bits, 0)} if zeros else {}
    return found | ({"weight_g_idx": numbers.groups.astype(np.int32)} if shuffled else {})


def int8(numbers: Numbers) -> Tensors:
    """compressed-tensors, int-quantized: signed, with a scale for each output."""
    return {"weight": (numbers.q - 128).astype(np.int8), "weight_scale": numbers.scales,
            "input_scale": np.ones(1, np.float32)}


@dataclass(frozen=True)
class Floats:
    """8-bit floats with a scale for each block."""

    q: np.ndarray  # [out, in]
    scales: np.ndarray  # of blocks
    block: tuple[int, int]

    @property
    def weights(self) -> np.ndarray:
        size_out, size_in = self.q.shape
        rows, columns = np.arange(size_out) // self.block[0], np.arange(size_in) // self.block[1]
        exact = self.q.astype(np.float64) * self.scales.astype(np.float64)[rows][:, columns]
        return exact.astype(np.float32)


def random_floats(
    rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], dtype: Any = np.float32,
) -> Floats:
    block = block[0] if block[0] > 0 else shape[0], block[1] if block[1] > 0 else shape[1]
    q = (rng.standard_normal(shape) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    count = [-(-size // each) for size, each in zip(shape, block, strict=True)]
    return Floats(q, (rng.uniform(0.5, 2, count) * shape[1] ** -0.5 / 100).astype(dtype), block)


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: what its config says, and the tensors of a product and the weights they stand for."""

    config: Mapping[str, Any]
    made: Callable[[np.random.Generator, tuple[int, int]], tuple[Tensors, np.ndarray]]
    file: str | None = None  # next to config.json, which says it instead


def _grouped(layout: Callable[[Numbers], Tensors], size: int, **how: Any) -> Any:
    def made(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        numbers = random_numbers(rng, shape, size, **how)
        return layout(numbers), numbers.weights

    return made


def _floats(block: tuple[int, int], name: str, dtype: Any = np.float32, flat: bool = False) -> Any:
    def made(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        floats = random_floats(rng, shape, block, dtype)
        scales = floats.scales.reshape(()) if flat else floats.scales
        return {"weight": floats.q, name: scales, "input_scale": np.ones((), np.float32)}, floats.weights

    return made


def _compressed(form: str, bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind} | more}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
KINDS: dict[str, Kind] = {
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
                 "modules_to_not_convert": None}, _grouped(awq, 32)),
    "awq, old": Kind({"zero_point": True, "q_group_size": -1, "w_bit": 4, "version": "GEMM"}, _grouped(awq, -1),
                     "quant_config.json"),
    "gptq": Kind(GPTQ, _grouped(gptq, 32, least=1)),
    "gptq, old": Kind({"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
                      _grouped(lambda numbers: gptq(numbers, with_groups=False), 32, symmetric=True),
                      "quantize_config.json"),
    "gptq v2": Kind(GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1},
                    _grouped(lambda numbers: gptq(numbers, less_one=False), -1)),
    "gptq in order": Kind(GPTQ | {"desc_act": True, "group_size": 16}, _grouped(gptq, 16, least=1, shuffled=True)),
    "gptq 8": Kind(GPTQ | {"bits": 8}, _grouped(lambda numbers: gptq(numbers, 8), 32, bits=8, least=1)),
    "packed": Kind(_compressed("pack-quantized", 4, strategy="group", group_size=32),
                   _grouped(packed, 32, symmetric=True, dtype=ml_dtypes.bfloat16)),
    "packed with zeros": Kind(_compressed("pack-quantized", 4, symmetric=False),
                              _grouped(lambda numbers: packed(numbers, zeros=True), 16)),
    "packed in order": Kind(_compressed("pack-quantized", 4, actorder="group", group_size=32),
                            _grouped(lambda numbers: packed(numbers, shuffled=True), 32, symmetric=True,
                                     shuffled=True)),
    "packed 8": Kind(_compressed("pack-quantized", 8), _grouped(lambda numbers: packed(numbers, 8), -1, bits=8,
                                                                 symmetric=True)),
    "int8": Kind(_compressed("int-quantized", 8, strategy="channel"),
                 _grouped(int8, -1, bits=8, symmetric=True, dtype=np.float32)),
    "float8": Kind(_compressed("float-quantized", 8, "float", strategy="channel"),
                   _floats((1, -1), "weight_scale", ml_dtypes.bfloat16)),
    "fp8 blocks": Kind({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 24]},
                       _floats((32, 24), "weight_scale_inv")),
    "fp8 square": Kind({"quant_method": "fp8", "weight_block_size": [32, 32]}, _floats((32, 32), "weight_scale_inv")),
    "fp8": Kind({"quant_method": "fp8", "activation_scheme": "static"}, _floats((-1, -1), "weight_scale", flat=True)),
}


def write_both(
    folder: Path, kind: Kind, config: Mapping[str, Any], weights: Mapping[str, np.ndarray], seed: int = 0,
    quantized: Callable[[str, np.ndarray], bool] = lambda name, tensor: ".layers." in name and tensor.ndim == 2,
    change: Callable[[Tensors], object] = lambda tensors: None,
) -> tuple[Path, Path]:
    """Write a model whose layers are quantized, and the same dequantized, in float32: two directories.

    Args:
        weights: those that are not quantized, and shapes of those that are.
        quantized: of a tensor's name and the tensor, whether it is.
        change: made to the tensors of the quantized model before they are written.
    """
    rng = np.random.default_rng(seed)
    plain, found = dict(weights), dict(weights)
    for name, tensor in weights.items():
        if quantized(name, tensor):
            tensors, plain[name] = kind.made(rng, tensor.shape)
            del found[name]
            found |= {f"{name.removesuffix('.weight')}.{last}": item for last, item in tensors.items()}
    change(found)
    said = {} if kind.file else {"quantization_config": kind.config}
    for where, tensors, more in (("quantized", found, said), ("plain", plain, {})):
        (folder / where).mkdir(parents=True)
        save_file({name: np.ascontiguousarray(item) for name, item in tensors.items()},
                  folder / where / "model.safetensors")
        (folder / where / "config.json").write_text(json.dumps({**config, **more}))
    if kind.file:
        (folder / "quantized" / kind.file).write_text(json.dumps(kind.config))
    return folder / "quantized", folder / "plain"
