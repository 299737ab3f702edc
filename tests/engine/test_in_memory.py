"""Models in memory as research code has them: a module of one's own, weights that are wrong, missing or taken away."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged import LLM, AsyncLLM
from jaxpaged.engine.in_memory import InMemoryModel, source_in_memory
from jaxpaged.errors import ConfigError
from jaxpaged.execution.sharding import Partition
from jaxpaged.models.layers import Embedding
from jaxpaged.models.mlp import DenseMLP
from tests.support.tiny_llama import (
    CONFIG,
    ENGINE_ARGS,
    Reference,
    load_with_windows,
    module_and_params,
    random_prompt,
    random_weights,
)
from tests.support.tiny_llm import GREEDY

PROMPT = random_prompt(12, 5)
KWARGS: dict[str, Any] = ENGINE_ARGS | {"cpu_linear": "xla", "cpu_attention": "xla"}


def loaded(path: Path) -> tuple[Any, dict[Any, Any]]:
    """The module and the weights of a model on disk, both ours to change."""
    return load_with_windows(path, [None] * 2)


def ids(llm: LLM) -> list[int]:
    return list(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def copied(params: dict[Any, Any]) -> dict[Any, Any]:
    return jax.tree.map(lambda leaf: jnp.array(np.array(leaf)), params)


@pytest.fixture(scope="module")
def plain(model_path: Path) -> list[int]:
    """The greedy ids of the model as it is."""
    with LLM(model=loaded(model_path), **KWARGS) as llm:
        found = ids(llm)
    assert Reference(CONFIG, random_weights()).error(PROMPT, found, 8) is None
    return found


# A module of one's own


class ScaledMLP(DenseMLP):
    """An MLP with its output scaled."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return 0.25 * super().__call__(x)


class SteeredEmbedding(Embedding):
    """Adds a vector, which is one of its weights, to every embedding."""

    vector: nnx.Param[jax.Array]

    def __call__(self, ids: jax.Array) -> jax.Array:
        return super().__call__(ids) + self.vector[...]


