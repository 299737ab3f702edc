"""A GGUF model in one file or in several, NAME-00001-of-00003.gguf and so on, as llama-gguf-split writes them."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.gguf import GgufFile, GgufTensor

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_MAX_PARTS = 1 << 10


class SplitGguf:
    """All parts of a model, read as if they were one file; `path` may name any of them.

    Attributes:
        path: the first part.
        metadata: the first part's, which has all of it.
        tensors: name -> where it lies in its part.

    Raises:
        CheckpointError, UnsupportedModelError: see `GgufFile`; a part is missing, or belongs to another model.
    """

    def __init__(self, path: Path) -> None:
        first = GgufFile(path)
        count = _number(first, "split.count", 0)
        if count > 1 and _number(first, "split.no", 0):
            first = GgufFile(_part(path, 0, count))
        self.path, self.metadata = first.path, first.metadata
        parts = [first] + [GgufFile(_part(path, number, count)) for number in range(1, count)]
        self._part_of: dict[str, GgufFile] = {}
        for number, part in enumerate(parts):
            if count > 1 and (_number(part, "split.no", -1), _number(part, "split.count", -1)) != (number, count):
                raise CheckpointError(f"{part.path} is not part {number + 1} of {count} by its split.no and "
                                      "split.count")
            twice = sorted(self._part_of.keys() & part.tensors.keys())
            if twice:
                raise CheckpointError(f"{part.path} and {self._part_of[twice[0]].path.name} both hold the tensor "
                                      f"{twice[0][:64]}")
            self._part_of |= dict.fromkeys(part.tensors, part)
        self.tensors: dict[str, GgufTensor] = {name: part.tensors[name] for name, part in self._part_of.items()}
        wanted = _number(first, "split.tensors.count", len(self.tensors)) if count > 1 else len(self.tensors)
        if len(self.tensors) != wanted:
            raise CheckpointError(f"{self.path} and its other parts hold {len(self.tensors)} tensors, not {wanted}")

    def read_tensor(self, name: str, out: np.ndarray, part: tuple[slice, ...] | None = None) -> None:
        """See `GgufFile.read_tensor`."""
        self._part_of[name].read_tensor(name, out, part)

    def blocks(self, name: str) -> np.ndarray:
        """See `GgufFile.blocks`."""
        return self._part_of[name].blocks(name)

    def forget(self, name: str) -> None:
        """See `GgufFile.forget`."""
        self._part_of[name].forget(name)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a model, of whose parts `path` may name any."""
    file = GgufFile(path)
    count = _number(file, "split.count", 0)
    return GgufFile(_part(path, 0, count)).metadata if count > 1 and _number(file, "split.no", 0) else file.metadata


def _number(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or (key == "split.count" and value > _MAX_PARTS):
        raise CheckpointError(f"{file.path}: metadata {key} is {value!r:.64}, which is no possible number of parts")
    return value


def _part(path: Path, number: int, count: int) -> Path:
    name = _PART.fullmatch(path.stem)
    if name is None or int(name[3]) != count:
        raise CheckpointError(f"{path} is one of {count} parts of a model; give them the names that llama-gguf-split "
                              f"gave them, NAME-00001-of-{count:05}.gguf, or join them: llama-gguf-split --merge")
    found = path.with_name(f"{name[1]}-{number + 1:05}-of-{count:05}.gguf")
    if not found.exists():
        raise CheckpointError(f"{found} does not exist; the model has {count} parts, which must be in one directory")
    return found
