"""Finds the files of a directory that hold its weights, and which of them holds each tensor."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.json_files import read_json
from jaxpaged.loading.safetensors import SafetensorsFile
from jaxpaged.loading.torch_file import TorchFile

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


class TensorFile(Protocol):
    """A file of named tensors, in whatever format."""

    path: Path

    def names(self) -> set[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor of plain weights; CheckpointError if it is not supported."""

    def raw_dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor that may be a part of quantized weights; CheckpointError if it is not supported."""

    def read_tensor(self, name: str, out: np.ndarray, part: tuple[slice, ...] | None = None) -> None:
        """Read a tensor, or a part of it, into `out`: its shape, any float dtype, any strides."""


Source = tuple[TensorFile, str]  # and the name there


def find_tensors(folder: Path) -> dict[str, Source]:
    """Each tensor's file: one file or several, in safetensors or, where there are none of these, of PyTorch.

    Files that are not part of the checkpoint are left alone.

    Raises:
        CheckpointError: no weights, damaged or missing files, or an index that does not fit them.
    """
    kinds: tuple[tuple[str, str, Callable[[Path], TensorFile]], ...] = (
        ("model", ".safetensors", SafetensorsFile), ("pytorch_model", ".bin", TorchFile))
    for stem, suffix, opened in kinds:
        single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
        if single.exists():
            return _all_tensors([opened(single)])
        if index.exists():
            return _indexed_tensors(folder, index, opened)
        files = _files_without_index(folder, suffix)
        if files:
            return _all_tensors([opened(file) for file in files])
    raise CheckpointError(_missing_files_text(folder))


def _all_tensors(files: Sequence[TensorFile]) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for file in files:
        twice = sorted(sources.keys() & file.names())
        if twice:
            raise CheckpointError(f"{file.path} and {sources[twice[0]][0].path.name} both hold {twice[0]}, and no "
                                  "index says which is meant")
        sources |= {name: (file, name) for name in file.names()}
    return sources


def _indexed_tensors(folder: Path, index: Path, opened: Callable[[Path], TensorFile]) -> dict[str, Source]:
    """The tensors of all files that an index names, also those that it does not list."""
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(item, str) for item in shard_of.values()):
        raise CheckpointError(f"{index}: weight_map must be an object that maps tensor names to file names")
    files = {shard: opened(_inside(folder, shard, index)) for shard in sorted(set(shard_of.values()))}
    lost = sorted(name for name, shard in shard_of.items() if name not in files[shard].names())
    if lost:
        raise CheckpointError(f"{index} places {lost[0]} in {shard_of[lost[0]]}, which does not hold it "
                              f"({len(lost)} such tensors)")
    sources: dict[str, Source] = {}
    for shard, file in files.items():
        for name in sorted(file.names()):
            if name in shard_of:
                sources[name] = files[shard_of[name]], name
            elif name in sources:
                raise CheckpointError(f"{index} does not list {name}, which both {sources[name][0].path.name} and "
                                      f"{shard} hold")
            else:
                sources[name] = file, name
    return sources


def _inside(folder: Path, shard: str, index: Path) -> Path:
    relative = PurePosixPath(shard)
    if relative.is_absolute() or ".." in relative.parts or "\\" in shard or "\0" in shard:
        raise CheckpointError(f"{index} names {shard!r}, a file outside its directory")
    if not (folder / relative).is_file():
        raise CheckpointError(f"{index} names {shard}, which does not exist; download the checkpoint again")
    return folder / relative


def _files_without_index(folder: Path, suffix: str) -> list[Path]:
    """A complete set of numbered shards, or a single safetensors file by another name; empty: neither.

    Raises:
        CheckpointError: a shard is missing, or there are several sets.
    """
    files = sorted(file for file in folder.glob(f"*{suffix}") if not file.name.startswith("adapter_"))
    sets: dict[tuple[str, str], list[str]] = {}
    for file in files:
        if found := _SHARD.fullmatch(file.stem):
            sets.setdefault((found[1], found[3]), []).append(found[2])
    if not sets:
        return files if len(files) == 1 and suffix == ".safetensors" else []
    if len(sets) > 1:
        raise CheckpointError(f"{folder} holds several sets of {suffix} shards and no index that says which is meant")
    [((stem, total), numbers)] = sets.items()
    wanted = [f"{number:05}" for number in range(1, int(total) + 1)] if int(total) <= len(files) else []
    if numbers != wanted:
        raise CheckpointError(f"{folder} holds {len(numbers)} shards {stem}-?????-of-{total}{suffix} of {int(total)} "
                              "and no index; download the checkpoint again")
    return [folder / f"{stem}-{number}-of-{total}{suffix}" for number in wanted]


def _missing_files_text(folder: Path) -> str:
    def some(*patterns: str) -> str | None:
        return next((item.name for pattern in patterns for item in sorted(folder.glob(pattern))), None)

    if other := some("[!a]*.safetensors", "a[!d]*.safetensors"):
        return (f"{folder} holds several safetensors files ({other}), none of them model.safetensors or numbered, and "
                "no index, model.safetensors.index.json")
    if adapter := some("adapter_*.safetensors", "adapter_*.bin"):
        return f"{folder} holds an adapter ({adapter}) and not the model it belongs to"
    if other := some("*.bin", "*.pt", "*.pth"):
        return (f"{folder} holds no safetensors, and of PyTorch's files ({other}) none named pytorch_model.bin, with "
                "shards or an index; save the model again: load it with transformers and call its "
                "save_pretrained(DIRECTORY)")
    return f"{folder} holds no weights: neither model.safetensors nor model.safetensors.index.json"
