"""A model as Orbax saves it: our parameter tree, beside the config and the tokenizer's files.

`python -m jaxpaged.convert` writes such a directory. Nothing has to be renamed, transposed or dequantized when it is
read, and each device reads only its own shard of every array. Orbax is imported where it is needed: that takes half
a second.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxpaged.core.errors import CheckpointError, first_line
from jaxpaged.loading.host_memory import HostArena, large_blocks_returned
from jaxpaged.loading.json_files import read_generation_config, read_json
from jaxpaged.loading.param_tree import KeyPath, insert, leaves, mismatch
from jaxpaged.models.param_layout import FusedAxis, put_sharded

FOLDER = "params"  # inside the model's directory
_CHUNK_BYTES = 4 * 2**20  # a shard is read in whole chunks


class OrbaxCheckpoint:
    """A directory that `save` has written.

    Attributes:
        path: the directory.
        config: config.json.
        generation_config: generation_config.json, empty without one.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation_config = read_generation_config(path)

    def load(
        self, stored: Mapping[Any, Any], wanted: Mapping[Any, Any], axes: Mapping[Any, Any], *,
        keep_in_place: bool = False, progress: bool = False,
    ) -> dict[Any, Any]:
        """Read all parameters; besides them the host holds no more than the largest one.

        Args:
            stored: shapes that the arrays should have, in the tree of the parameters.
            wanted: shape, dtype and sharding to restore each to; zeros fill up what is larger than stored.
            axes: of each on its devices. What has a fused axis is read as a whole first.
            keep_in_place: the one device is a CPU: put all in one arena, in huge pages.
            progress: show a bar.

        Raises:
            CheckpointError: the arrays are not those of the model; the text lists every one that differs.
        """
        targets, expected = dict(leaves(wanted)), dict(leaves(stored))
        self._check(expected)
        fused = {path: names for path, names in leaves(axes) if any(isinstance(name, FusedAxis) for name in names)}
        sizes = {path: math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for path, leaf in targets.items()}
        arena = HostArena(sum(sizes.values()), len(sizes)) if keep_in_place else None
        params: dict[Any, Any] = {}
        with large_blocks_returned(), tqdm(total=sum(sizes.values()), unit="B", unit_scale=True,
                                           desc="Loading weights", disable=not progress) as bar:
            for batch in _batches(sizes):
                found = self._restore({path: targets[path] for path in batch},
                                      {path: expected[path].shape for path in batch if arena or path in fused})
                for path in batch:
                    array = found.pop(path)
                    if arena is not None:
                        memory = arena.allocate(sizes[path]).view(array.dtype).reshape(array.shape)
                        memory[...] = array
                        array = jax.device_put(memory, targets[path].sharding)
                    elif path in fused:
                        array = put_sharded(array, targets[path], fused[path])
                    insert(params, path, jax.block_until_ready(array))
                    del array
                    bar.update(sizes[path])
        return params

    def _check(self, expected: dict[KeyPath, Any]) -> None:
        import orbax.checkpoint as ocp

        try:
            with ocp.PyTreeCheckpointer() as reader:
                tree = reader.metadata(self.path / FOLDER).item_metadata.tree
        except Exception as error:  # Orbax, TensorStore and the system share no base
            raise CheckpointError(f"cannot read {self.path / FOLDER}: {first_line(error)}") from error
        shapes = {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in leaves(tree)}
        wanted = {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in expected.items()}
        problems = [f"parameter {name} is missing" for name in sorted(wanted.keys() - shapes.keys())]
        problems += [f"array {name} is not used by the model" for name in sorted(shapes.keys() - wanted.keys())]
        problems += [f"array {name} has shape {list(shapes[name])}, the model's has {list(wanted[name])}"
                     for name in sorted(shapes.keys() & wanted.keys()) if shapes[name] != wanted[name]]
        if problems:
            raise mismatch(self.path, problems)

    def _restore(self, targets: dict[KeyPath, Any], on_host: dict[KeyPath, tuple[int, ...]]) -> dict[KeyPath, Any]:
        """Arrays on their devices; those of `on_host`, which have these shapes, in numpy."""
        import orbax.checkpoint as ocp

        item: dict[Any, Any] = {}
        how: dict[Any, Any] = {}
        for path, leaf in targets.items():
            name = tuple(map(str, path))
            insert(item, name, jax.ShapeDtypeStruct(on_host.get(path, leaf.shape), leaf.dtype))
            insert(how, name, ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype) if path in on_host else
                    ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=leaf.sharding, global_shape=leaf.shape,
                                         strict=False))
        try:
            with ocp.PyTreeCheckpointer() as reader:
                found = reader.restore(self.path / FOLDER, args=ocp.args.PyTreeRestore(
                    item=item, restore_args=how, partial_restore=True))
        except Exception as error:  # as above
            raise CheckpointError(f"cannot read {self.path / FOLDER}: {first_line(error)}; it may be damaged: convert "
                                  "the model again") from error
        arrays = dict(leaves(found))
        return {path: arrays[tuple(map(str, path))] for path in targets}


def is_orbax(path: Path) -> bool:
    """Whether a directory is one that `save` has written."""
    return (path / FOLDER / "_METADATA").exists()


def save(folder: Path, params: Mapping[Any, Any]) -> None:
    """Write parameters into `folder`, which must not hold any yet; the caller adds config and tokenizer."""
    import orbax.checkpoint as ocp

    args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), params)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    # Bytes copied at a time; by default Orbax copies everything first.
    handler = ocp.PyTreeCheckpointHandler(handler_impl=ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=largest + 1, use_compression=False))
    with large_blocks_returned(), ocp.Checkpointer(handler) as writer:
        writer.save((folder / FOLDER).absolute(), args=ocp.args.PyTreeSave(dict(params), save_args=args))


def _batches(sizes: dict[KeyPath, int]) -> Iterator[list[KeyPath]]:
    """All paths, in groups that are together no larger than the largest of them."""
    limit = max(sizes.values(), default=0)
    batch: list[KeyPath] = []
    size = 0
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        if size + sizes[path] > limit and batch:
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += sizes[path]
    if batch:
        yield batch
