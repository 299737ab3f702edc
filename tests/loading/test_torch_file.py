"""Checkpoints in PyTorch's files, against torch.load; nothing in such a file runs, whatever it holds."""

import io
import json
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.torch_file import TorchFile
from tests.support.tiny_gguf import CONFIG, random_weights

torch = pytest.importorskip("torch", reason="torch is there on Python 3.11 only")


def state_dict() -> dict[str, Any]:
    """Tensors of every kind that a checkpoint may hold."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(10, 12, generator=generator)
    return {
        "float": torch.randn(3, 4, generator=generator), "half": torch.randn(5, 6, generator=generator).half(),
        "bfloat": torch.randn(7, generator=generator).bfloat16(), "turned": whole.T, "slice": whole[2:7, 3:9:2],
        "shared": whole, "expanded": torch.randn(1, 3, generator=generator).expand(4, 3), "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 5), "parameter": torch.nn.Parameter(torch.randn(4, generator=generator)),
        "large": torch.randn(3, 500, 1000, generator=generator), "cube": torch.randn(6, 5, 4, generator=generator),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "pytorch_model.bin"
    torch.save(state_dict() | {"ids": torch.arange(4), "step": 3, "note": "text"}, path)
    return path


def numbers(tensor: Any) -> np.ndarray:
    return tensor.detach().float().numpy()


def test_every_tensor_is_that_of_torch(saved: Path) -> None:
    file, reference = TorchFile(saved), torch.load(saved, weights_only=True)
    assert file.names() == {name for name, item in reference.items() if isinstance(item, torch.Tensor)}
    for name in state_dict():
        expected = numbers(reference[name])
        assert file.shape(name) == expected.shape
        assert file.dtype(name).name == str(reference[name].dtype).removeprefix("torch.")
        found = np.empty(expected.shape, np.float32)
        file.read_tensor(name, found)
        np.testing.assert_array_equal(found, expected)
        turned = np.empty(expected.T.shape, np.float32)
        file.read_tensor(name, turned.T)
        np.testing.assert_array_equal(turned.T, expected)


def test_parts_of_tensors(saved: Path) -> None:
    file, reference = TorchFile(saved), torch.load(saved, weights_only=True)

    @settings(max_examples=60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(state_dict())))
        part = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
                     for size in file.shape(name))
        expected = numbers(reference[name])[part]
        found = np.empty(expected.shape, np.float32)
        file.read_tensor(name, found, part)
        np.testing.assert_array_equal(found, expected)

    check()


@pytest.mark.parametrize("wrap", [dict, OrderedDict, lambda items: {"state_dict": items}], ids=["dict", "order", "in"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_dicts_as_they_are_saved(wrap: Any, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    torch.save(wrap({"w": torch.ones(3)}), path, pickle_protocol=protocol)
    assert TorchFile(path).names() == {"w"}
    torch.save(torch.nn.Linear(3, 4).state_dict(), path, pickle_protocol=protocol)  # with its attribute _metadata
    assert TorchFile(path).names() == {"weight", "bias"}


def test_other_dtypes_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor ids is stored as LongStorage"):
        TorchFile(saved).dtype("ids")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_equals_transformers(sharded: bool, dtype: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = {name: torch.from_numpy(tensor).to(getattr(torch, dtype))
               for name, tensor in random_weights(CONFIG).items()}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if sharded:
        shard_of = {name: f"pytorch_model-{index % 3 + 1:05}-of-00003.bin" for index, name in enumerate(weights)}
        for shard in set(shard_of.values()):
            torch.save({name: weights[name] for name in weights if shard_of[name] == shard}, tmp_path / shard)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    else:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == set(reference)
    for name, tensor in reference.items():
        np.testing.assert_array_equal(checkpoint.read_tensor(name).astype(np.float32), tensor.numpy())
    if sharded:  # the same without the index, and with a shard missing
        (tmp_path / "pytorch_model.bin.index.json").unlink()
        assert open_checkpoint(tmp_path).names() == set(reference)
        (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
        with pytest.raises(CheckpointError, match=r"2 shards .* of 3 and no index"):
            open_checkpoint(tmp_path)


def test_reading_holds_no_tensor(tmp_path: Path) -> None:
    """Not even one whose elements lie in another order, and neither as this process's memory."""
    path = tmp_path / "a.bin"
    torch.save({"w": torch.ones(4096, 4096)}, path)
    file, out = TorchFile(path), np.empty((4096, 4096), np.float32)
    out[...] = 0

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

    before = resident()
    tracemalloc.start()
    file.read_tensor("w", out.T)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (out == 1).all()
    assert peak < 1 << 20 and resident() - before < 32 << 20


# Files that hold more than tensors, or less.


def write_zip(path: Path, program: bytes, entries: dict[str, bytes] | None = None, how: int = zipfile.ZIP_STORED,
              ) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in {"archive/data.pkl": program, **(entries or {})}.items():
            archive.writestr(name, data)
    return path


