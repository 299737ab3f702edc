"""GGUF files: header, damage, dequantization, and the translation to Hugging Face terms.

References: the gguf package's own reader and dequantizer on whole tensors, and transformers.
"""

import struct
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.gguf import GgufFile
from tests.support.tiny_gguf import CONFIG, add_value, finish, random_weights, write_gguf

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K,
         Kind.Q6_K, Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ3_S, Kind.IQ3_XXS, Kind.IQ2_S, Kind.IQ2_XS,
         Kind.IQ2_XXS, Kind.IQ1_M, Kind.IQ1_S, Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4]
# Where the float16 scales lie in a block of the types that the package can read but not write.
SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q2_K: (80, 82), Kind.Q3_K: (108,),
          Kind.TQ1_0: (52,), Kind.TQ2_0: (64,), Kind.IQ1_M: (), Kind.MXFP4: ()} | dict.fromkeys(
              (Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ3_S, Kind.IQ3_XXS, Kind.IQ2_S, Kind.IQ2_XS, Kind.IQ2_XXS, Kind.IQ1_S),
              (0,))


def stored_bytes(values: np.ndarray, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """`values` in storage type `kind`; random blocks of plausible scale where gguf cannot quantize."""
    if kind not in SCALES:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // block, size), np.uint8)
    for offset in SCALES[kind]:
        scale = rng.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, offset:offset + 2] = scale.view(np.uint8)
    return blocks.reshape(len(values), -1)


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_equals_the_packages_whole_tensor(kind: Kind, tmp_path: Path) -> None:
    rng = np.random.default_rng(kind.value)
    values = rng.standard_normal((700, 512), np.float32)  # more than one batch
    path = write_tensors(tmp_path / "a.gguf", {
        "before": (rng.standard_normal(5).astype(np.float32), Kind.F32),
        "matrix": (stored_bytes(values, kind, rng), kind),
        "row": (stored_bytes(values[:1], kind, rng)[0], kind),
        "after": (rng.standard_normal(3).astype(np.float32), Kind.F32),
    })
    file = GgufFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        shape = file.tensors[tensor.name].shape
        assert shape == tuple(reversed(tensor.shape.tolist()))
        with np.errstate(all="ignore"):  # random blocks of two types have scales of any size
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = np.empty(shape, np.float32)
        file.read_tensor(tensor.name, found)
        np.testing.assert_array_equal(found, expected.reshape(shape))
    if kind not in SCALES:  # and it is what was written, to within half a step of the coarsest type
        found = np.empty(values.shape, np.float32)
        file.read_tensor("matrix", found)
        assert np.abs(found - values).max() < 0.4


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_parts_of_tensors(kind: Kind, tmp_path: Path) -> None:
    """Also columns that begin or end within a block."""
    rng = np.random.default_rng(kind.value)
    values = rng.standard_normal((300, 1024), np.float32)
    file = GgufFile(write_tensors(tmp_path / "a.gguf", {
        "matrix": (stored_bytes(values, kind, rng), kind), "row": (stored_bytes(values[:1], kind, rng)[0], kind)}))
    whole = {name: np.empty(file.tensors[name].shape, np.float32) for name in file.tensors}
    for name, out in whole.items():
        file.read_tensor(name, out)
    for rows, columns in ((slice(0, 300), slice(256, 768)), (slice(17, 290), slice(0, 1024)),
                          (slice(299, 300), slice(100, 357)), (slice(5, 5), slice(0, 1024)),
                          (slice(3, 260), slice(1, 1023)), (slice(0, 300), slice(512, 512))):
        for name, part in (("matrix", (rows, columns)), ("row", (columns,))):
            expected = whole[name][part]
            found = np.full(expected.T.shape, 7, np.float32)
            file.read_tensor(name, found.T, part)
            np.testing.assert_array_equal(found.T, expected)


