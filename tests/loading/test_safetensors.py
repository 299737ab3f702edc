"""Directories in Hugging Face layout: what transformers and the safetensors package write, and damaged ones."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import open_checkpoint
from tests.support.tiny_gguf import CONFIG, random_weights

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write_directory(
    folder: Path, weights: dict[str, np.ndarray], config: dict[str, Any] = CONFIG, shards: int = 0,
) -> Path:
    """Write config.json and the weights, in one file or in `shards` with their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    shard_of = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(names)}
    for shard in set(shard_of.values()):
        save_file({name: weights[name] for name in names if shard_of[name] == shard}, folder / shard)
    write_index(folder, shard_of)
    return folder


def write_index(folder: Path, shard_of: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def raw_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard_size", ["10GB", "50KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("bare", [False, True], ids=["whole", "without prefix"])
def test_what_transformers_saves(dtype: str, shard_size: str, bare: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")})
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    (model.model if bare else model).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert bool(list(tmp_path.glob("*.index.json"))) == (shard_size == "50KB")
    reference = model.state_dict()
    if bare:
        del reference[HEAD]
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == set(reference)
    assert checkpoint.config["hidden_size"] == CONFIG["hidden_size"]
    for name, tensor in reference.items():
        found = checkpoint.read_tensor(name)
        assert found.shape == checkpoint.shape(name) == tuple(tensor.shape)
        assert found.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        np.testing.assert_array_equal(found.astype(np.float32), tensor.float().numpy())
        turned = np.empty(found.shape, np.float32, order="F")
        np.testing.assert_array_equal(checkpoint.read_tensor(name, turned), tensor.float().numpy())


def test_pieces_mixed_dtypes_and_empty_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = random_weights(CONFIG) | {
        "large": rng.standard_normal((3, 500, 1000), np.float32),  # more than one batch
        "long": rng.standard_normal(1_100_000, np.float32).astype(np.float16),
        "half": rng.standard_normal((7, 3), np.float32).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 5), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    checkpoint = open_checkpoint(write_directory(tmp_path, weights, shards=3))
    for name, tensor in weights.items():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), tensor)
        np.testing.assert_array_equal(checkpoint.read_tensor(name, np.empty(tensor.shape, np.float32)), tensor)
    with pytest.raises(CheckpointError, match="neither a directory nor"):
        open_checkpoint(tmp_path / "config.json")