@pytest.mark.parametrize("native", ["auto", "xla"])
def test_a_layer_of_ones_own_is_what_runs(native: str, model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One that scales its MLP gives what the plain model gives with its weights scaled."""
    module, params = loaded(model_path)
    module.layers[1].mlp.__class__ = ScaledMLP
    weights = random_weights()
    weights["model.layers.1.mlp.down_proj.weight"] *= 0.25
    with LLM(model=(module, params), **ENGINE_ARGS | {"cpu_linear": native}) as llm:
        found = ids(llm)
    assert "layers.1.mlp is a ScaledMLP" in capfd.readouterr().err
    assert Reference(CONFIG, weights).error(PROMPT, found, 8) is None


def test_a_module_of_ones_own_has_weights_of_its_own(plain: list[int], model_path: Path) -> None:
    module, params = loaded(model_path)
    vector = jnp.asarray(np.random.default_rng(0).standard_normal(module.config.model_dim, np.float32))
    module.embed.__class__ = SteeredEmbedding
    module.embed.vector = nnx.Param(vector)
    with LLM(model=(module, params | {"embed": params["embed"] | {"vector": vector * 0}}), **KWARGS) as llm:
        assert ids(llm) == plain
        llm.update_weights(params | {"embed": params["embed"] | {"vector": vector}})
        found = ids(llm)
    assert found != plain
    weights = random_weights()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] + np.asarray(vector)
    assert Reference(CONFIG, weights).error(PROMPT, found, 8) is None
    with pytest.raises(ConfigError, match=r"embed\.vector is missing"):
        LLM(model=(module, params), **KWARGS)


def test_a_module_of_ones_own_is_not_sharded(model_path: Path) -> None:
    module, params = loaded(model_path)
    module.layers[0].mlp.__class__ = ScaledMLP
    source = source_in_memory(InMemoryModel(module, params), "auto", print)
    with pytest.raises(ConfigError, match=r"layers.0.mlp is a ScaledMLP.*one device.*tensor_parallel_size"):
        source.define(source.config, Partition(2))


def test_the_rotary_rule_is_that_of_the_longest_text_that_is_served() -> None:
    """As of a checkpoint; also of a module that is not the plain one."""
    hf = CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    module, params = module_and_params(hf)
    for kind in (type(module.layers[0].mlp), ScaledMLP):
        module.layers[0].mlp.__class__ = kind
        for given, length in ((None, 128), (256, 256)):
            source = source_in_memory(InMemoryModel(module, params), "auto", print, given)
            for config in (source.config, source.define(source.config, Partition()).config):
                assert [spec.rope and spec.rope.length for spec in config.attention] == [length, length]


# Weights that do not fit


def changed(params: dict[Any, Any], change: str) -> dict[Any, Any]:
    table = params["embed"]["table"]
    if change == "missing":
        return {key: value for key, value in params.items() if key != "norm"}
    if change == "deleted":
        params = copied(params)
        params["embed"]["table"].delete()
        return params
    return params | {"more": {"extra": {"more": {"bias": table[0]}},
                              "shape": {"embed": {"table": table[:10]}}, "list": {"embed": {"table": [1.0, 2.0]}},
                              "integers": {"embed": {"table": table.astype(jnp.int32)}}}[change]}["more"]


@pytest.mark.parametrize(("change", "text"), [
    ("missing", "norm.scale is missing"), ("extra", "more.bias is not a weight"),
    ("shape", r"embed.table has the shape \(10, 64\) instead of \(257, 64\)"),
    ("deleted", "embed.table has been deleted"),
    ("list", "embed.table is a list, not an array"), ("integers", "embed.table has the dtype int32"),
])
def test_errors_name_the_weight(change: str, text: str, plain: list[int], model_path: Path) -> None:
    module, params = loaded(model_path)
    with pytest.raises(ConfigError, match=text):
        LLM(model=(module, changed(params, change)), **KWARGS)
    with LLM(model=(module, params), **KWARGS) as llm:
        with pytest.raises(ConfigError, match=text):
            llm.update_weights(changed(params, change))
        assert ids(llm) == plain


def test_the_dtype_of_the_activations(model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module, params = loaded(model_path)
    mixed = jax.tree.map(lambda leaf: leaf.astype(jnp.float16) if leaf.ndim == 1 else leaf, params)
    with LLM(model=(module, mixed), **KWARGS) as llm:
        assert llm.info.dtype == "float32"
    assert "weights of float32 and float16: activations are float32" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"dtype=bfloat16, but the weights are float32.*astype\('bfloat16'\)"):
        LLM(model=(module, params), dtype="bfloat16", **KWARGS)


def test_other_forms_of_the_same_weights(plain: list[int], model_path: Path) -> None:
    """States of Flax, and the text keys that checkpoints restore."""
    module, params = loaded(model_path)
    with_text = params | {"layers": {str(index): layer for index, layer in params["layers"].items()}}
    with LLM(model=(module, with_text), **KWARGS) as llm:
        nnx.update(module, params)
        for form in (nnx.state(module), with_text, params):
            llm.update_weights(form)
            assert ids(llm) == plain


# Mistakes after which the engine goes on


def test_weights_that_are_donated_elsewhere_can_be_set_again(plain: list[int], model_path: Path) -> None:
    module, params = loaded(model_path)
    lent = copied(params)
    with LLM(model=(module, lent), **KWARGS) as llm:
        jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(lent["layers"][1]["mlp"])
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"layers.1.mlp.\S+ has been deleted.*update_weights"):
                llm.generate([PROMPT], GREEDY, use_tqdm=False)
        llm.update_weights(params)
        assert ids(llm) == plain


def test_weights_that_vanish_while_requests_run_fail_those_alone(plain: list[int], model_path: Path) -> None:
    module, params = loaded(model_path)
    lent = copied(params)

    async def run() -> None:
        async with AsyncLLM(model=(module, lent), **KWARGS) as llm:
            outputs = []
            async for output in llm.generate(PROMPT, GREEDY):
                outputs.append(output)
                if len(outputs) == 2:
                    jax.tree.map(lambda leaf: leaf.delete(), lent["norm"])
            assert outputs[-1].outputs[0].finish_reason == "error"
            await llm.update_weights(params)
            [*_, last] = [output async for output in llm.generate(PROMPT, GREEDY)]
            assert list(last.outputs[0].token_ids) == plain

    asyncio.run(run())


@pytest.fixture(scope="module")
def lazy(model_path: Path) -> Iterator[Callable[[], LLM]]:
    made = []

    model = loaded(model_path)

    def make() -> LLM:
        made.append(LLM(model=model, **KWARGS))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "disable_jit": jax.disable_jit,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))),
    "x64": lambda: jax.enable_x64(True),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_of_the_caller_change_nothing(name: str, lazy: Callable[[], LLM], plain: list[int]) -> None:
    """Neither what has been compiled nor what is compiled only now; nor the start."""
    llm = lazy()
    with CONTEXTS[name]():
        assert ids(llm) == plain
        assert ids(lazy()) == plain
    assert ids(llm) == plain
