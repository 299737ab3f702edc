"""One view of all checkpoint formats: a config and named tensors, as Hugging Face spells them."""

import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
from jaxpaged.loading.hf_checkpoint import HfCheckpoint
from jaxpaged.loading.json_files import read_json
from jaxpaged.loading.orbax import OrbaxCheckpoint, is_orbax
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import PackedType, StoredType
from jaxpaged.models.rope_tables import merge_overrides

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h)\.(\d+)\.")
_LAYER_COUNTS = "num_hidden_layers", "n_layer", "num_layers"


class Checkpoint(Protocol):
    """What a model is loaded from. `read_tensor` may be called from several threads.

    Attributes:
        quantization: the method by which its weights are quantized, as --quantization has it; None: they are plain.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    quantization: str | None

    def names(self) -> set[str]:
        """All tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as stored; CheckpointError if its dtype is not supported."""

    def stored_type(self, name: str) -> StoredType:
        """The type that a tensor is stored in; empty without the tensor."""

    def read_tensor(self, name: str, out: np.ndarray | None = None, part: Part | None = None) -> np.ndarray:
        """A tensor's values, or those of a part, written into `out` (same shape, any float dtype and strides) if given.

        Only the part is read where the format allows it.
        """

    def read_packed(
        self, name: str, kind: PackedType, leaf: str, rows: np.ndarray, columns: slice, out: np.ndarray
    ) -> None:
        """Fill `out` with a part of an array of `PackedType.shapes`, of a tensor [out, in] of a packed type.

        Args:
            kind: the tensor's type, maybe with smaller groups.
            leaf: the array's name.
            rows: the tensor's rows, a multiple of 16. An order has none.
            columns: the part of the array's second axis; of an order's only one.
        """


def open_model(path: Path, overrides: dict[str, Any] | None = None) -> Checkpoint:
    """Open a .gguf file or a directory, in Hugging Face layout or saved by Orbax; see `open_checkpoint`."""
    if not (path.is_dir() and is_orbax(path)):
        return open_checkpoint(path, overrides)
    checkpoint = OrbaxCheckpoint(path)
    checkpoint.config = merge_overrides(checkpoint.config, overrides or {})
    return checkpoint


def open_checkpoint(path: Path, overrides: dict[str, Any] | None = None) -> Checkpoint:
    """Open a .gguf file or a directory in Hugging Face layout; reads headers, no weights.

    Args:
        overrides: values in place of those of config.json.

    Raises:
        CheckpointError: missing or damaged files.
        UnsupportedModelError: a GGUF architecture or tensor type that is not supported.
    """
    checkpoint: Checkpoint
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not (path / "config.json").exists():
            raise CheckpointError(f"{path} has no config.json but holds GGUF files; name the one to load: {ggufs[0]}")
        checkpoint = HfCheckpoint(path, overrides)
    elif path.suffix == ".gguf":
        checkpoint = GgufCheckpoint(path)
        checkpoint.config = merge_overrides(checkpoint.config, overrides or {})
    else:
        raise CheckpointError(f"{path} is neither a directory nor a .gguf file")
    _check_layers(checkpoint)
    return checkpoint


def read_config(path: Path) -> dict[str, Any]:
    """The config of a model whose weights need not be there, from its config.json or .gguf file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return GgufCheckpoint(path).config if path.suffix == ".gguf" else read_json(path)


def checkpoint_without_weights(path: Path) -> Checkpoint | None:
    """A checkpoint whose weights need not be read: that of a .gguf file; None where its config is all there is."""
    return GgufCheckpoint(path) if path.suffix == ".gguf" else None


def _check_layers(checkpoint: Checkpoint) -> None:
    """Compare the config's layer count with the tensors before that many layers are built."""
    claimed = next((checkpoint.config[key] for key in _LAYER_COUNTS if key in checkpoint.config), None)
    present = len({match[1] for match in map(_LAYER.search, checkpoint.names()) if match})
    if isinstance(claimed, int) and claimed > present:
        raise CheckpointError(f"{checkpoint.path}: the config says {claimed} layers, the weights hold {present}; "
                              "the two do not belong together or files are missing")