def test_parts_of_tensors(tmp_path: Path) -> None:
    """Rows, columns and both, of matrices that are read in several batches."""
    rng = np.random.default_rng(1)
    weights = {"matrix": rng.standard_normal((700, 3001), np.float32),
               "half": rng.standard_normal((1500, 1001), np.float32).astype(ml_dtypes.bfloat16),
               "cube": rng.standard_normal((6, 5, 4), np.float32), "row": rng.standard_normal(9, np.float32)}
    checkpoint = open_checkpoint(write_directory(tmp_path, random_weights(CONFIG) | weights))

    @settings(max_examples=60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(weights)))
        part = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
                     for size in weights[name].shape)
        expected = weights[name][part]
        np.testing.assert_array_equal(checkpoint.read_tensor(name, part=part), expected)
        turned = np.zeros(expected.T.shape, np.float32)
        checkpoint.read_tensor(name, turned.T, part)
        np.testing.assert_array_equal(turned.T, expected.astype(np.float32))

    check()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_directory(tmp_path, random_weights(CONFIG)))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    name = max(random_weights(CONFIG))
    size = checkpoint.shape(name)
    for part in (None, (slice(0, size[0]), *(slice(0, count // 2) for count in size[1:]))):
        with pytest.raises(CheckpointError, match="truncated while it was read"):
            checkpoint.read_tensor(name, part=part)


def test_reading_holds_a_piece_not_a_tensor(tmp_path: Path) -> None:
    weights = random_weights(CONFIG) | {"large": np.ones((4096, 4096), np.float32)}
    checkpoint = open_checkpoint(write_directory(tmp_path, weights))
    out = np.empty((4096, 4096), np.float32)
    tracemalloc.start()
    checkpoint.read_tensor("large", out.T)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20 < out.nbytes
    assert (out == 1).all()


def test_an_unsupported_dtype_names_itself_and_the_tensor(tmp_path: Path) -> None:
    weights = random_weights(CONFIG) | {"model.norm.weight": np.zeros(64, np.int8)}
    checkpoint = open_checkpoint(write_directory(tmp_path, weights))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as I8"):
        checkpoint.shape("model.norm.weight")


def test_generation_config_and_custom_code(tmp_path: Path) -> None:
    """The directory's own Python is data to us: it never runs."""
    config = CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_custom.Model", "AutoConfig": "modeling_custom.C"}}
    write_directory(tmp_path, random_weights(CONFIG), config)
    (tmp_path / "modeling_custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    (tmp_path / "other.safetensors").write_bytes(b"not read")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.generation_config == {"temperature": 0.5, "eos_token_id": [1, 2]}
    assert checkpoint.names() == set(random_weights(CONFIG))
    assert not (tmp_path / "ran").exists()


# The output head, where config.json ties it to the embedding.

TIED = CONFIG | {"tie_word_embeddings": True}


@pytest.mark.parametrize("case", ["absent", "equal", "different", "only the head"])
def test_a_tied_head_is_settled_as_transformers_does(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    torch = pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import AutoModelForCausalLM

    weights = random_weights(TIED)
    if case != "absent":
        weights[HEAD] = weights[EMBEDDING] + (1 if case == "different" else 0)
    if case == "only the head":
        del weights[EMBEDDING]
    write_directory(tmp_path, weights, TIED)
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    caplog.clear()
    checkpoint = open_checkpoint(tmp_path)
    tied = checkpoint.config["tie_word_embeddings"]
    assert tied == torch.equal(reference[HEAD], reference[EMBEDDING])
    assert (HEAD in checkpoint.names()) != tied
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), reference[name].numpy())
    assert ("different head" in caplog.text) == (not tied)


def test_an_untied_head_stays(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    weights[HEAD] = weights[EMBEDDING].copy()
    assert HEAD in open_checkpoint(write_directory(tmp_path, weights)).names()


# Damage.


def test_config_json_is_missing_or_damaged(tmp_path: Path) -> None:
    write_directory(tmp_path, random_weights(CONFIG))
    config = tmp_path / "config.json"
    for content in (b"", b"{", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": NaN', b"3"):
        config.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json .*JSON"):
            open_checkpoint(tmp_path)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        open_checkpoint(tmp_path)


def test_more_layers_claimed_than_there_are(tmp_path: Path) -> None:
    write_directory(tmp_path, random_weights(CONFIG), CONFIG | {"num_hidden_layers": 10**9})
    with pytest.raises(CheckpointError, match="1000000000 layers, the weights hold 2"):
        open_checkpoint(tmp_path)


def test_directories_without_usable_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.pth").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"model\.pth.* none named pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"1 shards .* of 2 and no index"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"an adapter \(adapter_model\.safetensors\)"):
        open_checkpoint(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.Q4_0.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"name the one to load: .*model\.Q4_0\.gguf"):
        open_checkpoint(other)
    with pytest.raises(CheckpointError, match="neither a directory nor"):
        open_checkpoint(tmp_path / "nowhere")


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    write_directory(tmp_path, random_weights(CONFIG), shards=2)
    shard_of = read_index(tmp_path)
    first = "model-00001-of-00002.safetensors"
    outside = tmp_path.parent / "outside.safetensors"
    save_file({"secret": np.zeros(1, np.float32)}, outside)
    for changed, message in (
        (shard_of | {"model.more.weight": first}, r"places model\.more\.weight in model-00001-of-00002"),
        (shard_of | {"a": "model-3.safetensors"}, r"model-3\.safetensors, which does not exist"),
        (shard_of | {"secret": "../outside.safetensors"}, "outside its directory"),
        (shard_of | {"secret": str(outside)}, "outside its directory"),
        (shard_of | {"secret": "sub/../../outside.safetensors"}, "outside its directory"),
        (shard_of | {"a": "."}, "does not exist"),
        (shard_of | {"a": 3}, "weight_map must be"),
        ({}, "weight_map must be"),
        (None, "weight_map must be"),
    ):
        write_index(tmp_path, changed)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)
    write_index(tmp_path, shard_of)
    (tmp_path / first).unlink()
    with pytest.raises(CheckpointError, match=f"{first}, which does not exist"):
        open_checkpoint(tmp_path)


def test_files_without_an_index(tmp_path: Path) -> None:
    """One file by another name, or a complete set of shards; what else lies there is left alone."""
    weights = random_weights(CONFIG)
    one = write_directory(tmp_path / "one", weights)
    (one / "model.safetensors").rename(one / "weights.safetensors")
    (one / "adapter_model.safetensors").write_bytes(b"not read")
    several = write_directory(tmp_path / "several", weights, shards=3)
    (several / "model.safetensors.index.json").unlink()
    (several / "other.safetensors").write_bytes(b"not read")
    for folder in (one, several):
        checkpoint = open_checkpoint(folder)
        assert checkpoint.names() == set(weights)
        for name, tensor in weights.items():
            np.testing.assert_array_equal(checkpoint.read_tensor(name), tensor)
    (one / "more.safetensors").write_bytes(b"not read")
    with pytest.raises(CheckpointError, match="several safetensors files"):
        open_checkpoint(one)
    shard = several / "model-00002-of-00003.safetensors"
    held = shard.read_bytes()
    save_file(weights, shard)
    with pytest.raises(CheckpointError, match=r"both hold .*, and no index says"):
        open_checkpoint(several)
    shard.write_bytes(held)
    (several / "old-00001-of-00001.safetensors").write_bytes(b"not read")
    with pytest.raises(CheckpointError, match=r"several sets of \.safetensors shards"):
        open_checkpoint(several)


def test_a_decoder_without_a_head_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For embeddings; the same weights that claim a head are refused when they are loaded."""
    weights = random_weights(CONFIG)
    del weights[HEAD]
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    checkpoint = open_checkpoint(write_directory(tmp_path, bare, CONFIG | {"architectures": ["LlamaModel"]}))
    assert checkpoint.config["tie_word_embeddings"] is True and "no output head" in caplog.text
    assert checkpoint.names() == set(weights)
    assert open_checkpoint(write_directory(tmp_path, bare)).config["tie_word_embeddings"] is False


@pytest.mark.parametrize("given", [{}, {"dtype": "auto"}, {"torch_dtype": "auto"}, {"torch_dtype": None}], ids=str)
def test_the_dtype_is_the_weights_where_none_is_named(given: dict[str, Any], tmp_path: Path) -> None:
    weights = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in random_weights(CONFIG).items()}
    config = {key: value for key, value in CONFIG.items() if key != "dtype"} | given
    assert open_checkpoint(write_directory(tmp_path, weights, config)).config["dtype"] == "bfloat16"


def test_a_tensor_in_two_shards_comes_from_the_one_the_index_says(tmp_path: Path) -> None:
    write_directory(tmp_path, random_weights(CONFIG), shards=2)
    shard_of = read_index(tmp_path)
    for number in (1, 2):
        file = tmp_path / f"model-{number:05}-of-00002.safetensors"
        weights = {name: tensor for name, tensor in random_weights(CONFIG).items() if shard_of[name] == file.name}
        save_file(weights | {"twice": np.full(3, number, np.float32)}, file)
    for number in (1, 2):
        write_index(tmp_path, shard_of | {"twice": f"model-{number:05}-of-00002.safetensors"})
        np.testing.assert_array_equal(open_checkpoint(tmp_path).read_tensor("twice"), np.full(3, number))


@pytest.mark.parametrize("content", [
    b"",
    b"\x10\0\0\0",
    struct.pack("<Q", 2**63),
    struct.pack("<Q", 1000) + b"{}",
    raw_file(b"{"),
    raw_file(b"\xff\xff"),
    raw_file([]),
    raw_file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(15)),
    raw_file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(32)),
    raw_file({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, bytes(16)),
    raw_file({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, bytes(16)),
    raw_file({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, bytes(16)),
    raw_file({"a": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
    raw_file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, bytes(16)),
    raw_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
              "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100\n",
])
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    write_directory(tmp_path, random_weights(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        open_checkpoint(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_do_worse_than_an_error(data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not (folder / "whole").exists():
        write_directory(folder, random_weights(CONFIG))
        (folder / "model.safetensors").rename(folder / "whole")
    damaged = bytearray((folder / "whole").read_bytes())
    header = struct.unpack("<Q", damaged[:8])[0] + 8
    byte = st.integers(0, 255) | st.sampled_from(b'0129,:[]{}"')
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(byte)
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.names():
            assert checkpoint.read_tensor(name).shape == checkpoint.shape(name)
    except CheckpointError:
        pass
