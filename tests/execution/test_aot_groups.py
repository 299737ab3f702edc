"""Programs of models with several KV groups, compiled for absent GPUs: what layers share is updated in place, and the
memory that XLA reports is that of the plan.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_code
from bench.bench_aot import KERNELS
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.kv_groups import KVGroup
from jaxpaged.engine.planning import EngineLayout
from jaxpaged.engine.startup import layout_of, model_of, programs_of
from jaxpaged.execution import aot
from jaxpaged.execution.devices import DeviceInfo
from jaxpaged.execution.gpu_targets import find_gpu
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.execution.step_shape import ProgramName
from tests.support.compile_only import GPU_PARAMS
from tests.support.model_configs import with_windows

MIB = 2**20
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 6,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
    "sliding_window": 1024, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
# Two strips for two groups; one strip for three, with a window's block of two units.
MODELS: dict[str, tuple[dict[str, Any], tuple[int | None, ...], tuple[KVGroup, ...]]] = {
    "two": (QWEN2 | {"use_sliding_window": True, "sliding_window": 4096,
                     "layer_types": ["full_attention", "sliding_attention"] * 2}, (), (KVGroup(), KVGroup(4096))),
    # Layers of Gemma 3 27B, five of six with a window, and of Gemma 2 9B: heads of 256, soft caps.
    "gemma3": (GEMMA3, (), (KVGroup(), KVGroup(1024, 5))),
    "gemma2": (GEMMA2, (), (KVGroup(), KVGroup(4096))),
    "three": (QWEN2, (4096, None, 1024, 4096), (KVGroup(), KVGroup(1024), KVGroup(4096, 2))),
}


def programs_for(model: str, gpu_name: str, devices: int = 1, *, compiling: bool = False
                 ) -> tuple[EngineLayout, ProgramSet]:
    """With the engine's defaults on a GPU: 256 slots, 8,192 tokens in a step, blocks of 16, a pool that fills it.

    Args:
        compiling: find the temporaries of the plan by compiling.
    """
    hf, windows, groups = MODELS[model]
    gpu = find_gpu(gpu_name)
    device = DeviceInfo("cuda", gpu.kind, gpu.memory_bytes, aot.compile_only_devices(gpu, devices))
    config = EngineConfig(model="none", device="cuda", tensor_parallel_size=devices)
    source = model_of(config, hf, "cuda")
    if windows:
        source = replace(source, config=with_windows(source.config, windows))
    with aot.no_persistent_cache():
        layout = layout_of(config, source, device, print, compiling=compiling)
        assert layout.memory.groups == groups
        return layout, programs_of(config, layout, layout.definition, device, print)


def check(layout: EngineLayout, programs: ProgramSet, name: ProgramName, max_temporaries: int) -> int:
    """What must hold of a step's program; its bytes of temporaries."""
    with tempfile.TemporaryDirectory() as folder, aot.no_persistent_cache(), gpu_code.mosaic_dump(Path(folder)):
        compiled = programs.compile(name, aot.dump_options(Path(folder)))
        found = gpu_code.analyze(compiled, Path(folder), kernels=KERNELS)
    facts, memory = aot.facts_of(compiled), layout.memory
    pool = layout.cache.block_bytes // layout.partition.kv * layout.shape.num_blocks
    assert pool == memory.pool_bytes
    table = 4 * layout.definition.config.kv_layout.column_units * 257 * 2048
    assert 0 <= facts.argument_bytes - memory.weight_bytes - pool - table < MIB
    assert 0 <= facts.alias_bytes - pool - table < MIB, "the pool is not updated in place"
    assert max((op.num_bytes for op in found.copies), default=0) < MIB, found.copies
    assert facts.temporary_bytes < max_temporaries * MIB
    assert found.command_buffers == 1 and not found.outside_graphs
    layers = layout.definition.config.num_layers
    assert facts.collectives == (2 * layers + 1 if layout.partition.size > 1 else 0)
    attention = [launch.name for launch in found.work if launch.name.startswith("paged_attention_combine")]
    assert len(attention) == layers
    return facts.temporary_bytes


@pytest.mark.parametrize("model", [
    "three", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two", "gemma2", "gemma3"))])
@pytest.mark.parametrize("gpu", GPU_PARAMS)
def test_a_step_updates_the_units_that_its_layers_share_in_place(model: str, gpu: str) -> None:
    layout, programs = programs_for(model, gpu)
    capped = layout.definition.config.logit_softcap is not None  # logits are there twice, before and after
    check(layout, programs, ("forward", 64), 60 + 63 * capped)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["two", "three"])
@pytest.mark.parametrize("gpu", ["h200", "a100-80g"])
def test_the_plan_counts_what_xla_allocates(model: str, gpu: str) -> None:
    """The largest step and the smallest; the plan has compiled a model of other layers for its temporaries."""
    layout, programs = programs_for(model, gpu, compiling=True)
    memory = layout.memory
    for tokens in (16, 8192):
        temporaries = check(layout, programs, ("forward", tokens), 400)
        assert temporaries <= memory.temporary_bytes
    assert memory.temporary_bytes < 1.3 * (temporaries + 64 * MIB), "the plan wastes memory"
    assert 0 <= memory.allowed_bytes - memory.needed_bytes < 64 * memory.block_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model", ["two", "three"])
def test_two_devices_each_update_their_part(model: str) -> None:
    layout, programs = programs_for(model, "h200", 2)
    check(layout, programs, ("forward", 64), 60)
