"""Checkpoints with quantized weights: what is read is what their numbers stand for, and damaged ones are refused."""

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.quantized import Scaling
from tests.support.paged_model import load
from tests.support.quantized_checkpoints import GPTQ, KINDS, Kind, _compressed, words, write_both
from tests.support.tiny_llama import CONFIG, random_weights

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_is_what_the_numbers_stand_for(name: str, tmp_path: Path) -> None:
    """Whole, and in parts that begin and end inside words, groups and blocks."""
    quantized, plain = write_both(tmp_path, KINDS[name], CONFIG, random_weights())
    checkpoint, wanted = open_checkpoint(quantized), load_file(plain / "model.safetensors")
    assert checkpoint.names() == set(wanted)
    assert checkpoint.quantization == KINDS[name].config.get("quant_method", name.partition(",")[0])
    assert "quantization_config" not in checkpoint.config
    for key, tensor in wanted.items():
        assert checkpoint.shape(key) == tensor.shape
        np.testing.assert_array_equal(checkpoint.read_tensor(key), tensor)
        if tensor.ndim == 2:
            part = slice(3, tensor.shape[0] - 5), slice(17, tensor.shape[1] - 3)
            out = np.empty(tensor[part].shape[::-1], np.float32).T  # as a transposed parameter is filled
            np.testing.assert_array_equal(checkpoint.read_tensor(key, out, part), tensor[part])
            np.testing.assert_array_equal(out, tensor[part])