class Runs:
    """What unpickling would call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def nested_tuples() -> bytes:
    """Thirty tuples, each twice the one before, as the key of a dict: hashing it takes a billion steps."""
    return b"\x80\x02}" + b"N\x85" + b"q\x00h\x00\x86" * 30 + b"Ns."


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_nothing_runs(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    harmful: list[Any] = [
        Runs(os.system, f"touch {marker}"), Runs(open, str(marker), "w"), Runs(eval, f"open({str(marker)!r}, 'w')"),
        {"w": Runs(Path.touch, marker)}, OrderedDict(w=Runs(os.mkdir, str(marker))),
        [Runs(pickle.loads, pickle.dumps(Runs(os.mkdir, str(marker))))]]
    for item in harmful:
        path = write_zip(tmp_path / "a.bin", pickle.dumps(item, protocol))
        with pytest.raises(CheckpointError, match=r"could run code|damaged data\.pkl"):
            TorchFile(path)
        assert not marker.exists()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match="could run code"):
        TorchFile(tmp_path / "b.bin")


def persistent(storage: str = "FloatStorage", key: str = "0", count: int = 4) -> bytes:
    """The program of a storage."""
    return (b"((X\x07\x00\x00\x00storage" + f"ctorch\n{storage}\n".encode() + b"X" + struct.pack("<I", len(key))
            + key.encode() + b"X\x03\x00\x00\x00cpu" + b"\x8a\x08" + struct.pack("<q", count) + b"tQ")


def tensor(offset: int = 0, shape: tuple[int, ...] = (2, 2), strides: tuple[int, ...] = (2, 1), **more: Any) -> bytes:
    """A whole file's program, with one tensor w."""
    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    return (b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n" + persistent(**more) + b"\x8a\x08"
            + struct.pack("<q", offset) + numbers(shape) + numbers(strides) + b"\x89NtRs.")


FLOATS = np.arange(4, dtype=np.float32).tobytes()
DAMAGED: dict[str, tuple[bytes, dict[str, bytes], str]] = {
    "no numbers": (tensor(), {}, "lacks the numbers of tensor w"),
    "too few numbers": (tensor(), {"archive/data/0": FLOATS[:12]}, "of 12 bytes, not 4 numbers"),
    "beyond the storage": (tensor(shape=(2, 3)), {"archive/data/0": FLOATS}, "beyond its storage"),
    "an offset": (tensor(offset=1), {"archive/data/0": FLOATS}, "beyond its storage"),
    "a negative offset": (tensor(offset=-1), {"archive/data/0": FLOATS}, "damaged data.pkl"),
    "a negative stride": (tensor(strides=(-2, 1)), {"archive/data/0": FLOATS}, "damaged data.pkl"),
    "a negative size": (tensor(shape=(-2, 2)), {"archive/data/0": FLOATS}, "damaged data.pkl"),
    "a huge size": (tensor(shape=(2**61, 2**61)), {"archive/data/0": FLOATS}, "beyond its storage"),
    "more strides": (tensor(strides=(2, 1, 1)), {"archive/data/0": FLOATS}, "damaged data.pkl"),
    "nine axes": (tensor(shape=(1,) * 9, strides=(1,) * 9), {"archive/data/0": FLOATS}, "damaged data.pkl"),
    "another storage": (tensor(storage="ComplexFloatStorage"), {"archive/data/0": FLOATS}, "ComplexFloatStorage"),
    "another folder": (tensor(key="../0"), {"archive/data/0": FLOATS}, "lacks the numbers"),
    "big-endian": (tensor(), {"archive/data/0": FLOATS, "archive/byteorder": b"big"}, "is big-endian"),
    "no dict": (b"\x80\x02].", {}, "no dict of tensors"),
    "nothing": (b"", {}, "damaged data.pkl"),
    "not a pickle": (b"\xff\xff\xff", {}, "damaged data.pkl"),
    "an empty stack": (b"\x80\x02R.", {}, "damaged data.pkl"),
    "a missing memo": (b"\x80\x02h\x07.", {}, "damaged data.pkl"),
    "no mark": (b"\x80\x02}u.", {}, "damaged data.pkl"),
    "nested tuples": (nested_tuples(), {}, "a key of the type tuple"),
    "two programs": (b"\x80\x02}.", {"other/data.pkl": b"\x80\x02}."}, "no file of torch.save"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_clear_error(case: str, tmp_path: Path) -> None:
    program, entries, text = DAMAGED[case]
    path = write_zip(tmp_path / "a.bin", program, entries)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=text) as caught:
        TorchFile(path)
    assert str(path) in str(caught.value) and time.process_time() - began < 1


def test_the_hand_made_file_is_a_good_one(tmp_path: Path) -> None:
    """So that what the cases above find is the damage alone."""
    path = write_zip(tmp_path / "a.bin", tensor(), {"archive/data/0": FLOATS, "archive/version": b"3"})
    found = np.empty((2, 2), np.float32)
    TorchFile(path).read_tensor("w", found)
    np.testing.assert_array_equal(found, [[0, 1], [2, 3]])
    np.testing.assert_array_equal(torch.load(path, weights_only=True)["w"].numpy(), found)


def test_files_that_are_no_such_zip(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    for data, text in ((old, "before 1.6"), (b"\x80\x04.", "before 1.6"), (b"", "cannot read")):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=text):
            TorchFile(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        TorchFile(tmp_path)
    write_zip(path, tensor(), {"archive/data/0": FLOATS}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        TorchFile(path)
    write_zip(path, b"\x80\x02" + b"0" * (1 << 25), {}, zipfile.ZIP_DEFLATED)  # 32 MiB in as many KiB
    with pytest.raises(CheckpointError, match="more than 16777216 bytes"):
        TorchFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_do_worse_than_an_error(data: st.DataObject, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.ones(3, 4), "b": torch.ones(5).half()}, stream)
    damaged = bytearray(stream.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.bin"
    path.write_bytes(damaged[:data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))])
    try:
        file = TorchFile(path)
        for name in file.names():
            if 0 < np.prod(file.shape(name), dtype=object) < 10**6:
                file.read_tensor(name, np.empty(file.shape(name), np.float32))
    except CheckpointError:
        pass
