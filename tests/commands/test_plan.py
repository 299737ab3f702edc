"""The memory plan: against sizes that model cards publish, the engine's own arrays, and compiled steps."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.commands.plan import main
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.memory_plan import BLOCK_MULTIPLE, GIB, RESERVE_BYTES, MemoryPlan, plan_memory
from jaxpaged.execution.gpu_targets import GPUS
from tests.support.tiny_llama import CONFIG, write_model

_LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "dtype": "bfloat16",
          "tie_word_embeddings": False}


@dataclass(frozen=True)
class Published:
    """A model by its card: config, number of parameters, and KV bytes of a token in 16 bits."""

    config: dict[str, Any]
    parameters: int
    kv_bytes: int


PUBLISHED = {
    "Llama-2-13B": Published(
        _LLAMA | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
                  "num_key_value_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096},
        13_015_864_320, 2 * 40 * 40 * 128 * 2),
    "Llama-3.1-8B": Published(
        _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072},
        8_030_261_248, 2 * 32 * 8 * 128 * 2),
    "Llama-3.1-70B": Published(
        _LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                  "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072},
        70_553_706_496, 2 * 80 * 8 * 128 * 2),
    "Qwen2.5-72B": Published(
        _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 8192, "intermediate_size": 29568,
                  "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064,
                  "max_position_embeddings": 32768},
        72_706_203_648, 2 * 80 * 8 * 128 * 2),
}


def write(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return str(file)


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a config.json alone, on one H200 or shared by eight."""
    model = PUBLISHED[name]
    config = model.config
    size, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_size = size // heads * config["num_key_value_heads"]
    layer = 2 * size * size + 2 * size * kv_size + 3 * size * mlp + 2 * size
    if "Qwen" in name:
        layer += size + 2 * kv_size
    by_hand = config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * size + size
    assert by_hand == model.parameters
    file = write(tmp_path, config)
    eight = plan(capsys, file, "--device", "h200", "-tp", "8", "--no-compile")
    assert eight["parameters"] == model.parameters
    assert eight["kv_bytes_per_token"] == model.kv_bytes
    assert eight["block_bytes"] * 8 == 16 * model.kv_bytes
    norms = size * (2 * config["num_hidden_layers"] + 1)
    assert eight["weight_bytes"] == 2 * ((model.parameters - norms) // 8 + norms)
    used = eight["weight_bytes"] + eight["temporary_bytes"] + RESERVE_BYTES + eight["pool_bytes"]
    spare = int(0.9 * GPUS["h200"].memory_bytes) - used
    assert 0 <= spare < BLOCK_MULTIPLE * eight["block_bytes"]
    assert eight["concurrent_requests"]["4096"] == (eight["num_blocks"] - 1) // (4096 // 16)


def test_parts_of_mixtures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand, from the published sizes."""
    qwen = write(tmp_path, {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "moe_intermediate_size": 768, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16"})
    one = plan(capsys, qwen, "--device", "h200", "--no-compile")
    assert one["parameters"] == 30_532_122_624 and one["kv_bytes_per_token"] == 2 * 48 * 4 * 128 * 2
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert one["weight_bytes_by_part"] == {"experts": experts, "shared": 0, "others": 2 * one["parameters"] - experts}
    assert main([qwen, "--device", "h200", "--no-compile"]) == 0
    assert "experts 54.00 GiB (8 of 128 for a token), MLPs beside them 0.0 MiB" in capsys.readouterr().out


@pytest.mark.slow
def test_latents_and_mlps_beside_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3: each device holds all latents, and its share of all experts."""
    deepseek = write(tmp_path, {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"})
    found = plan(capsys, deepseek, "--device", "h200", "-tp", "16", "--no-compile")
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512 + 2 * 7168
    expert = 3 * 7168 * 2048
    mixture = 257 * expert + 7168 * 256 + 256
    assert found["parameters"] == 61 * attention + 3 * 3 * 7168 * 18432 + 58 * mixture + (2 * 129280 + 1) * 7168
    parts = found["weight_bytes_by_part"]
    assert (parts["experts"], parts["shared"]) == (58 * 256 * expert * 2 // 16, 58 * expert * 2 // 16)
    assert sum(parts.values()) == found["weight_bytes"]
    assert found["latent_dim"] == 576 and found["block_bytes"] == 61 * 16 * 576 * 2


def test_layers_with_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten layers keep everything, and fifty a window: blocks of one unit and of five, of ten layers' bytes each."""
    config = PUBLISHED["Llama-3.1-8B"].config | {
        "architectures": ["MistralForCausalLM"], "num_hidden_layers": 60, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10}
    file = write(tmp_path, config)
    argv = (file, "--device", "h200", "--no-compile")
    found = plan(capsys, *argv)
    unit = 10 * 2 * 16 * 8 * 128 * 2
    assert found["block_bytes"] == unit and found["kv_bytes_per_token"] == 6 * unit // 16 == 60 * 2 * 8 * 128 * 2
    units = found["num_blocks"] - 1
    for length, count in found["concurrent_requests"].items():
        blocks = int(length) // 16
        assert count == units // (blocks + 5 * min(blocks, 1024 // 16 + 1)), length
    assert found["concurrent_requests"]["131072"] > 5 * units // (6 * 131072 // 16), "all of it is kept"
    assert main(list(argv)) == 0
    assert "KV groups keep all tokens in 1 unit per block; a window of 1,024 in 5 units per block" \
        in capsys.readouterr().out


@pytest.mark.parametrize("flags", [
    {}, {"num_gpu_blocks_override": 77}, {"kv_cache_memory_bytes": 10**6}, {"block_size": 32, "max_num_seqs": 2},
    {"gpu_memory_utilization": 0.05, "max_num_batched_tokens": 2}], ids=str)
def test_the_engine_allocates_what_was_planned(flags: dict[str, Any], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "model")
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **flags}
    argv = [item for key, value in given.items() for item in (f"--{key.replace('_', '-')}", str(value))]
    planned = plan(capsys, str(path), "--device", "cpu", *argv)
    lines: list[str] = []
    engine = Engine(EngineConfig.from_kwargs(model=str(path), enforce_eager=True, **given), lines.append)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params)) == planned["weight_bytes"]
    pools = jax.tree.leaves(engine._runner._pools)
    assert sum(pool.nbytes for pool in pools) == planned["pool_bytes"]
    assert {pool.shape[0] for pool in pools} == {planned["num_blocks"]} == {engine.info.num_blocks}
    assert main([str(path), "--device", "cpu", *argv]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == lines[:4], "the engine prints another plan"
    engine.shutdown()


def test_what_does_not_fit_is_refused_with_flags_that_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, PUBLISHED["Llama-3.1-70B"].config)
    for device in ("h200", "a100-40g"):
        assert main([file, "--device", device, "--no-compile"]) == 1
        text = capsys.readouterr().err
        assert "weights 131.42 GiB" in text and "0 blocks" in text
        size = int(text.split("--tensor-parallel-size ")[1].split(",")[0])
        assert size == {"h200": 2, "a100-40g": 8}[device]
        plan(capsys, file, "--device", device, "-tp", str(size), "--no-compile")
    assert main([file, "--device", "h200", "-tp", "8", "--num-gpu-blocks-override", "10000000", "--no-compile"]) == 1
    assert "--num-gpu-blocks-override 199165 or less" in capsys.readouterr().err
    assert main([file, "--device", "h200", "-tp", "3", "--no-compile"]) == 1
    assert "use one of 1, 2, 4, 8, 16, 32, 64" in capsys.readouterr().err
    assert main([file, "--device", "h300", "--no-compile"]) == 1
    assert "a100-40g, a100-80g, a10, l4, l40s, h100, h200, b200" in capsys.readouterr().err


_LLAMA_2, _LLAMA_3 = "Llama-2-13B", "Llama-3.1-70B"


@pytest.mark.parametrize(("name", "flags", "helpful"), [
    (_LLAMA_2, "--device a10", ("tensor-parallel-size",)),
    (_LLAMA_2, "--device a100-40g --dtype float32", ("tensor-parallel-size", "dtype")),
    (_LLAMA_2, "--device l4 -tp 2 --kv-cache-memory-bytes 40000000000", ("kv-cache-memory-bytes",)),
    (_LLAMA_2, "--device l4 -tp 2 --num-gpu-blocks-override 4000", ("num-gpu-blocks-override",)),
    (_LLAMA_2, "--device h200 --kv-cache-memory-bytes 1000", ("kv-cache-memory-bytes",)),
    (_LLAMA_3, "--device cpu --dtype bfloat16", ()),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (_LLAMA_3, "--device h200", ("tensor-parallel-size",)),
        (_LLAMA_3, "--device a100-80g -tp 2 --max-num-batched-tokens 16384",
         ("tensor-parallel-size", "gpu-memory-utilization", "max-num-batched-tokens")),
        (_LLAMA_2, "--device a100-40g --gpu-memory-utilization 0.5",
         ("tensor-parallel-size", "gpu-memory-utilization")),
        (_LLAMA_2, "--device a100-40g --max-num-batched-tokens 4000000", ("max-num-batched-tokens",)),
        (_LLAMA_2, "--device l4 --num-gpu-blocks-override 2", ("tensor-parallel-size",)))),
])
def test_every_flag_that_a_refusal_names_helps(name: str, flags: str, helpful: tuple[str, ...], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """By following each suggestion alone."""
    argv = [write(tmp_path, PUBLISHED[name].config), *flags.split(), "--no-compile"]
    assert main(argv) == 1
    advice = capsys.readouterr().err.split("What would help: ")[1].strip()
    found = [item.split(",")[0].split(" or ")[0].split() for item in advice.split("; ")]
    if not helpful:
        assert advice == "a device with more memory, or a smaller model"
        return
    assert tuple(flag.removeprefix("--") for flag, _ in found) == helpful
    for flag, value in found:
        plan(capsys, *argv, flag, value)


@given(st.integers(1, 10**4), st.sampled_from([16, 32, 64]), st.integers(1, 5000))
def test_concurrent_requests(num_blocks: int, block_size: int, length: int) -> None:
    """By handing out blocks one after another."""
    found = MemoryPlan(1, 0, 0, 0, 0, 0, block_size, 1, num_blocks, 1)
    free, requests = num_blocks - 1, 0
    while True:
        for _ in range(0, length, block_size):
            free -= 1
        if free < 0:
            break
        requests += 1
    assert found.concurrent(length) == requests


@given(memory=st.integers(GIB, 200 * GIB), weights=st.integers(0, 150 * GIB), temporaries=st.integers(0, GIB),
       block=st.integers(1000, 10**7), share=st.floats(0.1, 1.0))
def test_a_plan_by_share_fills_it_and_no_more(memory: int, weights: int, temporaries: int, block: int,
                                              share: float) -> None:
    found = plan_memory(memory_bytes=memory, weight_bytes=weights, temporary_bytes=temporaries, block_size=16,
                        block_bytes=block, kv_bytes_per_token=block // 16, on_cpu=False, share=share, pool_bytes=None,
                        num_blocks=None)
    room = int(memory * share) - weights - temporaries - RESERVE_BYTES
    assert found.fits == (room >= 2 * block)
    if found.fits:
        assert found.needed_bytes <= memory * share
        assert room - found.pool_bytes < BLOCK_MULTIPLE * block
        assert found.num_blocks % BLOCK_MULTIPLE == 0 or found.num_blocks < BLOCK_MULTIPLE


SHAPES = {
    "SmolLM2": _LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2,
                         "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                         "max_position_embeddings": 8192},
    "tiny": CONFIG,
}


@pytest.mark.parametrize("name", SHAPES)
def test_compiled_steps_stay_below_the_bound(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, SHAPES[name])
    argv = (file, "--device", "cpu", "--gpu-memory-utilization", "0.5")
    compiled, bound = plan(capsys, *argv), plan(capsys, *argv, "--no-compile")
    assert compiled["temporaries_compiled"] and not bound["temporaries_compiled"]
    assert 0 < compiled["temporary_bytes"] <= bound["temporary_bytes"]


def test_the_plan_of_a_gpu_comes_from_a_compiled_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax_plugins", reason="JAX's CUDA plugin is not installed")
    file = write(tmp_path, PUBLISHED["Llama-3.1-8B"].config)
    argv = (file, "--device", "h200", "--max-num-batched-tokens", "2048")
    compiled, bound = plan(capsys, *argv), plan(capsys, *argv, "--no-compile")
    assert compiled["temporaries_compiled"]
    assert 10 * 2**20 < compiled["temporary_bytes"] <= bound["temporary_bytes"] < compiled["memory_bytes"] // 50


def test_a_bound_asks_for_no_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    argv = [write(tmp_path, PUBLISHED["Llama-3.1-8B"].config), "--device", "h200"]
    assert main(argv) == 0 and "needs JAX's CUDA plugin" in capsys.readouterr().err
    assert main([*argv, "--no-compile"]) == 0 and not capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit):
        main(["--tensor-paralel-size", "2"])
    assert "did you mean --tensor-parallel-size" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        EngineConfig(tensor_parallel_size=0)
