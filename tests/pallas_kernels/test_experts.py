"""Routing and experts: the specification against transformers, and every path against the specification."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.models.config import ExpertsSpec
from jaxpaged.models.experts import hidden_of
from jaxpaged.pallas_kernels import gpu_experts, native_experts, reference, xla_experts
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.native_build import build
from jaxpaged.pallas_kernels.routing import RoutingRule, choose_experts
from jaxpaged.pallas_kernels.tiles import ExpertTiles, ProductTiles

DTYPES = ("float32", "bfloat16", "float16")
MARGIN = 1e-5  # between what is chosen and what is not; nearer, rounding decides
RULES = {
    "Mixtral": RoutingRule(2),
    "Qwen2-MoE": RoutingRule(4, normalized=False),
    "DeepSeek-V2": RoutingRule(6, groups=4, best_groups=2, normalized=False, scale=16.0),
    "DeepSeek-V3": RoutingRule(6, sigmoid=True, groups=4, best_groups=2, by_two=True, scale=2.5),
    "GLM-4.5": RoutingRule(5, sigmoid=True, scale=1.5),
    "all": RoutingRule(32),
    "one": RoutingRule(1, normalized=False),
    "PhiMoE": RoutingRule(2, normalized=False, margin=0.3),
    "PhiMoE, three": RoutingRule(3, normalized=False, margin=0.02),
}


def silu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def margins(logits: np.ndarray, bias: np.ndarray | None, rule: RoutingRule) -> np.ndarray:
    """[T]: by how much scores would have to change for another choice of experts, or of groups."""
    wide = logits.astype(np.float64)
    if rule.margin is not None:
        best = -np.sort(-wide, axis=1)[:, : rule.top_k, None]
        reach = rule.margin * np.maximum(np.abs(wide)[:, None], best) - (best - wide[:, None])
        gaps = best[:, :, 0] - -np.sort(-wide, axis=1)[:, 1 : rule.top_k + 1]
        return np.minimum(np.abs(reach).min(axis=(1, 2)), gaps.min(axis=1))
    power = np.exp(wide - wide.max(axis=1, keepdims=True))
    merit = (1 / (1 + np.exp(-wide)) if rule.sigmoid else power / power.sum(axis=1, keepdims=True)) + (
        0 if bias is None else bias)
    gap = np.full(len(merit), np.inf)
    if rule.groups > 1:
        grouped = np.sort(merit.reshape(len(merit), rule.groups, -1), axis=2)
        of_group = grouped[:, :, -2:].sum(axis=2) if rule.by_two else grouped[:, :, -1]
        ranked = -np.sort(-of_group, axis=1)
        gap = ranked[:, rule.best_groups - 1] - ranked[:, rule.best_groups]
        eligible = of_group >= ranked[:, [rule.best_groups - 1]]
        merit = np.where(np.repeat(eligible, grouped.shape[2], axis=1), merit, -1)
    ranked = -np.sort(-merit, axis=1)
    if rule.top_k < ranked.shape[1]:
        gap = np.minimum(gap, ranked[:, rule.top_k - 1] - ranked[:, rule.top_k])
    return gap


def by_number(expert: Any, weight: Any) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each token by their numbers: among the chosen, the order has no consequence."""
    order = np.argsort(expert, axis=1)
    return np.take_along_axis(np.asarray(expert), order, 1), np.take_along_axis(np.asarray(weight), order, 1)


