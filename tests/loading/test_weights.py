"""From tensors to parameters: values, layout, memory, and everything that does not match."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.loading.hf_checkpoint import HfCheckpoint
from jaxpaged.loading.host_memory import ByteBudget
from jaxpaged.loading.weights import load_params
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.param_layout import Part
from jaxpaged.models.registry import find_family
from jaxpaged.models.weight_rules import TensorSlice, WeightRule, as_is, transposed
from tests.support.model_configs import uniform_layers
from tests.support.tiny_gguf import CONFIG, random_weights, write_gguf


class InMemory:
    """A checkpoint of arrays at hand, which notes what is read."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.path = Path("in-memory")
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.quantization: str | None = None
        self.tensors = tensors
        self.reads: list[tuple[str, Part | None]] = []

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if self.tensors[name].dtype == np.int8:
            raise CheckpointError(f"{name} is stored as I8")
        return self.tensors[name].shape

    def read_packed(self, name: str, *where: Any) -> None:
        raise AssertionError(name)

    def stored_type(self, name: str) -> str:
        return self.tensors[name].dtype.name if name in self.tensors else ""

    def read_tensor(self, name: str, out: np.ndarray | None = None, part: Part | None = None) -> np.ndarray:
        self.reads.append((name, part))
        index: tuple[Any, ...] = (*(part or ()), ...)
        found = self.tensors[name][index]
        if out is None:
            return found.copy()
        assert out.shape == found.shape
        out[...] = found
        return out


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def model(num_layers: int = 1, *, tied: bool = False, heads: int = 4, kv_heads: int = 2, head_dim: int = 3,
          mlp: int = 10) -> ModelConfig:
    """A config, for what rules read of it."""
    layers = uniform_layers(num_layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp_dim=mlp)
    return ModelConfig("test", 5, 7, 16, layers, tie_embeddings=tied)


