"""Quantized weights as they stay in memory, where their groups are such that native products can read them."""

import hashlib

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading import panels
from jaxpaged.loading.quantized import QuantizedWeights
from jaxpaged.models.quantization import BLOCK, PANEL, PackedType

_BATCH = 1 << 19  # numbers that are reordered at a time
_SCALES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def packed_type(weights: QuantizedWeights) -> PackedType | None:
    """The type in which weights may stay packed; None if there is none."""
    form = weights.form
    sizes = np.bincount(form.groups)
    size = int(sizes[0])
    if form.kind is None or weights.shape[0] % PANEL or (sizes != size).any() or size % BLOCK:
        return None
    in_runs = np.array_equal(form.groups, np.arange(len(form.groups)) // size)
    order = "" if in_runs else hashlib.sha256(form.groups.tobytes()).hexdigest()
    return PackedType(f"{form.kind}_{_SCALES[form.scale_dtype.name]}", size, form.zeros, order)


def read_packed(
    weights: QuantizedWeights, name: str, kind: PackedType, leaf: str, rows: np.ndarray, columns: slice, out: np.ndarray
) -> None:
    """See `Checkpoint.read_packed`.

    Raises:
        CheckpointError: a weight is not a number.
    """
    size_in = weights.shape[1]
    order = np.argsort(weights.form.groups, kind="stable") if kind.order else np.arange(size_in)
    if leaf == "order":
        out[...] = order[columns]
        return
    step = max(PANEL, _BATCH // size_in // PANEL * PANEL)
    for start in range(0, len(rows), step):
        batch = rows[start : start + step]
        first, last = int(batch.min()), int(batch.max()) + 1
        to = out[start // PANEL : (start + len(batch)) // PANEL]
        if leaf == "q":
            inputs = slice(columns.start * kind.per_word, columns.stop * kind.per_word)
            part = slice(0, size_in) if kind.order else inputs
            codes = _codes(weights.values((slice(first, last), part)), kind, name)[batch - first]
            to[...] = panels.words(codes[:, order[inputs]] if kind.order else codes, 32 // kind.per_word)
        else:
            scaling = weights.scaling((slice(first, last), slice(0, size_in)))
            # A group's numbers are those of its first input.
            groups = scaling.groups[order[columns.start * kind.group : columns.stop * kind.group : kind.group]]
            found = scaling.scales if leaf == "d" else _unsigned(scaling.zeros, 32 // kind.per_word)
            to[...] = panels.columns(found[batch - first][:, groups])


def _codes(values: np.ndarray, kind: PackedType, name: str) -> np.ndarray:
    if not kind.name.startswith("F8"):
        return _unsigned(values, 32 // kind.per_word)
    codes = values.view(np.uint8)
    if ((codes & 127) == 127).any():
        raise CheckpointError(f"{name} has weights that are no numbers; download the checkpoint again")
    return codes


def _unsigned(numbers: np.ndarray | None, bits: int) -> np.ndarray:
    """Signed numbers plus half their range, others as they are."""
    assert numbers is not None
    if numbers.dtype != np.int8:
        return numbers
    return (numbers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
