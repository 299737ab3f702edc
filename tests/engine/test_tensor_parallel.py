"""Models shared by several devices: the same results as on one, each device with its own shard, and few collectives."""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.commands.convert import main as convert
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.execution.sharding import Partition, padded, partition_of, possible_sizes
from jaxpaged.models.config import ModelConfig
from tests.support.live_server import flags_of
from tests.support.model_configs import uniform_layers
from tests.support.sameness import compare_ids
from tests.support.sharded_process import ROOT, run_cases
from tests.support.tiny_llama import CONFIG, Reference, random_prompt, random_weights, write_model

# Neither the vocabulary (257) nor the MLP divides by 4; with 8 devices two hold each KV head.
TINY: dict[str, Any] = CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
                                 "intermediate_size": 90}
LAYERS, MODEL_DIM = TINY["num_hidden_layers"], TINY["hidden_size"]
QUICK_SIZES = (1, 2)
SIZES = (*QUICK_SIZES, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8)))
TOKENS, SEQS = 7, 4
# Prompts in chunks, and too few blocks for what runs at once.
ENGINE: dict[str, Any] = {"max_num_batched_tokens": TOKENS, "max_num_seqs": SEQS, "num_gpu_blocks_override": 10}

SMALL_STEPS: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "num_gpu_blocks_override": 9,
                               "enforce_eager": True}

GREEDY = [(random_prompt(length, length), {"temperature": 0}, 24) for length in (1, 2, 15, 17, 33, 64)]
SAMPLED = [
    (random_prompt(20, 1), {"seed": 1}, 30),
    (random_prompt(33, 2), {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2}, 30),
    (random_prompt(7, 3), {"temperature": 0.4, "top_p": 0.7, "seed": 2**63 + 1}, 30),
    (random_prompt(50, 4), {"temperature": 3.0, "top_k": 200, "seed": 0}, 30),
    (random_prompt(9, 5), {"temperature": 2.0, "min_p": 0.05, "seed": 5}, 30),
]
# Each with something of the full sampler that looks at the whole vocabulary.
FULL = [
    (random_prompt(12, 6), {"temperature": 0, "logprobs": 5}, 12),
    (random_prompt(30, 7), {"seed": 7, "logprobs": 2, "presence_penalty": 0.7, "frequency_penalty": 0.3,
                            "repetition_penalty": 1.3}, 30),
    (random_prompt(8, 8), {"seed": 8, "logprobs": 0, "allowed_token_ids": [3, 64, 65, 129, 200, 255]}, 20),
    (random_prompt(21, 9), {"seed": 9, "logit_bias": {"0": 5.0, "128": 6.0, "255": 5.5, "17": -100}, "top_k": 9}, 20),
]


class Results(dict[int, dict[str, Any]]):
    """What a number of devices gives, computed when it is asked for; for the quick tests in one process."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self._model = str(model)

    def __missing__(self, size: int) -> dict[str, Any]:
        sizes = QUICK_SIZES if size in QUICK_SIZES else (size,)
        # Compiled in full for two devices; for the others, to save time, as far as it is used.
        cases = [{"size": size, "engine": {"model": self._model, "enforce_eager": size != 2, **ENGINE}, "update": True,
                  "collectives": ["forward", "sample", *["sample_full", "prompt_logprobs"] * (size == 2)],
                  "requests": GREEDY + SAMPLED + FULL} for size in sizes]
        self.update(zip(sizes, run_cases(cases), strict=True))
        return self[size]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The tiny model on several numbers of devices."""
    return Results(write_model(tmp_path_factory.mktemp("sharded") / "model", TINY))


@pytest.mark.parametrize("size", SIZES)
def test_greedy_ids(results: dict[int, dict[str, Any]], size: int) -> None:
    """In chunks, after preemption, with padding and replication."""
    reference = Reference(TINY, random_weights(TINY))
    assert results[size]["preemptions"] > 0
    for (prompt, _, count), ids in zip(GREEDY, results[size]["ids"], strict=False):
        assert reference.error(prompt, ids, count) is None


