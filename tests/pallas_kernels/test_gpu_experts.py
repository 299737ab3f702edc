"""The experts' kernels, compiled for absent GPUs: nothing spills, and loads of weights overlap with arithmetic."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import gpu_code
from jaxpaged.execution import aot
from jaxpaged.execution.gpu_targets import find_gpu
from jaxpaged.models.config import ExpertsSpec
from jaxpaged.models.experts import hidden_of
from jaxpaged.pallas_kernels import gpu_experts
from jaxpaged.pallas_kernels.lowering import GpuTarget, lowering_for
from jaxpaged.pallas_kernels.routing import RoutingRule
from tests.support.compile_only import OTHER_GPU, QUICK_GPU

# D, F, E, k; of gpt-oss also biases and bounds.
MODELS: dict[str, tuple[int, int, int, int]] = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8), "Mixtral-8x7B": (4096, 14336, 8, 2), "gpt-oss-120b": (2880, 2880, 128, 4),
    "DeepSeek-V3 on 8": (7168, 256, 256, 8)}
CASES = [
    (QUICK_GPU, "Qwen3-30B-A3B", 64, "bfloat16"),
    *(pytest.param(gpu, model, tokens, dtype, marks=pytest.mark.slow) for gpu, model, tokens, dtype in (
        *((gpu, model, tokens, "bfloat16") for gpu in (QUICK_GPU, OTHER_GPU) for model in MODELS
          for tokens in (1, 64, 512, 8192) if (gpu, model, tokens) != (QUICK_GPU, "Qwen3-30B-A3B", 64)),
        (QUICK_GPU, "Qwen3-30B-A3B", 64, "float16"), (OTHER_GPU, "Qwen3-30B-A3B", 64, "float32")))]


@pytest.mark.parametrize(("gpu", "model", "tokens", "dtype"), CASES)
def test_compiled(gpu: str, model: str, tokens: int, dtype: str, tmp_path: Path) -> None:
    spec = find_gpu(gpu)
    [device] = aot.compile_only_devices(spec)
    model_dim, dim, count, top_k = MODELS[model]
    bounded = model.startswith("gpt-oss")
    hidden = hidden_of(ExpertsSpec(dim, count, RoutingRule(top_k), clamp=(7.0, 1.702) if bounded else None))

    def shape(*sizes: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    args = (shape(tokens, model_dim), shape(tokens, top_k, dtype=jnp.int32), shape(tokens, top_k, dtype=jnp.float32),
            shape(count, model_dim, 2 * dim), shape(count, dim, model_dim),
            shape(count, 2 * dim) if bounded else None)

    def run(x: Any, expert: Any, weight: Any, gate_up: Any, down: Any, bias: Any) -> Any:
        return gpu_experts.experts(x, expert, weight, gate_up, down, hidden, bias, target=GpuTarget.of(device))

    chosen = gpu_experts.choose_tiles(GpuTarget.of(device), tokens * top_k, count, model_dim, dim, jnp.dtype(dtype))
    with lowering_for(device):
        lowered = jax.jit(run).lower(*args)
    with aot.no_persistent_cache():
        compiled = lowered.compile(compiler_options=aot.dump_options(tmp_path))
    facts = gpu_code.analyze(compiled, tmp_path, kernels="experts")
    for name in ("gated_experts", "down_experts"):
        kernel, launch = facts.kernel(name), facts.launch(name)
        assert not kernel.spill_bytes, kernel
        assert kernel.async_loads > 0 and kernel.overlaps, kernel
        # Where there are large tiles, too, the small ones' threads have 8 bytes of x each to load.
        tiles = getattr(chosen, name.partition("_")[0])
        assert kernel.narrow_async_loads <= 2 * tiles.num_stages * (len(tiles.rows) - 1), kernel
        assert (kernel.mma > 0) == (dtype != "float32")
        assert gpu_code.resident_blocks(kernel, launch, spec) >= 1
    assert facts.command_buffers == 1 and not facts.outside_graphs, facts.outside_graphs
    # Both products, the order, and what it is written into; then the sums. Many pairs are ordered by XLA.
    assert len(facts.work) <= (6 if tokens * top_k <= gpu_experts.MANY_PAIRS else 13)
    pairs_bytes = tokens * top_k * (model_dim + dim) * jnp.dtype(dtype).itemsize
    assert facts.temporary_bytes < 1.1 * pairs_bytes + 2**17, "more than each pair's rows"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", [QUICK_GPU, OTHER_GPU])
def test_few_tokens_read_little_more_than_the_experts_they_touch(gpu: str, model: str) -> None:
    """By count: each expert has one tile, so that its weights are read once; rows are read by every tile's columns.

    What the second-level cache, of 40 MiB or more, surely holds counts once: x, and what is between the products.
    """
    spec, (model_dim, dim, count, top_k) = find_gpu(gpu), MODELS[model]
    for tokens in (1, 16, 64):
        pairs = tokens * top_k
        tiles = gpu_experts.choose_tiles(GpuTarget(spec.compute_capability, spec.num_sms), pairs, count, model_dim, dim,
                                         jnp.dtype("bfloat16"))
        weights = min(pairs, count) * 3 * model_dim * dim
        rows = tokens * model_dim + pairs * dim
        assert 2 * rows < 8 * 2**20
        assert weights + rows + pairs * (dim + 2 * model_dim) < 1.02 * weights, (tokens, tiles)
        again = pairs * (-(-dim // tiles.gated.columns) * model_dim + -(-model_dim // tiles.down.columns) * dim)
        assert again < 0.2 * weights, "rows that come from the cache take a share of its bandwidth"
