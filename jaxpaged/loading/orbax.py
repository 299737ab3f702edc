"""A model as Orbax saves it: our parameters under their own names, beside the config and the tokenizer's files.

`python -m jaxpaged.convert` writes such a directory. Nothing has to be renamed, transposed or dequantized when it is
read. The parts of a fused parameter are arrays of their own, so that each device reads only its shard of every one.

Orbax writes the arrays; TensorStore, which Orbax is built on, reads them, any part of them into memory that is there
already. Both are imported where they are needed: that takes half a second.
"""

import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.core.errors import CheckpointError, first_line
from jaxpaged.loading.host_memory import large_blocks_returned
from jaxpaged.loading.json_files import read_generation_config, read_json
from jaxpaged.loading.param_tree import leaves
from jaxpaged.models.param_layout import Part
from jaxpaged.models.quantization import PackedType
from jaxpaged.models.weight_rules import WeightRule, as_is

FOLDER = "params"  # inside the model's directory
_CHUNK_BYTES = 4 * 2**20  # a shard is read in whole chunks


class OrbaxCheckpoint:
    """A directory that `save` has written; a `Checkpoint`, of the tensors that `saved_rules` name.

    Attributes:
        path: the directory.
        config: config.json.
        generation_config: generation_config.json, empty without one.
        quantization: None; what is saved is plain.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation_config = read_generation_config(path)
        self.quantization: str | None = None
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()

    def names(self) -> set[str]:
        """Of all arrays."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._shapes[name]

    def read_packed(
        self, name: str, kind: PackedType, leaf: str, rows: np.ndarray, columns: slice, out: np.ndarray
    ) -> None:
        """Never called: nothing is packed."""
        raise AssertionError(name)

    def stored_type(self, name: str) -> str:
        """The dtype that an array is stored in; empty without it."""
        return str(self._store(name).dtype.numpy_dtype.name) if name in self._shapes else ""

    def read_tensor(self, name: str, out: np.ndarray | None = None, part: Part | None = None) -> np.ndarray:
        """See `Checkpoint`; of a part, the chunks that it touches are read."""
        import tensorstore

        part = part or tuple(slice(0, size) for size in self.shape(name))
        try:
            array = self._store(name)[part]
            if out is None:
                out = np.empty(array.shape, array.dtype.numpy_dtype)
            view = tensorstore.array(out, copy=False, write=True)
            view.write(tensorstore.cast(array, view.dtype)[tensorstore.d[:].translate_to[0]]).result()
        except Exception as error:  # TensorStore and the system share no base
            raise CheckpointError(f"cannot read {name} in {self.path / FOLDER}: {first_line(error)}") from error
        return out

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        import orbax.checkpoint as ocp

        try:
            with ocp.PyTreeCheckpointer() as reader:
                tree = reader.metadata(self.path / FOLDER).item_metadata.tree
        except Exception as error:  # as above
            raise CheckpointError(f"cannot read {self.path / FOLDER}: {first_line(error)}") from error
        return {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in leaves(tree)}

    def _store(self, name: str) -> Any:
        import tensorstore

        with self._lock:
            if name not in self._stores:
                where = {"driver": "ocdbt", "base": (self.path / FOLDER).absolute().as_uri(), "path": name}
                self._stores[name] = tensorstore.open({"driver": "zarr", "kvstore": where}, open=True).result()
            return self._stores[name]


def saved_rules(rules: Sequence[WeightRule]) -> tuple[WeightRule, ...]:
    """The weight table of a model that `save` has written, by that of the checkpoint it came from."""
    return tuple(WeightRule(tuple(part.path for part in rule.parts) if len(rule.parts) > 1 else rule.path, rule.path,
                            as_is, rule.axes, wide=rule.wide) for rule in rules)


def is_orbax(path: Path) -> bool:
    """Whether a directory is one that `save` has written."""
    return (path / FOLDER / "_METADATA").exists()


def save(folder: Path, params: Mapping[Any, Any]) -> None:
    """Write parameters into `folder`, which must not hold any yet; the caller adds config and tokenizer.

    Args:
        params: of the weight table's `parts`.
    """
    import orbax.checkpoint as ocp

    args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), params)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    # Bytes copied at a time; by default Orbax copies everything first.
    handler = ocp.PyTreeCheckpointHandler(handler_impl=ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=largest + 1, use_compression=False))
    with large_blocks_returned(), ocp.Checkpointer(handler) as writer:
        writer.save((folder / FOLDER).absolute(), args=ocp.args.PyTreeSave(dict(params), save_args=args))