@pytest.mark.parametrize("size", SIZES[1:])
def test_seeded_draws(results: dict[int, dict[str, Any]], size: int) -> None:
    """Noise belongs to a token's place in the vocabulary, wherever it lies."""
    ours, wanted = (results[count]["ids"][len(GREEDY):] for count in (size, 1))
    assert ours == wanted and len(set(map(tuple, wanted))) == len(SAMPLED + FULL)


@pytest.mark.parametrize("size", SIZES[1:])
def test_log_probabilities(results: dict[int, dict[str, Any]], size: int) -> None:
    ours, wanted = ([list(item) for item in results[count]["logprobs"][-len(FULL):]] for count in (size, 1))
    assert [len(item) for item in wanted] == [12, 30, 20, 0]
    pairs = zip(chain(*ours), chain(*wanted), strict=True)
    for (logprob, rank, top), (expected, expected_rank, expected_top) in pairs:
        assert abs(logprob - expected) < 1e-4 and rank == expected_rank
        assert [token for token, _ in top] == [token for token, _ in expected_top]
        assert all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(top, expected_top, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_each_device_holds_its_piece(results: dict[int, dict[str, Any]], size: int) -> None:
    result = results[size]
    assert len(result["weights"]) == len(result["pools"]) == size
    assert len(set(result["weights"])) == len(set(result["pools"])) == 1
    heads = {1: 4, 2: 2, 4: 1, 8: 1}[size]
    assert result["pools"][0] == 10 * 16 * heads * 8 * 2 * LAYERS * 4
    vocab, mlp = (-(-count // size) for count in (257, 90))
    norms = MODEL_DIM * (2 * LAYERS + 1)
    layer = MODEL_DIM * (2 * 64 // size + 2 * heads * 8 + 3 * mlp)
    assert result["weights"][0] == 4 * (2 * vocab * MODEL_DIM + LAYERS * layer + norms)
    assert size != 2 or result["compilations"][0] == result["compilations"][1], "compiled after the start"


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_plan_says_what_each_device_holds(results: dict[int, dict[str, Any]], tmp_path: Path, size: int) -> None:
    """The command, against the arrays: with padding; of eight, two devices to each KV head."""
    write_model(tmp_path / "model", TINY)
    done = subprocess.run(
        [sys.executable, "-m", "jaxpaged.plan", str(tmp_path / "model" / "config.json"), "--device", "cpu", "-tp",
         str(size), *flags_of(ENGINE), "--json"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    plan, result = json.loads(done.stdout), results[size]
    assert {plan["weight_bytes"]} == set(result["weights"]) and {plan["pool_bytes"]} == set(result["pools"])
    assert plan["num_devices"] == size and plan["num_blocks"] == 10
    numbers = f"{plan['weight_bytes'] / 2**20:,.1f} MiB", f"{plan['kv_bytes_per_token']:,} bytes per token"
    assert all(number in " ".join(result["plan"]) for number in numbers)


@pytest.mark.parametrize("size", SIZES)
def test_collectives_of_a_step(results: dict[int, dict[str, Any]], size: int) -> None:
    """Two sums of [T, D] in a layer and one for the embedding; the logits stay where they are."""
    for name, found in results[size]["collectives"].items():
        kind, count = name.split()
        if size == 1:
            assert not found, name
        elif kind == "forward":
            assert Counter(map(tuple, found)) == {("all-reduce", f"f32[{count},{MODEL_DIM}]", ""): 2 * LAYERS + 1}


@pytest.mark.parametrize("size", SIZES[1:])
def test_collectives_of_the_sampler(results: dict[int, dict[str, Any]], size: int) -> None:
    """A fixed set, of one number per row, or 15; the passes that find a cut-off share one instruction in a loop."""
    for name, found in results[size]["collectives"].items():
        kind, count = name.split()
        if kind != "sample":
            continue
        one, few = f"[{count}]", f"[{count},15]"
        assert sorted(map(tuple, found)) == sorted([
            ("all-reduce", "f32" + one, "highest"), ("all-reduce", "s32" + one, "index"),
            ("all-reduce", "f32" + few, "top_k"), ("all-reduce", "f32" + one, "mass"),
            ("all-reduce", "f32" + few, "top_p"), ("all-reduce", "f32" + one, "drawn"),
            ("all-reduce", "s32" + one, "index")])


def test_no_program_moves_logits(results: dict[int, dict[str, Any]], size: int = 2) -> None:
    """Not even those that look for alternatives: at most 64 numbers of a row, or a row of the model's width."""
    assert any(name.startswith("prompt_logprobs") for name in results[size]["collectives"])
    for name, found in results[size]["collectives"].items():
        for kind, shapes, part in found:
            for shape in re.findall(r"\[([\d,]*)\]", shapes):  # several small ones may go together
                sizes = [int(number) for number in shape.split(",")]
                of_the_model = not part and sizes[1:] == [MODEL_DIM]
                from_each = sizes[-1] // size if kind == "all-gather" else sizes[-1]
                assert of_the_model or len(sizes) == 1 or from_each <= 64, (name, kind, shapes)


@pytest.mark.slow
def test_smollm2_on_three_devices(smollm2_path: Path) -> None:
    """Nine heads and three KV heads, from GGUF, against transformers."""
    rows = json.loads((Path(__file__).parents[1] / "support" / "data" / "reference_smollm2.json").read_text())[:3]
    requests = [(row["prompt_token_ids"], {"temperature": 0}, len(row["ids"])) for row in rows]
    [result] = run_cases([{"size": 3, "requests": requests, "engine": {
        "model": str(smollm2_path), "max_num_batched_tokens": 8, "max_num_seqs": 3, "num_gpu_blocks_override": 32,
        "enforce_eager": True}}])
    for row, ids in zip(rows, result["ids"], strict=True):
        assert compare_ids(ids, row["ids"], row["gaps"]) is None
    assert len(result["weights"]) == 3 and len(set(result["weights"])) == 1


@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), [
    (9, 3, (1, 3, 9)), (8, 4, (1, 2, 4, 8)), (32, 8, (1, 2, 4, 8, 16, 32)), (12, 1, (1, 2, 3, 4, 6, 12)),
    (6, 4, (1, 2)), (7, 7, (1, 7))])
def test_sizes_that_heads_can_be_shared_out_to(heads: int, kv_heads: int, sizes: tuple[int, ...]) -> None:
    config = ModelConfig("Some", 64, 257, 128, uniform_layers(
        1, heads=heads, kv_heads=kv_heads, head_dim=16, mlp_dim=90))
    assert possible_sizes(config) == sizes
    for size in sizes:
        partition = partition_of(config, size)
        assert partition.size == size and partition.kv == min(size, kv_heads)
        larger = padded(config, partition)
        assert larger.vocab_size % size == larger.layers[0].mlp.dim % size == 0
        assert larger.vocab_size - 257 < size and larger.layers[0].mlp.dim - 90 < size
    with pytest.raises(ConfigError, match=f"use one of {', '.join(map(str, sizes))}"):
        partition_of(config, 5)
    assert padded(config, Partition()) == config


@given(group=st.integers(1, 8), kv_heads=st.integers(1, 12), size=st.integers(1, 40), mlp=st.integers(1, 400),
       vocab=st.integers(1, 400))
def test_every_size_is_shared_out_or_refused(group: int, kv_heads: int, size: int, mlp: int, vocab: int) -> None:
    """By handing out heads one after another: each device needs as many, and holds the KV heads of its own."""
    heads = group * kv_heads
    config = ModelConfig("Some", 64, vocab, 128, uniform_layers(
        1, heads=heads, kv_heads=kv_heads, head_dim=16, mlp_dim=mlp))
    needed = [{head // group for head in range(heads) if head * size // heads == device} for device in range(size)]
    even = heads % size == 0 and len({len(kv) for kv in needed}) == 1 and sum(map(len, needed)) in (kv_heads, size)
    if not even:
        with pytest.raises(ConfigError, match="use one of 1"):
            partition_of(config, size)
        return
    partition = partition_of(config, size)
    assert partition.size == size == partition.shards("heads") == partition.shards("mlp") == partition.shards("vocab")
    held = np.array_split(np.arange(kv_heads), partition.shards("kv_heads"))
    assert needed == [set(held[device // partition.share]) for device in range(size)]
    larger = padded(config, partition)
    for count, whole in ((mlp, larger.layers[0].mlp.dim), (vocab, larger.vocab_size)):
        assert count <= whole < count + size and whole % size == 0


@pytest.fixture(scope="module")
def odd_sizes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Models whose sizes have few divisors, and their results on 6 and on 4 devices; the second is saved by Orbax."""
    folder, found, cases = tmp_path_factory.mktemp("odd"), [], []
    for size, heads, kv_heads in ((6, 6, 2), (4, 4, 1)):
        config = CONFIG | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8,
                           "intermediate_size": 91, "num_hidden_layers": 1}
        found.append(config)
        model = write_model(folder / str(size), config)
        if size == 4:
            assert convert([str(model), str(folder / "orbax")]) == 0
            model = folder / "orbax"
        cases.append({"size": size, "requests": [(random_prompt(20, seed), {"temperature": 0}, 30) for seed in (1, 2)],
                      "engine": {"model": str(model), **SMALL_STEPS}})
    return list(zip(found, run_cases(cases), strict=True))


@pytest.mark.parametrize("case", [0, 1])
def test_sizes_that_do_not_divide(odd_sizes: list[tuple[dict[str, Any], dict[str, Any]]], case: int) -> None:
    """Two KV heads on six devices, and one on four; 257 tokens and an MLP of 91."""
    config, result = odd_sizes[case]
    reference = Reference(config, random_weights(config))
    for seed, ids in enumerate(result["ids"], 1):
        assert reference.error(random_prompt(20, seed), ids, 30) is None
    assert len(set(result["pools"])) == 1 and result["pools"][0] == 9 * 16 * 8 * 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"model_type": "mistral", "sliding_window": 21}, {"model_type": "qwen3", "head_dim": 24},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}],
    ids=lambda changes: changes["model_type"])
def test_other_families(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Windows, norms of heads and biases on two devices, against transformers."""
    torch = pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.reference_model import ReferenceModel

    folder = write_model(tmp_path / "model")
    sizes = {key: TINY[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                        "num_attention_heads", "num_key_value_heads", "max_position_embeddings")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes | {"eos_token_id": 256} | changes))
    for name, parameter in model.named_parameters():
        scale = 1.0 if "embed" in name else 0.2 if parameter.ndim == 1 else 2 * parameter.shape[1] ** -0.5
        parameter.data = ("norm" in name) + scale * torch.randn_like(parameter)
    model.save_pretrained(folder)
    prompts = [random_prompt(length, length) for length in (10, 60)]
    # Where one layer in two has a window, a block of each takes a unit of half the bytes.
    [result] = run_cases([{"size": 2, "engine": {"model": str(folder), **SMALL_STEPS, "num_gpu_blocks_override": 17},
                           "requests": [(prompt, {"temperature": 0}, 30) for prompt in prompts]}])
    for prompt, ids in zip(prompts, result["ids"], strict=True):
        reference = ReferenceModel(folder).check(prompt, ids)
        assert len(ids) == 30 and compare_ids(ids, reference.ids, reference.gaps) is None


def test_devices_that_are_not_there() -> None:
    from jaxpaged.execution.devices import select_device

    select_device("cpu")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 64 needs 64 cpu devices, there are"):
        select_device("cpu", EngineConfig(tensor_parallel_size=64).tensor_parallel_size)


@pytest.mark.slow
def test_each_device_has_the_alibi_slopes_of_its_own_heads() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.support.sharded_alibi"], cwd=ROOT, capture_output=True,
                          text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    *found, without = (np.array(logits) for logits in json.loads(done.stdout.splitlines()[-1]))
    for logits in found[1:]:
        np.testing.assert_allclose(logits, found[0], atol=2e-5)
    assert np.abs(found[0] - without).max() > 0.01