@pytest.mark.parametrize("name", RULES)
def test_routing(name: str) -> None:
    rule, rng = RULES[name], np.random.default_rng(len(name))
    logits = 2 * rng.standard_normal((300, 32)).astype(np.float32)
    for bias in (None, rng.random(32).astype(np.float32) / 2):
        clear = margins(logits, bias, rule) > MARGIN
        wanted = by_number(*reference.choose_experts(logits, bias, rule))
        found = by_number(*jax.jit(partial(choose_experts, rule=rule))(jnp.asarray(logits), bias))
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(found[0][clear], wanted[0][clear])
        np.testing.assert_allclose(found[1][clear], wanted[1][clear], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", RULES)
def test_of_equal_experts_the_first_is_chosen(name: str) -> None:
    rule = RULES[name]
    [chosen], [weight] = choose_experts(jnp.zeros((1, 32)), None, rule)
    np.testing.assert_array_equal(chosen, range(rule.top_k))
    np.testing.assert_array_equal(reference.choose_experts(np.zeros((1, 32)), None, rule)[0][0], chosen)
    assert np.ptp(weight) == 0 or rule.margin is not None


def draw_weights(rng: np.random.Generator, count: int, model_dim: int, dim: int) -> tuple[np.ndarray, ...]:
    """Of `count` experts: gate and up, and down."""
    return tuple((rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32) for shape in (
        (count, model_dim, 2 * dim), (count, dim, model_dim)))


BLOCKS: dict[str, tuple[str, str, dict[str, Any], RoutingRule]] = {
    "Mixtral": ("mixtral", "MixtralSparseMoeBlock", {"num_local_experts": 8, "num_experts_per_tok": 2,
                                                     "intermediate_size": 48}, RoutingRule(2)),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3MoeSparseMoeBlock", {"num_experts": 16, "num_experts_per_tok": 4}, RoutingRule(
        4, normalized=False)),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3MoE", {
        "n_routed_experts": 32, "num_experts_per_tok": 6, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
                    RULES["DeepSeek-V3"]),
    "GLM-4.5": ("glm4_moe", "Glm4MoeMoE", {
        "n_routed_experts": 16, "num_experts_per_tok": 5, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
                RULES["GLM-4.5"]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_specification_is_what_transformers_computes(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from importlib import import_module

    from transformers import AutoConfig

    model_type, block_name, sizes, rule = BLOCKS[name]
    config = AutoConfig.for_model(model_type, hidden_size=64, moe_intermediate_size=48, **sizes)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), block_name)(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    bias = None
    if rule.sigmoid:
        block.gate.e_score_correction_bias.copy_(0.3 * torch.rand(len(block.gate.weight)))
        bias = block.gate.e_score_correction_bias.numpy().astype(np.float64)
    x = torch.randn(1, 50, 64)
    with torch.no_grad():
        found = block(x)
        wanted = found[0] if isinstance(found, tuple) else found
        wanted = wanted - block.shared_experts(x) if rule.sigmoid else wanted
    weights = {key: value.detach().numpy().astype(np.float64) for key, value in block.named_parameters()}
    rows = x[0].numpy().astype(np.float64)
    logits = rows @ weights["gate.weight"].T
    assert (margins(logits, bias, rule) > MARGIN).all()
    gate_up, down = (weights[f"experts.{name}_proj"].swapaxes(1, 2) for name in ("gate_up", "down"))
    y = reference.experts(rows, *reference.choose_experts(logits, bias, rule), gate_up, down)
    np.testing.assert_allclose(y, wanted.reshape(50, 64).numpy(), atol=2e-5 * y.std(), rtol=2e-5)


GPU = GpuTarget((9, 0), 4, interpret=True)
GPU_TILES = ExpertTiles(ProductTiles((16, 32), 32, 16, 4, 3), ProductTiles((16, 32), 32, 32, 4, 3))


@pytest.fixture(scope="module", params=["xla", "native", pytest.param("gpu", marks=pytest.mark.slow)])
def experts(request: pytest.FixtureRequest, native_folder: Path) -> Callable[..., np.ndarray]:
    """What computes them."""
    if request.param == "native":
        if failure := build(native_folder, [native_experts.kernel_for(dtype) for dtype in DTYPES]):
            pytest.skip(f"the native kernel cannot be built here: {failure}")
        run = jax.jit(native_experts.experts)
    elif request.param == "gpu":
        run = jax.jit(partial(gpu_experts.experts, hidden=silu_gated, target=GPU, tiles=GPU_TILES))
    else:
        run = jax.jit(partial(xla_experts.experts, hidden=silu_gated))
    return lambda *args: np.asarray(run(*args))


def draw(seed: int, tokens: int, count: int, top_k: int, model_dim: int, dim: int) -> tuple[np.ndarray, ...]:
    """Every kind of token: sent to some experts, to all, and nowhere."""
    rng = np.random.default_rng(seed)
    expert = np.stack([rng.permutation(count)[:top_k] for _ in range(tokens)]).astype(np.int32)
    expert[rng.random(tokens) < 0.2] = count
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, model_dim), (tokens, top_k)))
    return x, expert, weight, *draw_weights(rng, count, model_dim, dim)


@settings(max_examples=8, deadline=None)
@given(tokens=st.integers(1, 90), count=st.integers(1, 9), top_k=st.integers(1, 9), model_dim=st.integers(1, 70),
       dim=st.integers(1, 70), seed=st.integers(0, 99))
