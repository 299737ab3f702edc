"""Reading a GGUF file: a checked header, and memory-mapped tensors dequantized in batches of rows.

Layout, little-endian: magic, version, two counts, key/value pairs, tensor infos, padding, tensor data. No number in the
header is trusted: each is checked against the size of the file before anything of that size is allocated.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.host_memory import forget_pages

# GGML type number -> name, elements in a block, bytes of a block. Q5_0 and Q5_1 are in the list because quantizers put
# them where a row is not a multiple of the 256 that Q4_K and Q5_K need.
_TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 21: ("IQ3_S", 256, 110),
    18: ("IQ3_XXS", 256, 98), 22: ("IQ2_S", 256, 82), 17: ("IQ2_XS", 256, 74), 16: ("IQ2_XXS", 256, 66),
    29: ("IQ1_M", 256, 56), 19: ("IQ1_S", 256, 50), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
TENSOR_TYPES = tuple(name for name, _, _ in _TENSOR_TYPES.values())  # by name
# GGUF value type number -> struct code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Real headers are tens of MB at most; their arrays (tokens, scores, types, merges) hold two million items or so.
_MAX_HEADER_BYTES = 1 << 28
_MAX_ENTRIES = 1 << 16
_MAX_ARRAY_ITEMS = 1 << 22
_MAX_DIMS = 4
# Elements dequantized at a time: temporaries stay in the cache (measured best on two threads).
_BATCH = 1 << 18


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of a tensor: `shape` slowest axis first (as in numpy), `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        """The storage type as the format spells it, such as Q4_1."""
        return _TENSOR_TYPES[self.type][0]


class GgufFile:
    """An open GGUF file. The mapping is released with the object.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str, or a list of one of these.
        tensors: name -> where it lies.

    Raises:
        CheckpointError: the file cannot be read, is damaged or inconsistent.
        UnsupportedModelError: a tensor is stored in a type that cannot be dequantized here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CheckpointError(f"{path} is empty; download or convert it again") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        header = _Header(path, self._map)
        self.metadata, self.tensors = header.parse()

    def read_tensor(self, name: str, out: np.ndarray, part: tuple[slice, ...] | None = None) -> None:
        """Dequantize a tensor, or a part of its first and last axes, into `out`, a few rows at a time.

        Args:
            out: float array of any strides whose elements, in C order of its axes, are the part's in file order.
            part: from start to stop on each axis; of a row, the blocks that it touches are dequantized.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        _, block, size = _TENSOR_TYPES[tensor.type]
        kind = GGMLQuantizationType(tensor.type)
        part = part or tuple(slice(0, length) for length in tensor.shape)
        assert out.size == math.prod(item.stop - item.start for item in part), (name, out.shape, part)
        assert all((item.start, item.stop) == (0, length)
                   for item, length in zip(part[1:-1], tensor.shape[1:-1], strict=True)), (name, part)
        if not out.size:
            return
        if len(part) == 1:
            out = out[np.newaxis]
        columns = part[-1]
        left, right = columns.start // block, -(-columns.stop // block)
        wanted = slice(columns.start - left * block, columns.stop - left * block)
        width = columns.stop - columns.start
        row = tensor.shape[-1] // block * size
        first = part[0].start * math.prod(tensor.shape[1:-1]) if len(part) > 1 else 0
        data = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset).reshape(-1, row)
        data = data[first:, left * size : right * size]
        # One index of `out` is whole rows of the file.
        rows = math.prod(out.shape[1:]) // width
        step = max(1, _BATCH // (rows * width))
        # Damaged scales may be infinite: the sampler reports such weights, not a warning.
        with np.errstate(all="ignore"):
            for start in range(0, len(out), step):
                batch = out[start:start + step]
                stored = data[start * rows : (start + len(batch)) * rows]
                # As one flat row: the package then makes one pass instead of one per 16 rows.
                values = dequantize(stored.reshape(1, -1), kind).reshape(len(stored), -1)
                batch[...] = values[:, wanted].reshape(batch.shape)
                forget_pages(self._map, tensor.offset + (first + start * rows) * row, len(stored) * row)


    def blocks(self, name: str) -> np.ndarray:
        """The blocks of a tensor as stored: uint8 [rows, blocks of a row, bytes of a block], in the mapped file."""
        tensor = self.tensors[name]
        _, block, size = _TENSOR_TYPES[tensor.type]
        data = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(-1, tensor.shape[-1] // block, size)

    def forget(self, name: str) -> None:
        """Let go of the pages of a tensor that has been read."""
        forget_pages(self._map, self.tensors[name].offset, self.tensors[name].nbytes)


class _Header:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._items_left = _MAX_ARRAY_ITEMS

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return the metadata and the tensors."""
        if len(self._data) < 24 or self._data[:4] != b"GGUF":
            self._fail("is not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version and not version & 0xFFFF:
            self._fail("is a big-endian GGUF; convert it to little-endian")
        if version not in (2, 3):
            self._fail(f"has GGUF version {version}; only 2 and 3 are supported")
        tensor_count, pair_count = self._scalar("Q"), self._scalar("Q")
        self._check_count(pair_count, 13, _MAX_ENTRIES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if not key or key in metadata:
                self._fail(f"has the metadata key {_short(key)} twice" if key else "has a metadata key without a name")
            metadata[key] = self._value(self._scalar("I"), key)
        self._check_count(tensor_count, 32, _MAX_ENTRIES, "tensors")
        return metadata, self._tensors(tensor_count, metadata)

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail("has a general.alignment that is not a power of two")
        relative: dict[str, GgufTensor] = {}
        for _ in range(count):
            tensor = self._tensor_info(alignment)
            if tensor.name in relative:
                self._fail(f"has the tensor {_short(tensor.name)} twice")
            relative[tensor.name] = tensor
        start = -(-self._at // alignment) * alignment
        tensors = {name: GgufTensor(name, item.shape, item.type, start + item.offset, item.nbytes)
                   for name, item in relative.items()}
        end, before = start, ""
        for tensor in sorted(tensors.values(), key=lambda item: item.offset):
            if tensor.offset < end:
                self._fail(f"has the tensors {_short(before)} and {_short(tensor.name)} overlapping")
            end, before = tensor.offset + tensor.nbytes, tensor.name
            if end > len(self._data):
                self._fail(f"is truncated: tensor {_short(before)} ends at byte {end} of {len(self._data)}; "
                           "download it again")
        return tensors

    def _tensor_info(self, alignment: int) -> GgufTensor:
        name = self._string()
        if not name:
            self._fail("has a tensor without a name")
        dims = self._scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            self._fail(f"says that tensor {_short(name)} has {dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in _TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{self._path}: tensor {_short(name)} is stored as {_type_name(kind)}, which is not supported; "
                f"supported are {', '.join(item[0] for item in _TENSOR_TYPES.values())}")
        type_name, block, size = _TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % block:
            self._fail(f"gives tensor {_short(name)} the shape {shape}, impossible for {type_name}")
        if offset % alignment:
            self._fail(f"puts tensor {_short(name)} at offset {offset}, not a multiple of {alignment}")
        return GgufTensor(name, shape, kind, offset, math.prod(shape) // block * size)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            self._fail(f"has metadata {_short(key)} of the unknown type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item != _STRING and item not in _SCALARS:
            self._fail(f"has metadata {_short(key)}, a list of the unknown or nested type {item}")
        code = _SCALARS.get(item, "Q")
        size = struct.calcsize(f"<{code}")
        self._check_count(count, size, self._items_left, f"items in {_short(key)}")
        self._items_left -= count
        if item == _STRING:
            return self._strings(count)
        return list(struct.unpack_from(f"<{count}{code}", self._data, self._advance(count * size)))

    def _scalar(self, code: str) -> Any:
        code = f"<{code}"
        return struct.unpack_from(code, self._data, self._advance(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # Tokenizers have a hundred thousand strings: hence the local names and the inlined check.
        data, at, end, length_at = self._data, self._at, self._end, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    self._fail_short()
                strings.append(data[start:at].decode())
        except struct.error:
            self._fail_short()
        except UnicodeDecodeError:
            self._fail(f"has a string that is not UTF-8 before byte {at}")
        self._at = at
        return strings

    def _advance(self, size: int) -> int:
        start = self._at
        if size > self._end - start:
            self._fail_short()
        self._at = start + size
        return start

    def _check_count(self, count: int, min_size: int, max_count: int, what: str) -> None:
        if count * min_size > self._end - self._at:
            self._fail(f"claims {count} {what}, more than it has room for; download or convert it again")
        if count > max_count:
            self._fail(f"has {count} {what}; at most {max_count} are supported")

    def _fail_short(self) -> NoReturn:
        if self._end < len(self._data):
            self._fail(f"has a header of more than {self._end} bytes")
        self._fail("ends inside its header, or a length in the header is wrong; download or convert it again")

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} {what}")


def _short(name: str) -> str:
    return name if len(name) <= 64 and name.isprintable() else f"{name[:64]!r}"


def _type_name(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return f"{GGMLQuantizationType(kind).name} (type {kind})"
    except ValueError:
        return f"the unknown type {kind}"
