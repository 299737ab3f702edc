"""From tensors to parameters: values, layout, memory, and everything that does not match."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, Part, open_checkpoint
from jaxpaged.loading.host_memory import ByteBudget
from jaxpaged.loading.weights import load_params
from jaxpaged.models.registry import find_family
from jaxpaged.models.weight_rules import WeightRule, as_is, transposed
from tests.support.tiny_gguf import CONFIG, random_weights, write_gguf


class InMemory:
    """A checkpoint of arrays at hand, which notes what is read."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.path = Path("in-memory")
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.tensors = tensors
        self.reads: list[tuple[str, Part | None]] = []

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if self.tensors[name].dtype == np.int8:
            raise CheckpointError(f"{name} is stored as I8")
        return self.tensors[name].shape

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


def load(checkpoint: Checkpoint, dtype: Any = jnp.float32) -> dict[Any, Any]:
    """All parameters of the model that the checkpoint's config describes."""
    family = find_family(checkpoint.config)
    config = family.config_from_hf(checkpoint.config)
    model = nnx.eval_shape(lambda: family.build(config, dtype))
    return load_params(nnx.to_pure_dict(nnx.state(model)), family.weights, checkpoint, num_layers=config.num_layers,
                       ignored=family.ignored, tied=config.tie_embeddings, dtype=dtype, keep_in_place=True)


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
            "attn": {name: {"kernel": weights[f"{here}.self_attn.{name}_proj.weight"].T} for name in "qkvo"},
            "mlp": {name: {"kernel": weights[f"{here}.mlp.{name}_proj.weight"].T} for name in ("gate", "up", "down")},
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
    params = load_params(shapes, rules, checkpoint, num_layers=1, dtype=dtype, keep_in_place=True)
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
        load_params(shapes, rules, checkpoint, num_layers=2, ignored=["*.inv_freq"], tied=True)
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
        load_params(shapes, rules, checkpoint, num_layers=2, ignored=["*.inv_freq"])


def test_a_long_list_of_problems_is_cut() -> None:
    checkpoint = InMemory({f"extra.{number}": np.zeros(1, np.float32) for number in range(1000)})
    with pytest.raises(CheckpointError, match="and 980 more") as caught:
        load_params({}, [], checkpoint, num_layers=0)
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
        load_params(dict.fromkeys(tensors, shape(4, 4)), rules, Truncated(tensors), num_layers=1)


# Runs in a process with six devices.
_SHARED = """
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 6)
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from jaxpaged.loading.weights import load_params
    from jaxpaged.models.weight_rules import WeightRule, as_is, transposed
    from tests.loading.test_weights import InMemory, plus_one

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
        params = load_params(shapes, rules, checkpoint, num_layers=1, wanted=wanted, keep_in_place=in_place)
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
        load_params({"w": shape(4, 4)}, [WeightRule("w", "w", as_is)], checkpoint, num_layers=1, progress=progress)
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
