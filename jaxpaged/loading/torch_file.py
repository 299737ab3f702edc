"""Reading a file of torch.save without unpickling it: nothing that the file holds is called, imported or constructed.

Such a file is a zip: data.pkl, a pickle of the names and shapes, and the numbers of each storage in an entry that is
not compressed, so that they are read through a memory map. The pickle is a program; `_Interpreter` knows the few
instructions that a dict of tensors needs and refuses the rest.
"""

import math
import mmap
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.host_memory import forget_pages
from jaxpaged.loading.stored_dtype import stored_dtype

_DTYPES = {"FloatStorage": np.dtype(np.float32), "HalfStorage": np.dtype(np.float16),
           "BFloat16Storage": np.dtype(ml_dtypes.bfloat16)}
# Known, so that a file may hold such tensors where the model does not need them.
_OTHER_STORAGES = ("DoubleStorage", "LongStorage", "IntStorage", "ShortStorage", "CharStorage", "ByteStorage",
                   "BoolStorage", "UntypedStorage")
_MAX_PICKLE_BYTES = 1 << 24  # some hundred bytes a tensor
_MAX_DIMS = 8
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# Elements copied at a time.
_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class _Storage:
    """Numbers of one type, `count` of them, in the entry data/`key`."""

    type: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A view of a storage; `offset` and `strides` in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """The tensors of one file.

    Attributes:
        path: the file.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or holds anything but a dict of tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with zipfile.ZipFile(path) as archive:
                self._entries = {item.filename: item for item in archive.infolist()}
                folder = self._folder()
                for name in (f"{folder}data.pkl", f"{folder}byteorder"):
                    if name in self._entries and self._entries[name].file_size > _MAX_PICKLE_BYTES:
                        self._fail(f"has more than {_MAX_PICKLE_BYTES} bytes in {name}")
                program = archive.read(f"{folder}data.pkl")
                order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in self._entries else b"little"
        except zipfile.BadZipFile:
            self._fail("is no zip file: it is damaged, or was written by a version of PyTorch before 1.6; "
                       "download it again, or save the model again with transformers' save_pretrained(DIRECTORY)")
        except (OSError, ValueError, RuntimeError, NotImplementedError, EOFError, struct.error) as error:
            raise CheckpointError(f"cannot read {path}: {error}; download it again") from error
        if order != b"little":
            self._fail("is big-endian")
        self._tensors = _Interpreter(path).run(program)
        self._start: dict[str, int] = {}
        for name, tensor in self._tensors.items():
            self._check(name, tensor, folder)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor; CheckpointError if it is not supported."""
        return stored_dtype(self.path, name, self._tensors[name].storage.type, _DTYPES)

    def raw_dtype(self, name: str) -> np.dtype:
        """The same: quantized weights are read from safetensors alone."""
        return self.dtype(name)

    def read_tensor(self, name: str, out: np.ndarray, part: tuple[slice, ...] | None = None) -> None:
        """Copy a tensor, or a part of it, into `out`: its shape, any float dtype, any strides."""
        tensor, dtype = self._tensors[name], self.dtype(name)
        part = part or tuple(slice(0, size) for size in tensor.shape)
        assert out.shape == tuple(item.stop - item.start for item in part), (name, out.shape, part)
        if not out.size:
            return
        start, size = self._start[tensor.storage.key], tensor.storage.count * dtype.itemsize
        numbers = np.frombuffer(self._map, dtype, tensor.storage.count, start)[tensor.offset:]
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        stored = np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides, writeable=False)[part]
        # Values too large for `out` become infinite: the sampler reports them, not a warning.
        with np.errstate(all="ignore"):
            if not stored.ndim:
                out[...] = stored
                return
            step = max(1, _BATCH // max(1, math.prod(stored.shape[1:])))
            for first in range(0, len(out), step):
                out[first:first + step] = stored[first:first + step]
                # Copied, the pages would count as this process's memory. Another thread reads its own again.
                forget_pages(self._map, start, size)

    def _folder(self) -> str:
        """What the names of all entries begin with."""
        found = [name.removesuffix("data.pkl") for name in self._entries if name.endswith("/data.pkl")]
        if len(found) != 1:
            self._fail("holds no data.pkl, so it is no file of torch.save")
        return found[0]

    def _check(self, name: str, tensor: _Tensor, folder: str) -> None:
        """Find where the tensor's numbers begin; all of them must lie inside their storage, and that in the file."""
        storage = tensor.storage
        if storage.type not in _DTYPES:
            return  # `dtype` refuses it
        entry = self._entries.get(f"{folder}data/{storage.key}")
        if entry is None:
            self._fail(f"lacks the numbers of tensor {name}")
        last = tensor.offset + sum((size - 1) * stride
                                   for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        if 0 not in tensor.shape and last >= storage.count:
            self._fail(f"has a tensor {name} that reaches beyond its storage")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            self._fail("has compressed or encrypted entries; save the model again with torch.save")
        if entry.file_size != storage.count * _DTYPES[storage.type].itemsize:
            self._fail(f"has a storage of tensor {name} of {entry.file_size} bytes, not {storage.count} numbers")
        if storage.key not in self._start:
            self._start[storage.key] = self._data_start(entry)

    def _data_start(self, entry: zipfile.ZipInfo) -> int:
        header = self._map[entry.header_offset:entry.header_offset + _LOCAL_HEADER.size]
        if len(header) != _LOCAL_HEADER.size or header[:4] != b"PK\3\4":
            self._fail(f"has no entry where its directory says that {entry.filename} is")
        name_size, extra_size = _LOCAL_HEADER.unpack(header)[-2:]
        start = entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size
        if start + entry.file_size > len(self._map):
            self._fail("is truncated; download it again")
        return start

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} {what}")


@dataclass(frozen=True, slots=True)
class _Name:
    """A function or class that the pickle names; none is imported."""

    text: str


_MARK = object()


class _Interpreter:
    """Runs the pickle of a dict of tensors, on a stack of plain values.

    Dicts and lists are the only containers that grow, each by what the program itself spells out; a call is one of
    three that are known here by name. So the work and the memory are bounded by the size of the program.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> dict[str, _Tensor]:
        """The tensors by name; what else the dict holds is left out."""
        try:
            for operation, argument, _ in pickletools.genops(program):
                self._step(operation.name, argument)
            [found] = self._stack
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged program leads to: too few values, another type
            raise CheckpointError(f"{self._path} has a damaged data.pkl ({type(error).__name__})") from None
        if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
            found = found["state_dict"]
        if not isinstance(found, dict):
            raise CheckpointError(f"{self._path} holds no dict of tensors")
        return {name: item for name, item in found.items() if isinstance(name, str) and isinstance(item, _Tensor)}

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case ("BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT"):
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "MARK":
                stack.append(_MARK)
            case "TUPLE":
                stack.append(tuple(self._after_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(name[-1]):] = [tuple(stack[-int(name[-1]):])]
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(_Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, attribute = stack.pop(-2), stack.pop()
                stack.append(_Name(f"{module}.{attribute}"))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._call(function, arguments))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set(stack[-1], [key, value])
            case "SETITEMS":
                self._set(stack[-2 - self._depth()], self._after_mark())
            case "APPEND" | "APPENDS":
                items = [stack.pop()] if name == "APPEND" else self._after_mark()
                list.extend(stack[-1], items)
            case "BUILD":  # the attributes of a state dict: versions of modules
                stack.pop()
            case _:
                self._refuse(f"the instruction {name}")

    def _depth(self) -> int:
        """The number of values above the topmost mark."""
        return next(depth for depth, item in enumerate(reversed(self._stack)) if item is _MARK)

    def _after_mark(self) -> list[Any]:
        depth = self._depth()
        items = self._stack[len(self._stack) - depth:]
        del self._stack[len(self._stack) - depth - 1:]
        return items

    def _set(self, target: Any, items: list[Any]) -> None:
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int)):
                self._refuse(f"a key of the type {type(key).__name__}")
            target[key] = value

    def _storage(self, pid: Any) -> _Storage:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Name) or not isinstance(key, str) or not _is_count(count):
            raise TypeError
        type_name = storage.text.removeprefix("torch.").removeprefix("storage.")
        if type_name not in (*_DTYPES, *_OTHER_STORAGES):
            self._refuse(repr(storage.text[:64]))
        return _Storage(type_name, key, count)

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise TypeError
        match function.text:
            case "collections.OrderedDict" if not arguments:
                return {}
            case "torch._utils._rebuild_parameter":
                if not isinstance(arguments[0], _Tensor):
                    raise TypeError
                return arguments[0]
            case "torch._utils._rebuild_tensor_v2":
                return _tensor(*arguments[:4])
        return self._refuse(repr(function.text[:64]))

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} holds {what}, which a file of plain weights does not need; it is "
                              "not read, since it could run code. Save the weights alone, as safetensors")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or not _is_count(offset) or len(shape) != len(strides):
        raise TypeError
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) > _MAX_DIMS:
        raise TypeError
    if not all(map(_is_count, (*shape, *strides))):
        raise TypeError
    return _Tensor(storage, offset, shape, strides)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