def test_reads_into_any_layout_and_float_dtype(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((48, 64), np.float32)
    path = write_tensors(tmp_path / "a.gguf", {"a": (gguf.quants.quantize(values, Kind.Q8_0), Kind.Q8_0)})
    expected = np.empty((48, 64), np.float32)
    GgufFile(path).read_tensor("a", expected)
    turned = np.empty((64, 48), np.float32)
    GgufFile(path).read_tensor("a", turned.T)
    np.testing.assert_array_equal(turned, expected.T)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        half = np.empty((48, 64), dtype)
        GgufFile(path).read_tensor("a", half)
        np.testing.assert_array_equal(half, expected.astype(dtype))


def test_metadata_of_every_type(tmp_path: Path) -> None:
    written = {
        "add_uint8": 200, "add_int8": -100, "add_uint16": 60000, "add_int16": -30000, "add_uint32": 4_000_000_000,
        "add_int32": -2_000_000_000, "add_uint64": 2**63 + 1, "add_int64": -(2**62), "add_float32": 0.5,
        "add_float64": 0.1, "add_bool": True, "add_string": "häus \u2581 日本",
    }
    arrays: dict[str, list[Any]] = {
        "strings": ["", "a", "Ġthe", "日本"] * 50, "numbers": [-1, 0, 7], "floats": [0.5, -2.0], "flags": [True, False],
    }
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for method, value in written.items():
        getattr(writer, method)(f"key.{method}", value)
    for name, items in arrays.items():
        writer.add_array(f"key.{name}", items)
    writer.add_custom_alignment(128)
    writer.add_tensor("t", np.arange(7, dtype=np.float32))
    finish(writer)
    file = GgufFile(tmp_path / "a.gguf")
    for name, value in (written | arrays).items():
        assert file.metadata[f"key.{name}"] == value
    assert file.tensors["t"].offset % 128 == 0


# Damage. Files are put together by hand, so that each can be in one place.


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def info(name: str | bytes, dims: Iterable[int], kind: int = 0, offset: int = 0) -> bytes:
    dims = list(dims)
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def whole(
    entries: list[bytes] | None = None, infos: list[bytes] | None = None, data: int = 0, version: int = 3,
    counts: tuple[int, int] | None = None, magic: bytes = b"GGUF",
) -> bytes:
    entries, infos = entries or [], infos or []
    tensors, pairs = counts or (len(infos), len(entries))
    header = magic + struct.pack("<IQQ", version, tensors, pairs) + b"".join(entries) + b"".join(infos)
    return header + bytes(-len(header) % 32) + bytes(data)


HUGE = 2**64 - 1
DAMAGED = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\x03", "not a GGUF"),
    "magic": (whole(magic=b"GGML"), "not a GGUF"),
    "other file": (b"<!DOCTYPE html>" * 10, "not a GGUF"),
    "version 1": (whole(version=1), "version 1"),
    "version 99": (whole(version=99), "version 99"),
    "big-endian": (whole(version=3 << 24), "big-endian"),
    "tensor count": (whole(counts=(HUGE, 0)), "tensors, more than"),
    "entry count": (whole(counts=(0, HUGE)), "entries, more than"),
    "key length": (whole([struct.pack("<Q", HUGE) + b"abc"]), "inside its header"),
    "key without a name": (whole([entry("", 4, b"1234")]), "without a name"),
    "key not UTF-8": (whole([entry(b"\xff\xfe", 4, b"1234")]), "UTF-8"),
    "key twice": (whole([entry("a", 4, b"1234"), entry("a", 4, b"1234")]), "twice"),
    "string length": (whole([entry("a", 8, struct.pack("<Q", 2**40))]), "inside its header"),
    "value type": (whole([entry("a", 13, bytes(16))]), "unknown type 13"),
    "item type": (whole([entry("a", 9, struct.pack("<IQ", 77, 1) + bytes(16))]), "type 77"),
    "nested list": (whole([entry("a", 9, struct.pack("<IQ", 9, 1) + bytes(32))]), "nested"),
    "item count": (whole([entry("a", 9, struct.pack("<IQ", 0, HUGE))]), "items in a, more than"),
    "string count": (whole([entry("a", 9, struct.pack("<IQ", 8, 2**61))]), "items in a, more than"),
    "string in a list": (whole([entry("a", 9, struct.pack("<IQQ", 8, 1, 2**63))]), "inside its header"),
    "ends in a list": (whole([entry("a", 9, struct.pack("<IQ", 8, 1))])[:-28], "more than|inside its header"),
    "alignment 0": (whole([entry("general.alignment", 4, bytes(4))], [info("a", [1])], 32), "power of two"),
    "alignment 48": (whole([entry("general.alignment", 4, b"\x30\0\0\0")], [info("a", [1])], 32), "power of two"),
    "alignment text": (whole([entry("general.alignment", 8, text("x"))], [info("a", [1])], 32), "power of two"),
    "tensor without a name": (whole(infos=[info("", [1])], data=32), "without a name"),
    "tensor twice": (whole(infos=[info("a", [1]), info("a", [1], offset=32)], data=64), "tensor a twice"),
    "no dimensions": (whole(infos=[info("a", [])], data=32), "0 dimensions"),
    "five dimensions": (whole(infos=[info("a", [1] * 5)], data=32), "5 dimensions"),
    "2**32-1 dimensions": (whole(infos=[text("a") + struct.pack("<IQIQ", 2**32 - 1, 1, 0, 0)], data=32), "dimensions"),
    "dimension 0": (whole(infos=[info("a", [0, 4])], data=32), "impossible"),
    "huge dimensions": (whole(infos=[info("a", [HUGE] * 4)], data=32), "truncated"),
    "part of a block": (whole(infos=[info("a", [33], 8)], data=64), "impossible for Q8_0"),
    "misaligned": (whole(infos=[info("a", [1], offset=4)], data=32), "multiple of 32"),
    "offset": (whole(infos=[info("a", [1], offset=2**63)], data=32), "truncated"),
    "overlap": (whole(infos=[info("a", [16]), info("b", [1], offset=32)], data=64), "overlapping"),
    "truncated": (whole(infos=[info("a", [16])], data=60), "truncated"),
    "type": (whole(infos=[info("a", [256], 41)], data=256), "a is stored as Q1_0"),
    "unknown type": (whole(infos=[info("a", [256], 999)], data=256), "unknown type 999"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_clear_error_with_little_memory(case: str, tmp_path: Path) -> None:
    data, message = DAMAGED[case]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 8 << 20  # the unsupported types import the package's names


def test_a_sparse_giant_is_refused_quickly(tmp_path: Path) -> None:
    """Counts that the file's size seems to allow."""
    for header in (whole(counts=(2**30, 0)), whole(counts=(0, 2**30)),
                   whole([entry("a", 9, struct.pack("<IQ", 8, 2**28))]),
                   whole([entry("a", 9, struct.pack("<IQ", 0, 2**35))]),
                   whole([entry("a", 8, struct.pack("<Q", 2**35))])):
        path = tmp_path / "giant.gguf"
        path.write_bytes(header)
        with path.open("r+b") as file:
            file.truncate(1 << 37)
        start = time.process_time()
        with pytest.raises(CheckpointError):
            GgufFile(path)
        assert time.process_time() - start < 1
        path.unlink()


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="cannot read"):
        GgufFile(tmp_path)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A whole file, and the length of its header."""
    config = CONFIG | {"num_hidden_layers": 1}
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_gguf(path, config, random_weights(config), Kind.Q8_0)
    return path.read_bytes(), gguf.GGUFReader(path).data_offset


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_do_worse_than_an_error(
    data: st.DataObject, tiny_file: tuple[bytes, int], tmp_path: Path,
) -> None:
    """Whatever is in the header: either a CheckpointError, or a checkpoint with only readable tensors."""
    damaged, header = bytearray(tiny_file[0]), tiny_file[1]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header - 1))
        damaged[position] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, 127, 128, 255]))
    end = data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(damaged[:end])
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            assert checkpoint.read_tensor(name).shape == checkpoint.shape(name)
    except CheckpointError:
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


# In Hugging Face terms.


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_equals_transformers(kind: Kind, tied: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import AutoModelForCausalLM

    config = CONFIG | {"tie_word_embeddings": tied}
    weights = random_weights(config)
    path = write_gguf(tmp_path / "a.gguf", config, weights, kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    reference = model.state_dict()
    if tied:
        del reference["lm_head.weight"]
    checkpoint = open_checkpoint(path)
    assert checkpoint.names() == set(reference) == set(weights)
    for name, tensor in reference.items():
        found = checkpoint.read_tensor(name)
        assert found.shape == checkpoint.shape(name)
        np.testing.assert_array_equal(found, tensor.numpy())
        turned = np.empty(found.shape, np.float32, order="F")
        np.testing.assert_array_equal(checkpoint.read_tensor(name, turned), found)
        if kind == Kind.F32:
            np.testing.assert_array_equal(found, weights[name])
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
                "vocab_size", "max_position_embeddings", "rms_norm_eps", "head_dim", "tie_word_embeddings"):
        assert checkpoint.config[key] == getattr(model.config, key), key
    assert checkpoint.config["rope_theta"] == model.config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_equals_transformers(architecture: str, tmp_path: Path) -> None:
    """Biases or norms of heads, and rows in their original order."""
    torch = pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import AutoModelForCausalLM

    from jaxpaged.models.config import AttentionSpec
    from jaxpaged.models.registry import find_family

    rng = np.random.default_rng(3)
    # Transformers does not read Qwen3's head_dim.
    tiny: dict[str, Any] = CONFIG | {"head_dim": 128 if architecture == "qwen3" else 16}
    weights = random_weights(tiny)
    for name, tensor in list(weights.items()):
        if architecture == "qwen2" and any(f"self_attn.{part}_proj" in name for part in "qkv"):
            weights[name.replace("weight", "bias")] = rng.standard_normal(len(tensor)).astype(np.float32)
        if architecture == "qwen3" and "q_proj" in name:
            for part in ("q_norm", "k_norm"):
                norm = rng.standard_normal(tiny["head_dim"]).astype(np.float32)
                weights[name.replace("q_proj", part)] = norm
    path = write_gguf(tmp_path / "a.gguf", tiny, weights, architecture=architecture)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    checkpoint = open_checkpoint(path)
    assert checkpoint.names() == set(reference.state_dict()) == set(weights)
    for name, tensor in reference.state_dict().items():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), tensor.numpy())
    assert checkpoint.config["architectures"] == [type(reference).__name__]
    config = find_family(checkpoint.config).config_from_hf(checkpoint.config)
    spec = config.attention[0]
    assert isinstance(spec, AttentionSpec)
    assert (spec.bias, spec.qk_norm is not None) == (architecture == "qwen2", architecture == "qwen3")
    assert not spec.output_bias and spec.head_dim == tiny["head_dim"]


def test_config(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(
        tmp_path / "a.gguf", CONFIG, random_weights(CONFIG), Kind.F16, {"tokenizer.ggml.eot_token_id": 7}))
    expected = CONFIG | {"eos_token_id": [2, 7], "rms_norm_eps": pytest.approx(1e-5), "dtype": "float16",
                         "rope_scaling": None, "attention_bias": False, "mlp_bias": False}
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.generation_config == {}


def test_biases_are_translated_and_put_back_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = random_weights(CONFIG)
    biases = {name.replace("weight", "bias"): rng.standard_normal(len(tensor)).astype(np.float32)
              for name, tensor in weights.items() if "self_attn" in name}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", CONFIG, weights | biases))
    assert checkpoint.config["attention_bias"] is True
    for name, tensor in (weights | biases).items():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), tensor)
        for first, last in ((0, 16), (16, 32), (3, 17), (0, 0)):  # one of the heads, or no whole number of them
            part = (slice(first, last), *(slice(0, size) for size in tensor.shape[1:]))
            np.testing.assert_array_equal(checkpoint.read_tensor(name, part=part), tensor[part])


@pytest.mark.parametrize(("factor", "theta", "head_dim"), [(8.0, 500000.0, 128), (32.0, 500000.0, 64)])
def test_llama3_factors_become_its_scaling(factor: float, theta: float, head_dim: int, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling: dict[str, Any] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    reference = LlamaConfig(head_dim=head_dim, num_attention_heads=4, hidden_size=4 * head_dim,
                            max_position_embeddings=131072, rope_parameters={"rope_theta": theta, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    config = CONFIG | {"head_dim": head_dim, "rope_theta": theta}
    factors = (plain / scaled.numpy()).astype(np.float32)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "a.gguf", config, weights, extra={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_scaling"] == scaling | {"factor": pytest.approx(factor)}
    assert "rope_freqs.weight" not in checkpoint.names()
    path = write_gguf(path, config, weights, extra={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        open_checkpoint(path)
    path = write_gguf(path, config, weights, extra={"rope_freqs.weight": np.ones_like(factors)})
    assert open_checkpoint(path).config["rope_scaling"] is None


@pytest.mark.parametrize(("metadata", "expected"), [
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
])
def test_rope_scaling(metadata: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", CONFIG, random_weights(CONFIG), metadata=metadata)
    assert open_checkpoint(path).config["rope_scaling"] == expected


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
LENGTH = {"llama.rope.scaling.original_context_length": 32}
FAST_SLOW = {"llama.rope.scaling.yarn_beta_fast": 8.0, "llama.rope.scaling.yarn_beta_slow": 2.0}


@pytest.mark.parametrize(("metadata", "checkpoint", "times"), [
    (LENGTH, {"original_max_position_embeddings": 32}, 1.0),
    ({}, {}, 1.0),
    ({"llama.rope.scaling.original_context_length": 4096} | FAST_SLOW,
     {"original_max_position_embeddings": 4096, "beta_fast": 8.0, "beta_slow": 2.0}, 1.0),
    (LENGTH | {"llama.rope.scaling.yarn_attn_factor": 1.5},
     {"original_max_position_embeddings": 32, "attention_factor": 1.5}, 1.0),
    (LENGTH | {"llama.rope.scaling.yarn_log_multiplier": 0.5},
     {"original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.0),
    (LENGTH | {"llama.rope.scaling.yarn_log_multiplier": 0.0}, {"original_max_position_embeddings": 32}, 1.0),
    (LENGTH | {"llama.rope.scaling.attn_factor": 1.25}, {"original_max_position_embeddings": 32}, 1.25),
    (LENGTH | {"llama.rope.scaling.yarn_ext_factor": 1.0}, {"original_max_position_embeddings": 32}, 1.0),
])
def test_yarns_numbers_are_those_of_the_converted_checkpoint(
    metadata: dict[str, Any], checkpoint: dict[str, Any], times: float, tmp_path: Path,
) -> None:
    """The file's rotary rule, against transformers' angles for the checkpoint it was converted from."""
    pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from jaxpaged.models.registry import find_family
    from jaxpaged.models.rotary import rotary_angles

    config = CONFIG | {"head_dim": 64}
    reference = LlamaConfig(**{key: config[key] for key in ("hidden_size", "num_attention_heads", "head_dim",
                                                            "max_position_embeddings", "rope_theta")},
                            rope_scaling={"rope_type": "yarn", "factor": 4.0, **checkpoint})
    frequency, magnitude = ROPE_INIT_FUNCTIONS["yarn"](reference, "cpu")
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), metadata=YARN | metadata)
    found = open_checkpoint(path).config
    rope = find_family(found).config_from_hf(found).attention[0].rope
    assert rope is not None
    position = np.array([1, 5, 31, 32, 100])
    cos, sin = rotary_angles(jnp.asarray(position), 64, rope)
    angle = position[:, None] * frequency.double().numpy()
    np.testing.assert_allclose(cos, np.cos(angle) * magnitude * times, atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angle) * magnitude * times, atol=2e-5)


# Split files


def write_split(folder: Path, weights: dict[str, np.ndarray], parts: int) -> list[Path]:
    """What the gguf package writes as several files."""
    whole = write_gguf(folder / "whole.gguf", CONFIG, weights)
    reader = gguf.GGUFReader(whole)
    count = -(-len(reader.tensors) // parts)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=count)
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    whole.unlink()
    return sorted(folder.glob("model-*.gguf"))


@pytest.mark.parametrize("named", [0, 1, 2])
def test_a_split_model_reads_like_a_whole_one(named: int, tmp_path: Path) -> None:
    """Whichever of its parts is named."""
    weights = random_weights(CONFIG)
    files = write_split(tmp_path, weights, 3)
    assert len(files) == 3
    checkpoint = open_checkpoint(files[named])
    assert checkpoint.names() == set(weights)
    assert {key: checkpoint.config[key] for key in ("hidden_size", "vocab_size")} == {
        key: CONFIG[key] for key in ("hidden_size", "vocab_size")}
    for name, tensor in weights.items():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), tensor)
        part = (slice(0, len(tensor) // 2), *(slice(0, size) for size in tensor.shape[1:]))
        np.testing.assert_array_equal(checkpoint.read_tensor(name, part=part), tensor[part])


def test_split_models_that_are_not_whole(tmp_path: Path) -> None:
    files = write_split(tmp_path, random_weights(CONFIG), 3)
    content = [file.read_bytes() for file in files]
    renamed = tmp_path / "part.gguf"
    renamed.write_bytes(content[0])
    with pytest.raises(CheckpointError, match="one of 3 parts of a model; give them the names"):
        open_checkpoint(renamed)
    files[1].write_bytes(content[2])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is not part 2 of 3"):
        open_checkpoint(files[0])
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf does not exist; the model has 3 parts"):
        open_checkpoint(files[2])


@pytest.mark.parametrize(("metadata", "error", "message"), [
    ({"general.architecture": "mamba"}, UnsupportedModelError, r"'mamba' is not supported; supported are llama"),
    ({"llama.expert_count": 8}, UnsupportedModelError, "mixture-of-experts"),
    ({"split.count": 2}, CheckpointError, "llama-gguf-split --merge"),
    ({"split.count": 2**31}, CheckpointError, "no possible number of parts"),
    ({"llama.rope.scaling.attn_factor": 1.2}, UnsupportedModelError, "attn_factor is 1.2"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.yarn_ext_factor": 0.5},
     UnsupportedModelError, "yarn_ext_factor must be 1, not 0.5"),
    ({"llama.logit_scale": 0.5}, UnsupportedModelError, "logit_scale is 0.5, which changes what the model computes"),
    ({"llama.attention.sliding_window": 64}, UnsupportedModelError, "sliding_window is 64"),
    ({"llama.attention.value_length": 8}, UnsupportedModelError, "different length"),
    ({"llama.rope.dimension_count": 8}, UnsupportedModelError, "a part of each head"),
    ({"llama.block_count": 3}, CheckpointError, "says 3 layers, the weights hold 2"),
    ({"llama.block_count": "two"}, CheckpointError, r"llama\.block_count must be a positive integer, not 'two'"),
    ({"llama.embedding_length": 0}, CheckpointError, r"llama\.embedding_length"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, CheckpointError, "epsilon must be a positive number"),
])
def test_metadata_that_cannot_work(
    metadata: dict[str, Any], error: type[Exception], message: str, tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "a.gguf", CONFIG, random_weights(CONFIG))
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", metadata.get("general.architecture", "llama"))
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")) and key not in metadata:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, value in metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / "b.gguf")


@pytest.mark.parametrize(("architecture", "extra", "text"), [
    ("newone", {}, "most like those of llama$"),
    ("newone", {"blk.0.attn_q_norm.weight": 16, "blk.0.attn_k_norm.weight": 16, "blk.0.attn_sinks.weight": 4},
     r"most like those of qwen3, but has blk\.\{i\}\.attn_sinks besides$"),
])
def test_an_unknown_architecture_is_compared_with_the_known_ones(
    architecture: str, extra: dict[str, int], text: str, tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "a.gguf", CONFIG, random_weights(CONFIG), architecture=architecture,
                      extra={name: np.zeros(size, np.float32) for name, size in extra.items()})
    with pytest.raises(UnsupportedModelError, match=f"'newone' is not supported; supported are .*{text}"):
        open_checkpoint(path)


def test_an_unknown_tensor_keeps_its_name(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", CONFIG, random_weights(CONFIG), extra=extra)
    assert open_checkpoint(path).names() == {*random_weights(CONFIG), *extra}


# The default model.


def test_the_real_header_equals_the_packages_and_opens_quickly(smollm2_path: Path) -> None:
    start = time.process_time()
    file = GgufFile(smollm2_path)
    assert time.process_time() - start < 0.5
    reader = gguf.GGUFReader(smollm2_path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents(), key
    assert len(file.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        found = file.tensors[tensor.name]
        assert (found.shape, found.type_name, found.offset, found.nbytes) == (
            tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


@pytest.mark.slow
def test_the_real_weights_equal_transformers(smollm2_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)
    checkpoint = open_checkpoint(smollm2_path)
    reference = model.state_dict()
    assert checkpoint.names() == set(reference) - {"lm_head.weight"}
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), reference[name].numpy(), err_msg=name)


