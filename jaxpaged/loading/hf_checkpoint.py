"""A directory in Hugging Face layout as a checkpoint: config.json and files of weights."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.json_files import read_generation_config, read_json
from jaxpaged.loading.mxfp4 import Mxfp4
from jaxpaged.loading.packing import packed_type, read_packed
from jaxpaged.loading.quantization_config import find_method
from jaxpaged.loading.quantized import QuantizedFile, as_plain
from jaxpaged.loading.tensor_files import Source, find_tensors
from jaxpaged.models.config_checks import QUANTIZATION_KEYS
from jaxpaged.models.hf_config import named_dtype
from jaxpaged.models.quantization import PackedType, StoredType
from jaxpaged.models.registry import ModelFamily, find_family
from jaxpaged.models.rope_tables import merge_overrides
from jaxpaged.models.text_part import is_multimodal, text_tensors
from jaxpaged.models.weight_rules import as_is, tensor_of

_log = logging.getLogger(__name__)


class HfCheckpoint:
    """A directory with config.json and weights, in safetensors or PyTorch files. Its Python code is never run.

    Names are those of the whole model: a checkpoint of the bare decoder, without its prefix, such as "model.", is
    read as if it had it. Where config.json ties the output head to the embedding, the files decide as they do in
    transformers: equal or absent, the head is left out; different, `config` is corrected to untied. A decoder without
    a head, such as LlamaModel, is tied. Where config.json names no dtype, `config` gets the embedding's. Of a
    multimodal model it is the text model alone.

    Args:
        overrides: values in place of those of config.json.

    Attributes:
        path: the directory.
        config: config.json, or its text_config, with the overrides; without what it says of quantization.
        quantization: the method by which weights are quantized, as config files name it; None: they are plain.
        generation_config: generation_config.json, empty without one.

    Raises:
        CheckpointError: a file is missing or damaged; before any weight is read.
        UnsupportedModelError: no family serves this model, or nothing reads how the weights are quantized.
    """

    def __init__(self, path: Path, overrides: dict[str, Any] | None = None) -> None:
        self.path = path
        found = read_json(path / "config.json")
        self.config = merge_overrides(found, overrides or {})
        # Before the files: of a model that is not supported, these are bound to look damaged.
        family = find_family(self.config)
        self._embedding, self._head = (tensor_of(family.weights, path) for path in ("embed.table", "head.kernel"))
        self._tied = self.config.get("tie_word_embeddings", family.defaults["tie_word_embeddings"])
        method = find_method(path, self.config)
        self.generation_config = read_generation_config(path)
        tensors = find_tensors(path)
        self.quantization = method[0] if method else None
        if method:
            _check_linear(family)
            tensors = (method[1].as_plain(tensors, path) if isinstance(method[1], Mxfp4) else
                       as_plain(tensors, method[1], path))
        self.config = {key: value for key, value in self.config.items() if key not in QUANTIZATION_KEYS}
        self._sources = _with_prefix(text_tensors(tensors) if is_multimodal(found) else tensors, self._embedding,
                                     self._head)
        self._settle_head()
        self._settle_dtype()

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

    def stored_type(self, name: str) -> StoredType:
        """The type that a tensor is stored in; empty without the tensor, or if the type is not supported."""
        if name not in self._sources:
            return ""
        file, stored = self._sources[name]
        if isinstance(file, QuantizedFile) and (kind := packed_type(file.weights[stored])):
            return kind
        try:
            return file.dtype(stored).name
        except CheckpointError:
            return ""

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

    def read_packed(
        self, name: str, kind: PackedType, leaf: str, rows: np.ndarray, columns: slice, out: np.ndarray
    ) -> None:
        """See `Checkpoint.read_packed`."""
        file, stored = self._sources[name]
        assert isinstance(file, QuantizedFile), name
        read_packed(file.weights[stored], name, kind, leaf, rows, columns, out)

    def _settle_head(self) -> None:
        if self._head not in self._sources and str((self.config.get("architectures") or [""])[0]).endswith("Model"):
            if self._tied is not True:
                _log.warning("%s holds no output head: it is of use for embeddings, and text that it generates means "
                             "nothing", self.path)
            self.config["tie_word_embeddings"] = True
        if self._tied is not True or self._head not in self._sources:
            return
        if self._embedding not in self._sources:
            self._sources[self._embedding] = self._sources.pop(self._head)
        elif np.array_equal(self.read_tensor(self._embedding), self.read_tensor(self._head)):
            del self._sources[self._head]
        else:
            _log.warning("%s: config.json ties the output head to the embedding, but the files hold a different head; "
                         "it is used (set tie_word_embeddings to false to silence this)", self.path)
            self.config["tie_word_embeddings"] = False

    def _settle_dtype(self) -> None:
        if named_dtype(self.config) is None and self._embedding in self._sources:
            file, stored = self._sources[self._embedding]
            self.config["dtype"] = file.dtype(stored).name


def reads_quantized(family: ModelFamily) -> bool:
    """Whether quantized weights of a family can be read: they are [out, in], so plain ones have to be as well."""
    return not any(rule.is_product and rule.path.endswith(".kernel") and rule.transform is as_is
                   for rule in family.weights)


def _check_linear(family: ModelFamily) -> None:
    if not reads_quantized(family):
        raise UnsupportedModelError(f"quantized weights of {family.defaults['architectures'][0]} are not supported; "
                                    "take a checkpoint without quantization or a GGUF file")


def _with_prefix(sources: dict[str, Source], embedding: str, head: str) -> dict[str, Source]:
    prefix, _, bare = embedding.partition(".")
    if bare not in sources:
        return sources
    return {name if name == head else f"{prefix}.{name}": item for name, item in sources.items()}
