"""A directory in Hugging Face layout as a checkpoint: config.json and safetensors files."""

import logging
from pathlib import Path, PurePosixPath

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.json_files import read_generation_config, read_json
from jaxpaged.loading.safetensors import SafetensorsFile

_log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_Source = tuple[SafetensorsFile, str]  # and the name there


class HfCheckpoint:
    """A directory with config.json and model.safetensors, or shards and their index. Its Python code is never run.

    Names are those of the whole model: a checkpoint of the bare decoder, without the prefix "model.", is read as if it
    had it. Where config.json ties the output head to the embedding, the files decide as they do in transformers: equal
    or absent, the head is left out; different, `config` is corrected to untied.

    Attributes:
        path: the directory.
        config: config.json.
        generation_config: generation_config.json, empty without one.

    Raises:
        CheckpointError: a file is missing or damaged; before any weight is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation_config = read_generation_config(path)
        self._sources = _with_prefix(_find_tensors(path))
        self._settle_head()

    def names(self) -> set[str]:
        """Tensor names in Hugging Face's spelling."""
        return set(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for linear layers.

        Raises:
            CheckpointError: it is stored in a dtype that is not supported.
        """
        file, stored = self._sources[name]
        file.dtype(stored)
        return file.shape(stored)

    def read_tensor(
        self, name: str, out: np.ndarray | None = None, part: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """Read a tensor, or a part, into `out` (any float dtype and strides), or a new array of the stored dtype."""
        file, stored = self._sources[name]
        if out is None:
            shape = file.shape(stored) if part is None else tuple(item.stop - item.start for item in part)
            out = np.empty(shape, file.dtype(stored))
        file.read_tensor(stored, out, part)
        return out

    def _settle_head(self) -> None:
        if self.config.get("tie_word_embeddings") is not True or _HEAD not in self._sources:
            return
        if _EMBEDDING not in self._sources:
            self._sources[_EMBEDDING] = self._sources.pop(_HEAD)
        elif np.array_equal(self.read_tensor(_EMBEDDING), self.read_tensor(_HEAD)):
            del self._sources[_HEAD]
        else:
            _log.warning("%s: config.json ties the output head to the embedding, but the files hold a different head; "
                         "it is used (set tie_word_embeddings to false to silence this)", self.path)
            self.config["tie_word_embeddings"] = False


def _find_tensors(folder: Path) -> dict[str, _Source]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        file = SafetensorsFile(single)
        return {name: (file, name) for name in file.names()}
    if not index.exists():
        raise CheckpointError(_missing_files_text(folder))
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(item, str) for item in shard_of.values()):
        raise CheckpointError(f"{index}: weight_map must be an object that maps tensor names to file names")
    sources: dict[str, _Source] = {}
    for shard in sorted(set(shard_of.values())):
        file = SafetensorsFile(_inside(folder, shard, index))
        sources |= {name: (file, name) for name in file.names() if shard_of.get(name, shard) == shard}
    missing = sorted(shard_of.keys() - sources.keys())
    if missing:
        raise CheckpointError(f"{index} places {missing[0]} in {shard_of[missing[0]]}, which does not hold it "
                              f"({len(missing)} such tensors)")
    return sources


def _inside(folder: Path, shard: str, index: Path) -> Path:
    relative = PurePosixPath(shard)
    if relative.is_absolute() or ".." in relative.parts or "\\" in shard or "\0" in shard:
        raise CheckpointError(f"{index} names {shard!r}, a file outside its directory")
    if not (folder / relative).is_file():
        raise CheckpointError(f"{index} names {shard}, which does not exist; download the checkpoint again")
    return folder / relative


def _with_prefix(sources: dict[str, _Source]) -> dict[str, _Source]:
    if _EMBEDDING.removeprefix("model.") not in sources:
        return sources
    return {name if name == _HEAD else f"model.{name}": item for name, item in sources.items()}


def _missing_files_text(folder: Path) -> str:
    def some(pattern: str) -> str | None:
        return next((item.name for item in sorted(folder.glob(pattern))), None)

    if some("*.safetensors"):
        return f"{folder} holds safetensors shards but not their index, model.safetensors.index.json"
    pickled = some("*.bin") or some("*.pt") or some("*.pth")
    if pickled:
        return (f"{folder} holds only PyTorch weights ({pickled}), which can run code when read; convert them to "
                "safetensors: load the model with transformers and call its save_pretrained(DIRECTORY)")
    return f"{folder} holds no weights: neither model.safetensors nor model.safetensors.index.json"