def load(checkpoint: Checkpoint, dtype: Any = jnp.float32) -> dict[Any, Any]:
    """All parameters of the model that the checkpoint's config describes."""
    family = find_family(checkpoint.config)
    config = family.config_from_hf(checkpoint.config)
    module = nnx.eval_shape(lambda: family.build(config, dtype))
    return load_params(nnx.to_pure_dict(nnx.state(module)), family.weights, checkpoint, config=config,
                       ignored=family.ignored, dtype=dtype, keep_in_place=True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_has_each_weight_in_its_place(tied: bool, tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    weights = random_weights(config)
    params = load(open_checkpoint(write_gguf(tmp_path / "a.gguf", config, weights)))
    expected: dict[str, Any] = {"embed": {"table": weights["model.embed_tokens.weight"]},
                                "norm": {"scale": weights["model.norm.weight"]},
                                "layers": {}}
    for layer in range(2):
        here = f"model.layers.{layer}"
        expected["layers"][layer] = {
            "attn_norm": {"scale": weights[f"{here}.input_layernorm.weight"]},
            "mlp_norm": {"scale": weights[f"{here}.post_attention_layernorm.weight"]},
            "attn": {"qkv": {"kernel": np.vstack([weights[f"{here}.self_attn.{name}_proj.weight"]
                                                  for name in "qkv"]).T},
                     "o": {"kernel": weights[f"{here}.self_attn.o_proj.weight"].T}},
            "mlp": {"gate_up": {"kernel": np.vstack([weights[f"{here}.mlp.{name}_proj.weight"]
                                                     for name in ("gate", "up")]).T},
                    "down": {"kernel": weights[f"{here}.mlp.down_proj.weight"].T}},
        }
    if not tied:
        expected["head"] = {"kernel": weights["lm_head.weight"].T}
    jax.tree.map(np.testing.assert_array_equal, params, expected)  # raises where the structures differ, too
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def split_heads(tensor: np.ndarray) -> np.ndarray:
    """[N * H, D] to [D, N, H] with N = 2: a layout that no order of the stored array makes contiguous."""
    return tensor.reshape(2, -1, tensor.shape[-1]).transpose(2, 0, 1)


def plus_one(tensor: np.ndarray) -> np.ndarray:
    return tensor + 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_any_transform_gives_arrays_that_stay_in_place(dtype: Any) -> None:
    """Contiguous and aligned, so that the CPU backend uses them without a copy, one after the other."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(dims, np.float32) for name, dims in {
        "as_is": (5, 7), "transposed": (6, 11), "heads": (8, 5), "plus": (13,), "scalar": (), "cube": (3, 4, 5),
        "none": (0, 4)}.items()}
    rules = [WeightRule("as_is", "a", as_is), WeightRule("transposed", "b.c", transposed),
             WeightRule("heads", "b.heads", split_heads), WeightRule("plus", "plus", plus_one),
             WeightRule("scalar", "scalar", as_is), WeightRule("cube", "cube", transposed),
             WeightRule("none", "none", transposed)]
    shapes = {"a": shape(5, 7), "b": {"c": shape(11, 6), "heads": shape(5, 2, 4)}, "plus": shape(13),
              "scalar": shape(), "cube": shape(5, 4, 3), "none": shape(4, 0)}
    checkpoint = InMemory(tensors)
    params = load_params(shapes, rules, checkpoint, config=model(), dtype=dtype, keep_in_place=True)
    assert sorted(name for name, _ in checkpoint.reads) == sorted(tensors)
    leaves = [leaf for leaf in jax.tree.leaves(params) if leaf.size]
    first = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert all(leaf.dtype == dtype for leaf in leaves) and not any(address % 64 for address in first)
    assert max(first) - min(first) < sum(leaf.nbytes + 64 for leaf in leaves)
    np.testing.assert_array_equal(params["a"], tensors["as_is"].astype(dtype))
    np.testing.assert_array_equal(params["b"]["c"], tensors["transposed"].T.astype(dtype))
    heads = params["b"]["heads"]
    for head in range(2):
        np.testing.assert_array_equal(heads[:, head], tensors["heads"][4 * head:4 * head + 4].T.astype(dtype))
    np.testing.assert_array_equal(params["plus"], (tensors["plus"] + 1).astype(dtype))
    np.testing.assert_array_equal(params["scalar"], tensors["scalar"].astype(dtype))
    np.testing.assert_array_equal(params["cube"], tensors["cube"].T.astype(dtype))


def test_everything_that_does_not_match_is_in_one_error_before_anything_is_read() -> None:
    checkpoint = InMemory({
        "layers.0.w": np.zeros((4, 3), np.float32),
        "layers.2.w": np.zeros((4, 3), np.float32),
        "wrong": np.zeros((3, 4), np.float32),
        "uneven": np.zeros((3, 4), np.float32),
        "quantized": np.zeros((4,), np.int8),
        "extra": np.zeros(1, np.float32),
        "layers.0.rotary.inv_freq": np.zeros(1, np.float32),
        "lm_head.weight": np.zeros(1, np.float32),
    })
    rules = [WeightRule("layers.{i}.w", "layers.{i}.w", transposed), WeightRule("wrong", "wrong", transposed),
             WeightRule("uneven", "uneven", split_heads), WeightRule("quantized", "quantized", as_is)]
    shapes = {"layers": {0: {"w": shape(3, 4)}, 1: {"w": shape(3, 4)}}, "wrong": shape(3, 4), "uneven": shape(4, 2, 2),
              "quantized": shape(4), "new": {"scale": shape(4)}}
    with pytest.raises(CheckpointError) as caught:
        load_params(shapes, rules, checkpoint, config=model(2, tied=True), ignored=["*.inv_freq"])
    assert str(caught.value).splitlines() == [
        "in-memory does not match the model its config describes:",
        "  tensor layers.1.w is missing",
        "  tensor wrong has shape [3, 4], which does not fit parameter wrong [3, 4]",
        "  tensor uneven has shape [3, 4], which does not fit parameter uneven [4, 2, 2]",
        "  quantized is stored as I8",
        "  parameter new.scale has no rule in the weight table",
        "  tensor extra is not used by the model",
        "  tensor layers.2.w is not used by the model",
    ]
    assert checkpoint.reads == []
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not used"):
        load_params(shapes, rules, checkpoint, config=model(2), ignored=["*.inv_freq"])


def test_a_long_list_of_problems_is_cut() -> None:
    checkpoint = InMemory({f"extra.{number}": np.zeros(1, np.float32) for number in range(1000)})
    with pytest.raises(CheckpointError, match="and 980 more") as caught:
        load_params({}, [], checkpoint, config=model())
    assert len(str(caught.value).splitlines()) == 22


def test_an_untied_model_without_a_head_names_the_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", CONFIG,
                                            random_weights(CONFIG | {"tie_word_embeddings": True})))
    checkpoint.config["tie_word_embeddings"] = False
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
        load(checkpoint)


def test_biases_that_the_config_does_not_mention_are_an_error(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    weights["model.layers.1.mlp.gate_proj.bias"] = np.zeros(96, np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", CONFIG, weights))
    checkpoint.config["mlp_bias"] = False
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate_proj\.bias is not used"):
        load(checkpoint)


def test_an_error_while_reading_comes_through() -> None:
    class Truncated(InMemory):
        def read_tensor(self, name: str, out: np.ndarray | None = None, part: Part | None = None) -> np.ndarray:
            raise CheckpointError("was truncated while it was read")

    tensors = {f"w{number}": np.zeros((4, 4), np.float32) for number in range(50)}
    rules = [WeightRule(name, name, transposed) for name in tensors]
    with pytest.raises(CheckpointError, match="truncated while"):
        load_params(dict.fromkeys(tensors, shape(4, 4)), rules, Truncated(tensors), config=model())


# Runs in a process with six devices.
_SHARED = """
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 6)
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from jaxpaged.loading.weights import load_params
    from jaxpaged.models.weight_rules import WeightRule, as_is, transposed
    from tests.loading.test_weights import InMemory, model, plus_one

    mesh = Mesh(np.array(jax.devices()).reshape(3, 2), ("kv", "share"))
    rng = np.random.default_rng(0)
    table = {  # parameter: stored shape, transform, what the mesh cuts, shape on the devices
        "rows": ((12, 5), as_is, P(("kv", "share")), (12, 5)), "padded": ((13, 5), as_is, P(("kv", "share")), (18, 5)),
        "columns": ((5, 12), transposed, P(("kv", "share")), (12, 5)), "whole": ((7,), as_is, P(), (7,)),
        "some": ((9, 4), transposed, P(None, "kv"), (4, 9)), "more": ((6, 3), plus_one, P("kv"), (6, 3)),
        "short": ((2, 3), as_is, P(("kv", "share")), (6, 3))}
    tensors = {name: rng.standard_normal(row[0], np.float32) for name, row in table.items()}
    rules = [WeightRule(name, name, row[1]) for name, row in table.items()]
    shapes = {name: jax.ShapeDtypeStruct(row[1](tensors[name]).shape, np.float32) for name, row in table.items()}
    wanted = {name: jax.ShapeDtypeStruct(row[3], np.float32, sharding=NamedSharding(mesh, row[2]))
              for name, row in table.items()}
    for in_place in (False, True):
        checkpoint = InMemory(tensors)
        params = load_params(shapes, rules, checkpoint, config=model(), wanted=wanted, keep_in_place=in_place)
        read = {name: np.zeros(row[0], int) for name, row in table.items()}
        for name, part in checkpoint.reads:
            read[name][(*(part or ()), ...)] += 1
        for name, (_, transform, spec, shape) in table.items():
            expected = transform(tensors[name])
            expected = np.pad(expected, [(0, large - small) for large, small in zip(shape, expected.shape)])
            np.testing.assert_array_equal(params[name], expected)
            assert params[name].sharding == wanted[name].sharding
            for shard in params[name].addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
            assert (read[name] == (3 if name == "more" else 1)).all(), (name, read[name])
"""


def test_each_device_reads_its_piece_alone() -> None:
    """Rows, columns, padding, and shards that two devices hold; every number is read once, however it is sharded."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_SHARED)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]


def gate_rows(config: ModelConfig, layer: int) -> tuple[slice, ...]:
    """The first half of a tensor that holds gate and up."""
    return (slice(0, config.layers[layer].mlp.dim),)


def up_rows(config: ModelConfig, layer: int) -> tuple[slice, ...]:
    return (slice(config.layers[layer].mlp.dim, 2 * config.layers[layer].mlp.dim),)


def middle(config: ModelConfig, layer: int) -> tuple[slice, ...]:
    """Other bounds in each layer, on both axes."""
    return slice(layer, layer + 2), slice(1, 4)


def lower(config: ModelConfig, layer: int) -> tuple[slice, ...]:
    """A layer's part of a tensor that holds those of all layers, then as much again."""
    size = config.layers[layer].mlp.dim
    return (slice(layer * size, (layer + 1) * size),)


def upper(config: ModelConfig, layer: int) -> tuple[slice, ...]:
    [first] = lower(config, layer)
    size = config.num_layers * config.layers[layer].mlp.dim
    return (slice(first.start + size, first.stop + size),)


# Stacked, fused, sliced, and combinations of these.
FUSED_RULES: tuple[WeightRule, ...] = (
    WeightRule("{i}.down.{e}", "{i}.down", transposed, ("experts", "mlp")),
    WeightRule(("{i}.gate.{e}", "{i}.up.{e}"), "{i}.experts", transposed, ("experts", None, ("mlp", "mlp"))),
    WeightRule(("{i}.q", "{i}.k", "{i}.v"), "{i}.qkv", transposed, (None, ("heads", "kv_heads", "kv_heads"))),
    WeightRule(("{i}.q_bias", "{i}.k_bias", "{i}.v_bias"), "{i}.bias", as_is, (("heads", "kv_heads", "kv_heads"),)),
    WeightRule("{i}.packed", "{i}.packed", transposed, (None, ("heads", "kv_heads", "kv_heads"))),
    WeightRule((TensorSlice("{i}.both", gate_rows), TensorSlice("{i}.both", up_rows)), "{i}.gate_up", plus_one,
               (("mlp", "mlp"),)),
    WeightRule(TensorSlice("{i}.halves", gate_rows), "{i}.gate", transposed, (None, "mlp")),
    WeightRule(TensorSlice("{i}.halves", up_rows), "{i}.up", as_is, ("mlp",)),
    WeightRule("{i}.scale.{e}", "{i}.scale", as_is, ("experts",)),
)


def fused_tensors(config: ModelConfig, experts: int, dim: int = 5) -> dict[str, np.ndarray]:
    """Random tensors for the rules."""
    rng = np.random.default_rng(0)
    spec, mlp = config.attention[0], config.layers[0].mlp.dim
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        shapes |= {f"{layer}.{name}": dims for name, dims in {
            "q": (q, dim), "k": (kv, dim), "v": (kv, dim), "q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,),
            "packed": (q + 2 * kv, dim), "both": (2 * mlp, dim), "halves": (2 * mlp, dim)}.items()}
        for expert in range(experts):
            shapes |= {f"{layer}.{name}.{expert}": dims for name, dims in {
                "down": (dim, mlp), "gate": (mlp, dim), "up": (mlp, dim), "scale": ()}.items()}
    return {name: np.asarray(rng.standard_normal(dims, np.float32)) for name, dims in shapes.items()}


def fused_parts(tensors: dict[str, np.ndarray], config: ModelConfig, experts: int) -> dict[str, list[np.ndarray]]:
    """Each parameter of a layer as the parts that are joined along its last axis, or its only sharded one."""
    def stacked(name: str) -> np.ndarray:
        return np.stack([tensors[f"{name}.{expert}"].T for expert in range(experts)])

    q, kv = (count * config.head_dim for count in (config.attention[0].num_heads, config.num_kv_heads))
    found: dict[str, list[np.ndarray]] = {}
    for layer in range(config.num_layers):
        here = {name: tensors[f"{layer}.{name}"] for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias", "packed",
                                                              "both", "halves")}
        found |= {f"{layer}.{name}": parts for name, parts in {
            "down": [stacked(f"{layer}.down")], "experts": [stacked(f"{layer}.gate"), stacked(f"{layer}.up")],
            "qkv": [here[name].T for name in "qkv"], "bias": [here[f"{name}_bias"] for name in "qkv"],
            "packed": np.split(here["packed"].T, (q, q + kv), axis=1),
            "gate_up": np.split(here["both"] + 1, 2), "gate": [np.split(here["halves"], 2)[0].T],
            "up": [np.split(here["halves"], 2)[1]], "scale": [stacked(f"{layer}.scale")]}.items()}
    return found


