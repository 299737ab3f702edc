"""Engines whose pages hold latents: transformers' ids with prefix hits, forks, few blocks, swap, and 8-bit pages."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.models.registry import find_family
from tests.models.test_models import write_checkpoint
from tests.support.sameness import compare_ids, num_decided
from tests.support.tiny_engine import engines, run
from tests.support.tiny_llama import random_prompt

GREEDY = SamplingParams(temperature=0)
REQUESTS = [
    *(EngineRequest(f"own {seed}", tuple(random_prompt(3 + 19 * seed, seed)), GREEDY, 25) for seed in range(4)),
    *(EngineRequest(f"shared {seed}", (*random_prompt(65, 9), seed), GREEDY, 25) for seed in range(2)),
    *(EngineRequest(f"choice {choice}", tuple(random_prompt(45, 8)), GREEDY, 25, choice=choice,
                    fork_of="choice 0" if choice else None) for choice in range(3)),
]
FEW: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 7, "preemption_mode": "swap",
                       "swap_space": "0.01G"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("latents") / "model", "deepseek-v3")


def reference(folder: Path, bits: int | None = None) -> Any:
    """transformers; with latents and rotated keys rounded together, token by token, to integers of so many bits."""
    from tests.support.reference_model import ReferenceModel

    found = ReferenceModel(folder)
    for layer in found.model.model.layers if bits else ():
        layer.self_attn.expand_kv = _rounding(layer.self_attn.expand_kv, 2 ** (bits or 1) // 2 - 1)
    return found


def _rounding(expand: Any, largest: int) -> Any:
    import torch

    def expand_rounded(latent: Any, turned: Any) -> Any:
        row = torch.cat([latent, turned], dim=-1)
        scale = row.abs().amax(dim=-1, keepdim=True) / largest
        return expand(*(torch.round(row / scale) * scale).split([latent.shape[-1], turned.shape[-1]], dim=-1))

    return expand_rounded


@pytest.mark.parametrize(("how", "bits"), [
    (FEW, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (FEW | {"cpu_attention": "xla"}, None), (FEW | {"kv_cache_dtype": "int8"}, 8),
        ({"num_gpu_blocks_override": 11, "max_num_batched_tokens": 7, "enable_prefix_caching": False}, None)))],
                         ids=str)
def test_greedy_ids(folder: Path, how: dict[str, Any], bits: int | None) -> None:
    model, prompts = reference(folder, bits), {item.request_id: item.prompt_token_ids for item in REQUESTS}
    with engines(folder) as make:
        engine = make(**how)
        for _ in range(2):  # the second time prefixes are there
            ids, _ = run(engine, REQUESTS)
            decided = 0
            for name, found in ids.items():
                greedy = model.check(prompts[name], found)
                assert compare_ids(found, greedy.ids, greedy.gaps) is None, name
                decided += num_decided(greedy.gaps)
            assert decided > 120, "too many near-ties to mean anything"
        stats = engine.stats()
    assert stats.num_preemptions > 0 or "num_gpu_blocks_override" not in how
    assert stats.blocks_swapped_in > 0 or "swap_space" not in how


def test_a_block_holds_one_latent_per_token(folder: Path) -> None:
    """For all heads together: 32 numbers, and 8 that are rotated."""
    checkpoint = open_checkpoint(folder)
    config = find_family(checkpoint.config).config_from_hf(checkpoint.config)
    sizes = {dtype: KVCacheSpec.of(config, 16, jnp.dtype(dtype)).block_bytes
             for dtype in ("float32", "bfloat16", "int8")}
    assert sizes == {"float32": 3 * 16 * 40 * 4, "bfloat16": 3 * 16 * 40 * 2, "int8": 3 * 16 * (40 + 4)}
