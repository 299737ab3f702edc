"""Weights that lie in memory as stored: the results of float32, in fewer bytes."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.commands.plan import main as plan
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.llm import LLM
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, random_prompt, random_weights, write_model

PROMPTS = [random_prompt(length, length) for length in (1, 7, 40)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
MIXED = {"model.layers.0.self_attn.q_proj.weight": "float32", "model.layers.1.mlp.down_proj.weight": "float16"}


def write(folder: Path, dtype: str, others: dict[str, str] | None = None, says: str | None = None) -> Path:
    """The tiny model in this dtype, but for some tensors, with a config that says so, or something else."""
    write_model(folder)
    tensors = {name: np.asarray(jnp.asarray(tensor, (others or {}).get(name, dtype)))
               for name, tensor in random_weights().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dtype": says or dtype}))
    return folder


def dtypes(llm: LLM) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(llm.get_params())
    return {".".join(str(getattr(key, "key", key)) for key in path): leaf.dtype.name for path, leaf in leaves}


def answers(llm: LLM) -> list[Any]:
    return [(item.outputs[0].token_ids, item.outputs[0].logprobs)
            for item in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(("dtype", "others"), [("bfloat16", {}), ("float16", {}), ("bfloat16", MIXED)], ids=str)
def test_answers_are_bitwise_those_of_float32(dtype: str, others: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "model", dtype, others)
    with LLM(path, **ENGINE_ARGS) as kept, LLM(path, quantization="none", **ENGINE_ARGS) as dense:
        found = dtypes(kept)
        assert set(dtypes(dense).values()) == {"float32"}
        products = {name for name in found if name.endswith((".kernel", ".table"))}
        assert {found[name] for name in found.keys() - products} == {"float32"}, "norms are widened"
        # Tensors of two types that become one parameter cannot stay.
        elsewhere = {"layers.0.attn.qkv.kernel": "float32", "layers.1.mlp.down.kernel": "float16"} if others else {}
        assert {name: found[name] for name in products} == dict.fromkeys(products, dtype) | elsewhere
        assert answers(kept) == answers(dense)
        assert kept.get_metrics().keys() == dense.get_metrics().keys()


def test_without_native_products_weights_are_widened(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "bfloat16")
    with LLM(path, cpu_linear="xla", **ENGINE_ARGS) as llm:
        assert set(dtypes(llm).values()) == {"float32"}


def test_what_the_files_hold_counts_not_what_their_config_says(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "float32", says="bfloat16")
    with LLM(path, **ENGINE_ARGS) as llm:
        assert set(dtypes(llm).values()) == {"float32"}


def test_new_weights_of_another_dtype_are_refused_with_the_flag_that_helps(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "bfloat16")
    with LLM(path, **ENGINE_ARGS) as llm:
        old = llm.get_params()
        with pytest.raises(ConfigError, match="--quantization none"):
            llm.update_weights(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), old))
        before = answers(llm)
        llm.update_weights(jax.tree.map(lambda leaf: leaf * 0, old))
        assert answers(llm) != before
        llm.update_weights(old)
        assert answers(llm) == before


def test_the_plan_counts_the_bytes_that_the_engine_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "model", "bfloat16")
    assert plan([str(path), "--json", "--no-compile", "--num-gpu-blocks-override", "33"]) == 0
    planned = json.loads(capsys.readouterr().out)
    with LLM(path, **ENGINE_ARGS) as llm:
        leaves = jax.tree.leaves(llm.get_params())
        assert planned["weight_bytes"] == sum(leaf.nbytes for leaf in leaves)
        assert planned["parameters"] == sum(leaf.size for leaf in leaves)


def test_experts_stay_as_stored_where_all_are_of_one_type(tmp_path: Path) -> None:
    """One kernel reads all experts of a layer; where one tensor has another type, all are widened."""
    pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from tests.models.test_models import write_checkpoint

    path = write_checkpoint(tmp_path / "model", "qwen2-moe")
    tensors = {name: np.asarray(jnp.asarray(tensor, jnp.bfloat16))
               for name, tensor in load_file(path / "model.safetensors").items()}
    other = "model.layers.2.mlp.experts.3.down_proj.weight"
    save_file(tensors | {other: tensors[other].astype(np.float16)}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with LLM(path, **ENGINE_ARGS) as kept, LLM(path, quantization="none", **ENGINE_ARGS) as dense:
        found = dtypes(kept)
        assert {name: found[name] for name in found if "expert_" in name} == {
            f"layers.{layer}.mlp.expert_{name}.kernel": "float32" if layer == 2 else "bfloat16"
            for layer in (0, 2, 3) for name in ("gate_up", "down")}
        assert answers(kept) == answers(dense)