SHARDED_AXIS = {"down": 1, "experts": 2, "qkv": 1, "bias": 0, "packed": 1, "gate_up": 0, "gate": 1, "up": 0, "scale": 0}


def fused_shapes(parts: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """As the checkpoint has them: nested by layer."""
    found: dict[str, Any] = {}
    for name, arrays in parts.items():
        layer, _, rest = name.partition(".")
        joined = np.concatenate(arrays, axis=SHARDED_AXIS[rest])
        found.setdefault(layer, {})[rest] = shape(*joined.shape)
    return found


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["memory", "safetensors", "gguf"])
def test_tensors_are_stacked_joined_and_sliced(kind: str, in_place: bool, tmp_path: Path) -> None:
    config, experts = model(2, mlp=8), 3
    tensors = fused_tensors(config, experts)
    parts = fused_parts(tensors, config, experts)
    checkpoint: Checkpoint = InMemory(tensors)
    if kind == "safetensors":
        save_file({f"layers.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        checkpoint = HfCheckpoint(tmp_path)
    elif kind == "gguf":  # which has no scalars
        tensors = {name: tensor.reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
        checkpoint = open_checkpoint(write_gguf(
            tmp_path / "a.gguf", CONFIG, random_weights(CONFIG),
            extra={f"layers.{name}": tensor for name, tensor in tensors.items()}))
    rules, shapes = FUSED_RULES, fused_shapes(parts)
    ignored = ["model.*", "lm_head.*"]
    if kind == "gguf":
        rules = tuple(rule for rule in rules if "scale" not in rule.path)
        for layer in shapes.values():
            del layer["scale"]
        ignored.append("*.scale.*")
    if kind != "memory":
        rules = tuple(replace(rule, tensor=tuple(
            replace(item, tensor=f"layers.{item.tensor}") for item in rule.sources)) for rule in rules)
    params = load_params(shapes, rules, checkpoint, config=config, ignored=ignored, keep_in_place=in_place)
    assert {layer: set(names) for layer, names in params.items()} == {
        layer: set(names) for layer, names in shapes.items()}
    for layer, names in params.items():
        for name, found in names.items():
            wanted = np.concatenate(parts[f"{layer}.{name}"], axis=SHARDED_AXIS[name])
            np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_only_the_slice_is_read() -> None:
    """Also where the transform needs all of it at once."""
    tensor = np.random.default_rng(0).standard_normal((6, 5), np.float32)
    for transform in (transposed, as_is, plus_one):
        checkpoint = InMemory({"w": tensor})
        rules = [WeightRule(TensorSlice("w", lambda config, layer: (slice(0, 2),)), "a", transform),
                 WeightRule(TensorSlice("w", lambda config, layer: (slice(2, 6), slice(0, 3))), "b", transform),
                 WeightRule(TensorSlice("w", lambda config, layer: (slice(2, 6), slice(3, 5))), "c", transform)]
        wanted = {"a": transform(tensor[:2]), "b": transform(tensor[2:, :3]), "c": transform(tensor[2:, 3:])}
        params = load_params({name: shape(*leaf.shape) for name, leaf in wanted.items()}, rules, checkpoint,
                             config=model())
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
        read = np.zeros((6, 5), int)
        for _, part in checkpoint.reads:
            assert part is not None
            read[part] += 1
        assert (read == 1).all()


def test_bounds_know_the_layer_and_what_they_leave_is_an_error() -> None:
    tensors = {f"{layer}.w": np.arange(20, dtype=np.float32).reshape(4, 5) + layer for layer in range(2)}
    shapes = {layer: {"w": shape(3, 2)} for layer in range(2)}
    with pytest.raises(CheckpointError) as caught:
        load_params(shapes, [WeightRule(TensorSlice("{i}.w", middle), "{i}.w", transposed)], InMemory(tensors),
                    config=model(2))
    assert str(caught.value).splitlines()[1:] == [
        f"  tensor {layer}.w has 20 numbers, of which the model uses 6" for layer in range(2)]
    rules = [WeightRule((TensorSlice("w", lower), TensorSlice("w", upper)), "{i}.w", as_is, (("mlp", "mlp"),))]
    whole = {"w": np.arange(12, dtype=np.float32)}
    params = load_params({layer: {"w": shape(6)} for layer in range(2)}, rules, InMemory(whole), config=model(2, mlp=3))
    np.testing.assert_array_equal(params[0]["w"], [0, 1, 2, 6, 7, 8])
    np.testing.assert_array_equal(params[1]["w"], [3, 4, 5, 9, 10, 11])


def test_errors_of_stacks_joins_and_slices_name_both_sides() -> None:
    config = model(mlp=8)
    tensors = fused_tensors(config, 2)
    parts = fused_parts(tensors, config, 2)
    tensors["0.k"] = np.zeros((5, 5), np.float32)
    tensors["0.up.1"] = np.zeros((9, 5), np.float32)
    tensors["0.halves"] = np.zeros((15, 5), np.float32)
    tensors["0.down.1"] = np.zeros((8, 5), np.float32)
    tensors["0.gate.2"] = np.zeros((8, 5), np.float32)
    tensors["0.packed"] = np.zeros((25, 5), np.float32)
    tensors["0.both"] = np.zeros((18, 5), np.float32)
    del tensors["0.v_bias"], tensors["0.scale.1"]
    checkpoint = InMemory(tensors)
    with pytest.raises(CheckpointError) as caught:
        load_params(fused_shapes(parts), FUSED_RULES, checkpoint, config=config)
    assert sorted(str(caught.value).splitlines()[1:]) == sorted([
        "  tensor 0.down.1 has shape [8, 5], which does not fit the part [8, 5] of parameter 0.down [2, 8, 5]",
        "  tensor 0.up.1 has shape [9, 5], which does not fit the part [5, 8] of parameter 0.experts [2, 5, 16]",
        "  tensor 0.k has shape [5, 5], which does not fit the part [5, 6] of parameter 0.qkv [5, 24]",
        "  tensor 0.v_bias is missing",
        "  tensor 0.packed has shape [25, 5], which does not fit parameter 0.packed [5, 24]",
        "  tensor 0.halves has shape [15, 5], of which [8:16, 0:5] is taken, which does not fit parameter 0.up [8, 5]",
        "  tensor 0.scale.1 is missing",
        "  tensor 0.gate.2 is not used by the model",
    ])
    assert checkpoint.reads == []


# Runs in a process with eight devices.
_FUSED = """
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from hypothesis import given, settings, strategies as st
    from jaxpaged.execution.sharding import Placement, axes_tree, held_shapes, partition_of, possible_sizes, spec_tree
    from jaxpaged.loading.weights import load_params
    from jaxpaged.execution.model_runner import placed
    from tests.loading.test_weights import (FUSED_RULES, SHARDED_AXIS, InMemory, fused_parts, fused_shapes,
                                            fused_tensors, model)

    HEADS = {"qkv": "qkk", "bias": "qkk", "packed": "qkk"}

    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def check(data):
        draw = lambda low, high: data.draw(st.integers(low, high))
        kv_heads = draw(1, 4)
        config = model(draw(1, 2), heads=kv_heads * draw(1, 4), kv_heads=kv_heads, head_dim=draw(1, 3), mlp=draw(1, 9))
        size = data.draw(st.sampled_from([size for size in possible_sizes(config) if size <= 8]))
        experts = draw(1, 3)
        tensors = fused_tensors(config, experts)
        parts = fused_parts(tensors, config, experts)
        shapes, partition = fused_shapes(parts), partition_of(config, size)
        axes = axes_tree(shapes, FUSED_RULES, config, partition)
        placement = Placement.of(jax.devices()[:size], partition)
        wanted = jax.tree.map(lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=placement.sharding(spec)), held_shapes(shapes, axes, partition),
            spec_tree(axes))
        def shard_of(name, device):
            # By hand: this device's shard of each part, filled up with zeros, one after the other.
            axis, found = SHARDED_AXIS[name.partition(".")[2]], []
            for index, part in enumerate(parts[name]):
                kind = HEADS.get(name.partition(".")[2], "m" * 9)[index]
                count, which = {"q": (size, device), "m": (size, device),
                                "k": (partition.kv, device // partition.share)}[kind]
                if name.endswith("scale"):
                    count, which = 1, 0
                width = -(-part.shape[axis] // count)
                mine = np.take(part, range(min(which * width, part.shape[axis]),
                                           min((which + 1) * width, part.shape[axis])), axis)
                missing = [(0, width - mine.shape[axis] if dim == axis else 0) for dim in range(part.ndim)]
                found.append(np.pad(mine, missing))
            return np.concatenate(found, axis)
        def check_params(params):
            for layer, names in params.items():
                for name, array in names.items():
                    assert array.shape == wanted[layer][name].shape and array.sharding == wanted[layer][name].sharding
                    for shard in array.addressable_shards:
                        expected = shard_of(f"{layer}.{name}", placement.devices.index(shard.device))
                        np.testing.assert_array_equal(np.asarray(shard.data).reshape(expected.shape), expected, name)
        for in_place in (False, True):
            checkpoint = InMemory(tensors)
            params = load_params(shapes, FUSED_RULES, checkpoint, config=config, wanted=wanted, axes=axes,
                                 keep_in_place=in_place)
            check_params(params)
        # The same from whole arrays on the host, and from what the devices hold already.
        stored = {layer: {name: np.concatenate(parts[f"{layer}.{name}"], SHARDED_AXIS[name]) for name in names}
                  for layer, names in shapes.items()}
        check_params(placed(stored, wanted, axes, placement))
        check_params(placed(params, wanted, axes, placement))
        check_params(placed(jax.tree.map(np.asarray, params), wanted, axes, placement))

    check()
"""


def test_each_device_holds_its_shard_of_every_part() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_FUSED)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]


# Runs in a fresh process, whose peak memory is that of the loading alone.
_STACK = """
    import sys
    from pathlib import Path
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    from safetensors.numpy import save_file
    from jaxpaged.loading.hf_checkpoint import HfCheckpoint
    from jaxpaged.loading.weights import load_params
    from jaxpaged.models.weight_rules import WeightRule, transposed
    from tests.loading.test_weights import model, shape

    rows, columns, experts = 1024, 2048, 24
    folder, in_place = Path(sys.argv[1]), sys.argv[2] == "True"
    checkpoint = HfCheckpoint(folder)

    def peak():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    rule = WeightRule(("gate.{e}", "up.{e}"), "w", transposed, ("experts", None, ("mlp", "mlp")))
    before = peak()
    params = load_params({"w": shape(experts, columns, 2 * rows)}, [rule], checkpoint, config=model(mlp=rows),
                         keep_in_place=in_place)
    growth = peak() - before
    for expert in (0, experts - 1):
        assert (np.asarray(params["w"][expert, :, rows:]) == checkpoint.read_tensor(f"up.{expert}").T).all()
    print(growth - params["w"].nbytes)
"""


@pytest.mark.parametrize("in_place", [False, True])
def test_experts_are_never_on_the_host_twice(in_place: bool, tmp_path: Path) -> None:
    """384 MiB of 24 experts, in little more memory than that: of 16 MiB, one expert."""
    rng = np.random.default_rng(0)
    save_file({f"{name}.{expert}": rng.standard_normal((1024, 2048), np.float32) for name in ("gate", "up")
               for expert in range(24)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    bound, over = 2 * 1024 * 2048 * 4 + 32 * 2**20, list[int]()
    # Usually 28 to 34 MiB, but 54 was seen on a busy machine; what the loader itself holds is there each time.
    while len(over) < 3 and min(over, default=bound) >= bound:
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(_STACK), str(tmp_path), str(in_place)],
                              capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr[-3000:]
        over.append(int(done.stdout.splitlines()[-1]))
    assert min(over) < bound, f"{min(over) / 2**20:.0f} MiB besides the parameters"


def test_a_budget_of_bytes_is_never_exceeded() -> None:
    budget, used, peak, lock = ByteBudget(100), 0, 0, threading.Lock()

    def work(size: int) -> None:
        nonlocal used, peak
        with budget.reserve(size):
            with lock:
                used += size
                peak = max(peak, used)
            time.sleep(0.002)
            with lock:
                used -= size

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, [100, 60, 40, 30, 30, 30, 100, 1, 99, 50, 51, 10] * 3))
    assert peak == 100 and used == 0
    with pytest.raises(KeyError), budget.reserve(100):
        raise KeyError
    with budget.reserve(100):
        pass


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = InMemory({"w": np.zeros((4, 4), np.float32)})
    for progress in (False, True):
        load_params({"w": shape(4, 4)}, [WeightRule("w", "w", as_is)], checkpoint, config=model(), progress=progress)
        out, err = capsys.readouterr()
        assert out == "" and ("Loading weights: 100%" in err) == progress


def test_smollm2_loads_within_its_budget(smollm2_path: Path) -> None:
    """From the file to ready weights: under 5 seconds, and under twice the weights in peak memory."""
    script = """
        import json, sys, time
        from pathlib import Path
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.devices()
        from jaxpaged.loading.checkpoint import open_checkpoint
        from tests.loading.test_weights import load

        def peak():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

        # Seconds of both threads together: never less than what the clock shows, and the same on a busy machine.
        before, start = peak(), time.process_time()
        params = load(open_checkpoint(Path(sys.argv[1])))
        seconds = time.process_time() - start
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        print(json.dumps({"seconds": seconds, "growth": peak() - before, "size": size}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(smollm2_path)],
                          capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["size"] == 134_515_008 * 4
    assert found["seconds"] < 5
    assert found["growth"] < 1.5 * found["size"]