def test_models_load_with_fused_products_and_experts(tmp_path: Path) -> None:
    """Queries, keys and values of one tensor; experts each with tensors of their own."""
    weights, config = random_weights(), {key: value for key, value in CONFIG.items() if key != "head_dim"}
    fused, mixture = ({name: tensor for name, tensor in weights.items() if part not in name}
                      for part in ("_proj.", ".mlp."))
    rng = np.random.default_rng(0)
    for layer in range(2):
        own = f"model.layers.{layer}."
        for name, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
            parts_of = [weights[f"{own}{name.partition('.')[0]}.{part}_proj.weight"] for part in parts]
            fused[f"{own}{name}_proj.weight"] = np.concatenate(parts_of)
        fused |= {name: weights[name] for name in (f"{own}self_attn.o_proj.weight", f"{own}mlp.down_proj.weight")}
        mixture[f"{own}block_sparse_moe.gate.weight"] = rng.standard_normal((3, 64), np.float32)
        for expert in range(3):
            mixture |= {f"{own}block_sparse_moe.experts.{expert}.{name}.weight": rng.standard_normal(shape, np.float32)
                        for name, shape in (("w1", (96, 64)), ("w2", (64, 96)), ("w3", (96, 64)))}
    for name, kind, tensors, more in (
        ("Phi3", "awq", fused, {}), ("Mixtral", "gptq", mixture, {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ):
        own_config = config | {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()} | more
        quantized, plain = write_both(tmp_path / name, KINDS[kind], own_config, tensors,
                                      quantized=lambda name, tensor: tensor.ndim == 2 and min(tensor.shape) > 60
                                      and ".layers." in name)
        found, wanted = (jax.tree.map(np.asarray, load(folder)[1]) for folder in (quantized, plain))
        np.testing.assert_equal(found, wanted)


@settings(max_examples=30)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_dequantized_weights_are_rounded_once(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 3, columns)
    scales = rng.standard_normal((rows, 3)).astype(np.float32)
    q, zeros = rng.integers(0, 256, (rows, columns), np.uint8), rng.integers(0, 256, (rows, 3), np.uint8)
    exact = (q.astype(np.float64) - zeros.astype(np.float64)[:, groups]) * scales.astype(np.float64)[:, groups]
    np.testing.assert_array_equal(Scaling(scales, zeros, groups).weights(q), exact.astype(np.float32))


def test_zero_points_that_borrow(tmp_path: Path) -> None:
    """A zero point of 0 is stored less one by subtracting from the whole word, as GPTQModel does."""
    rng = np.random.default_rng(0)
    q, zeros = rng.integers(0, 16, (64, 64)), rng.integers(0, 16, (64, 2))
    assert (zeros == 0).any()
    stored = (words(zeros.T, 4, 1).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    tensors = {"qweight": words(q.T, 4, 0), "qzeros": stored, "scales": np.ones((2, 64), np.float16)}
    kind = Kind(GPTQ, lambda rng, shape: (tensors, (q - zeros[:, np.arange(64) // 32]).astype(np.float32)))
    quantized, plain = write_both(tmp_path, kind, CONFIG, random_weights(), quantized=lambda name, _: Q in name)
    np.testing.assert_array_equal(open_checkpoint(quantized).read_tensor(f"{Q}.weight"),
                                  load_file(plain / "model.safetensors")[f"{Q}.weight"])


def test_modules_may_differ(tmp_path: Path) -> None:
    """Some plain, some of 4 and some of 8 bits, where the config says that they differ."""
    both = {4: KINDS["gptq"].made, 8: KINDS["gptq 8"].made}
    kind = Kind(GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}, "-:.*q_proj": {}}},
                lambda rng, shape: both[8 if shape == (64, 96) else 4](rng, shape))
    quantized, plain = write_both(tmp_path, kind, CONFIG, random_weights(),
                                  quantized=lambda name, tensor: "mlp" in name and tensor.ndim == 2)
    checkpoint = open_checkpoint(quantized)
    for key, tensor in load_file(plain / "model.safetensors").items():
        np.testing.assert_array_equal(checkpoint.read_tensor(key), tensor)


def test_weights_are_dequantized_in_batches(tmp_path: Path) -> None:
    """Beside a tensor's values the reader needs a bounded amount of memory, however large it is."""
    weights = {f"{Q}.weight": np.empty((2048, 2048), np.float32), "model.layers.1.x": np.zeros(1, np.float32),
               "model.embed_tokens.weight": np.zeros((1, 1), np.float32)}
    for name in ("awq", "gptq", "packed", "fp8 blocks"):
        quantized, _ = write_both(tmp_path / name, KINDS[name], CONFIG, weights)
        checkpoint, out = open_checkpoint(quantized), np.empty((2048, 2048), np.float16)
        tracemalloc.start()
        checkpoint.read_tensor(f"{Q}.weight", out)
        assert tracemalloc.get_traced_memory()[1] < out.nbytes, name
        tracemalloc.stop()


Change = Callable[[dict[str, np.ndarray]], object]


def cut(name: str, *sizes: int) -> Change:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.ascontiguousarray(tensors[name][tuple(slice(0, size) for size in sizes)])

    return change


@pytest.mark.parametrize(("name", "change", "message"), [
    ("awq", lambda t: t.pop(f"{Q}.scales"), rf"{Q} has qweight, qzeros, but no scales"),
    ("awq", cut(f"{Q}.scales", 1), rf"{Q}.scales has shape \[1, 64\], not \[2, 64\]"),
    ("awq", cut(f"{Q}.qzeros", 2, 7), rf"{Q}.qzeros has shape \[2, 7\], not \[2, 8\]"),
    ("awq", cut(f"{Q}.qweight", 56), rf"{Q}: 56 inputs are not whole groups of 32"),
    ("awq", lambda t: t.update({f"{Q}.qweight": np.ones((64, 8), np.float32)}), "stored as float32, not as int32"),
    ("gptq", lambda t: t.pop(f"{DOWN}.qzeros"), rf"{DOWN} has g_idx, qweight, scales, but no qzeros"),
    ("gptq", cut(f"{Q}.g_idx", 32), rf"{Q}.g_idx has shape \[32\], not \[64\]"),
    ("gptq", lambda t: t[f"{Q}.g_idx"].__setitem__(5, 2), rf"{Q}.g_idx has groups 0 to 2; there are 2"),
    ("gptq", cut(f"{Q}.qzeros", 2, 5), "zero points .* are not those of 4 bits"),
    ("packed", lambda t: t.pop(f"{Q}.weight_scale"), "but no weight_scale"),
    ("packed", lambda t: t.pop(f"{Q}.weight_shape"), "but no weight_shape"),
    ("packed", cut(f"{Q}.weight_packed", 64, 7), r"weight_packed has shape \[64, 7\]"),
    ("int8", lambda t: t.pop(f"{Q}.weight_scale"), f"{Q} has weight, but no weight_scale"),
    ("int8", cut(f"{Q}.weight_scale", 63), "neither one scale, nor one for each output"),
    ("fp8", lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}: weight is stored in 8-bit floats without scales"),
    ("fp8 blocks", cut(f"{Q}.weight_scale_inv", 1), r"\[1, 3\]; \[2, 3\] blocks of \[32, 24\]"),
])
def test_damaged_checkpoints(name: str, change: Change, message: str, tmp_path: Path) -> None:
    folder, _ = write_both(tmp_path, KINDS[name], CONFIG, random_weights(), change=change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(("said", "message"), [
    ({"quant_method": "awq", "bits": 8}, "awq with 8 bits"),
    ({"quant_method": "awq", "version": "gemv"}, "the layout gemv of awq"),
    (GPTQ | {"bits": 3}, "gptq with 3 bits"),
    (GPTQ | {"is_marlin_format": True}, "the layout marlin of gptq"),
    (GPTQ | {"checkpoint_format": "bitblas"}, "the layout bitblas of gptq"),
    (_compressed("nvfp4-pack-quantized", 4, "float"), "the format 'nvfp4-pack-quantized' of compressed-tensors"),
    (_compressed("pack-quantized", 4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (_compressed("pack-quantized", 4) | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive"),
    ({"quant_method": "aqlm"}, "quantized by aqlm, which is not supported; supported are awq"),
])
def test_what_is_not_supported_is_named(said: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = write_both(tmp_path, Kind(said, KINDS["awq"].made), CONFIG, random_weights())
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(folder)


def test_plain_weights_that_are_said_to_be_quantized(tmp_path: Path) -> None:
    """And quantized ones without a word about it."""
    for name in ("gptq", "fp8"):
        quantized, plain = write_both(tmp_path / name, KINDS[name], CONFIG, random_weights())
        (plain / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": KINDS[name].config}))
        with pytest.raises(CheckpointError, match="says that the weights are quantized, but no tensor is"):
            open_checkpoint(plain)
        open_checkpoint(plain, {"quantization_config": None})
        (quantized / "config.json").write_text(json.dumps(CONFIG))
        with pytest.raises(CheckpointError, match=r"is missing|stored as F8_E4M3, which is not supported"):
            load(quantized)


def test_families_that_store_weights_the_other_way_round(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1}
    weights = {"transformer.h.0.attn.c_proj.weight": np.empty((64, 64), np.float32)}
    folder, _ = write_both(tmp_path, KINDS["gptq"], config, weights, quantized=lambda name, tensor: True)
    with pytest.raises(UnsupportedModelError, match="quantized weights of GPT2LMHeadModel are not supported"):
        open_checkpoint(folder)


def test_float8_of_the_other_kind(tmp_path: Path) -> None:
    q = np.random.default_rng(0).standard_normal((64, 64)).astype(ml_dtypes.float8_e5m2)
    kind = Kind({"quant_method": "fp8"}, lambda rng, shape: (
        {"weight": q, "weight_scale": np.full((64, 1), 0.5, np.float32)}, q.astype(np.float32) / 2))
    quantized, plain = write_both(tmp_path, kind, CONFIG, random_weights(), quantized=lambda name, _: Q in name)
    np.testing.assert_array_equal(open_checkpoint(quantized).read_tensor(f"{Q}.weight"),
                                  load_file(plain / "model.safetensors")[f"{Q}.weight"])