def test_any_sizes(
    experts: Callable[..., np.ndarray], tokens: int, count: int, top_k: int, model_dim: int, dim: int, seed: int
) -> None:
    args = draw(seed, tokens, count, min(top_k, count), model_dim, dim)
    np.testing.assert_allclose(experts(*args), reference.experts(*args), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("expert", [
    np.full((40, 1), 2), np.tile([0, 3], (40, 1)), np.tile(np.arange(4), (40, 1)), np.full((40, 2), 4), [[3]]],
    ids=["all sent to one", "two that nobody is sent to", "every token to all", "padding alone", "one token"])
def test_loads_at_their_extremes(experts: Callable[..., np.ndarray], expert: Any) -> None:
    expert = np.asarray(expert, np.int32)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((len(expert), 24)).astype(np.float32)
    weight = rng.random(expert.shape).astype(np.float32)
    weights = draw_weights(rng, 4, 24, 20)
    for number in set(range(4)) - set(expert.ravel().tolist()):
        for array in weights:
            array[number] = np.nan  # nobody's; of no consequence
    args = x, expert, weight, *weights
    np.testing.assert_allclose(experts(*args), reference.experts(*args), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("experts", ["native"], indirect=True)
@pytest.mark.parametrize("sizes", [(120, 8, 3, 96, 50), (150, 2, 2, 400, 30)], ids=str)
def test_a_row_is_bitwise_the_same_in_any_batch(experts: Callable[..., np.ndarray], sizes: tuple[int, ...]) -> None:
    """Alone, and among others that make its experts few rows or many; in any order."""
    x, expert, weight, *weights = draw(1, *sizes)
    whole = experts(x, expert, weight, *weights)
    order = np.random.default_rng(2).permutation(len(x))
    for rows in (order[:1], order[:9], order[:33], order[:70], order):
        np.testing.assert_array_equal(experts(x[rows], expert[rows], weight[rows], *weights), whole[rows])


@pytest.mark.parametrize("experts", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_weights_in_16_bits_give_the_results_of_float32(experts: Callable[..., np.ndarray], dtype: str) -> None:
    x, expert, weight, *weights = draw(3, 70, 4, 2, 65, 50)
    kept = [np.asarray(jnp.asarray(array, dtype)) for array in weights]
    wide = [array.astype(np.float32) for array in kept]
    np.testing.assert_array_equal(experts(x, expert, weight, *kept), experts(x, expert, weight, *wide))


def test_xla_holds_no_product_of_all_experts() -> None:
    """Its temporaries are those of one tile and of the pairs, however many experts there are."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (
        (64, 256), (64, 4), (64, 4), (128, 256, 128), (128, 64, 256))]
    shapes[1] = jax.ShapeDtypeStruct((64, 4), jnp.int32)
    compiled = jax.jit(partial(xla_experts.experts, hidden=silu_gated)).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    pairs, one_expert = 64 * 4 * 256 * 4, 3 * 256 * 64 * 4
    assert memory is not None and memory.temp_size_in_bytes < 4 * pairs + 2 * one_expert


@pytest.mark.parametrize(("path", "tokens"), [
    ("native", 13), ("native", 150), *(pytest.param("gpu", tokens, marks=pytest.mark.slow) for tokens in (13, 60))])
def test_biases_and_bounds(path: str, tokens: int, native_folder: Path) -> None:
    """What gpt-oss has, against the XLA path; the weights of an expert that nobody is sent to are NaN."""
    rng = np.random.default_rng(tokens)
    x, expert, weight, gate_up, down = draw(4, tokens, 6, 3, 24, 53)
    bias = rng.standard_normal((6, 106)).astype(np.float32)
    expert[expert == 5] = 6
    gate_up[5] = bias[5] = down[5] = np.nan
    clamp = 1.0, 1.7
    bounded = hidden_of(ExpertsSpec(53, 6, RoutingRule(3), clamp=clamp))
    by_xla: Any = partial(xla_experts.experts, hidden=bounded)
    run: Any = partial(gpu_experts.experts, hidden=bounded, target=GPU, tiles=GPU_TILES)
    if path == "native":
        if failure := build(native_folder, [native_experts.kernel_for("float32")]):
            pytest.skip(f"the native kernel cannot be built here: {failure}")
        run = jax.jit(partial(native_experts.experts, clamp=clamp))
    found, wanted = (function(*map(jnp.asarray, (x, expert, weight, gate_up, down)), bias=jnp.asarray(bias))
                     for function in (run, by_xla))
    np.testing.assert_allclose(found, wanted, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("pairs", [1, 300, pytest.param(9000, marks=pytest.mark.slow)])
def test_pairs_are_ordered_by_expert_in_tiles(pairs: int) -> None:
    """As a stable sort orders them, few by a kernel and many by XLA; every pair that is sent is in one tile."""
    rng, count, rows = np.random.default_rng(pairs), 7, 16
    expert = rng.integers(0, count + 1, pairs).astype(np.int32)
    expert[expert == 3] = 2  # nobody is sent to this one
    work = jax.jit(lambda expert: (lambda work: (work.order, work.tiles))(
        gpu_experts.order_pairs(expert, count, rows, target=GPU)))(jnp.asarray(expert))
    order, tiles = map(np.asarray, work)
    np.testing.assert_array_equal(order, np.argsort(expert, kind="stable"))
    used = tiles[tiles[:, 2] > 0]
    assert used[:, 2].max(initial=0) <= rows and 3 not in used[:, 0]
    sent = [(number, row) for number, first, held, _ in used for row in range(first, first + held)]
    ordered = expert[order]
    assert sent == [(ordered[row], row) for row in range(pairs) if ordered[row] < count]
