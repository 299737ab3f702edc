"""Llama-3.1-70B's shape shared by eight absent H200s: collectives, bytes per device, temporaries.

A part of bench_aot.py, which runs it in a process of its own and writes its table.
"""

import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU, SIZE = "h200", 8
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192}}
PROGRAMS = (("forward", 64), ("forward", 8192), ("sample", 256))


@dataclass(frozen=True, slots=True)
class ShardedRow:
    """One program; bytes are each device's.

    Attributes:
        collectives: the number of each kind and shape.
        collectives_outside: those that no command buffer holds.
        plan_weight_bytes, plan_pool_bytes: of the whole model, by the plan.
    """

    program: str
    layers: int
    weight_bytes: int
    pool_bytes: int
    argument_bytes: int
    alias_bytes: int
    temporary_bytes: int
    collectives: dict[str, int]
    collectives_outside: int
    graphs: int
    plan_weight_bytes: int
    plan_pool_bytes: int


def compile_sharded(layers: int) -> list[ShardedRow]:
    """Compile the programs of the model cut to `layers` layers."""
    import jax

    from bench import gpu_code
    from bench.bench_aot import engine_programs
    from jaxpaged.execution import aot
    from jaxpaged.execution.devices import DeviceInfo
    from jaxpaged.execution.gpu_targets import find_gpu

    gpu = find_gpu(GPU)
    device = DeviceInfo("cuda", gpu.kind, gpu.memory_bytes, aot.compile_only_devices(gpu, SIZE))
    programs, layout = engine_programs(MODEL, device, layers, tensor_parallel_size=SIZE)
    weights = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                  for leaf in jax.tree.leaves(programs.params))
    rows = []
    with aot.no_persistent_cache():
        for name in PROGRAMS:
            with tempfile.TemporaryDirectory() as folder:
                facts = gpu_code.analyze(programs.compile(name, aot.dump_options(Path(folder))), Path(folder))
            rows.append(ShardedRow(
                program=f"{name[0]}[{name[1]}]", layers=layers, weight_bytes=weights,
                pool_bytes=layout.memory.pool_bytes * layers // MODEL["num_hidden_layers"],
                argument_bytes=facts.argument_bytes, alias_bytes=facts.alias_bytes,
                temporary_bytes=facts.temporary_bytes,
                collectives=dict(Counter(f"{op.kind} {op.shape}" for op in facts.collectives)),
                collectives_outside=sum(_is_collective(launch.kind) for launch in facts.outside_graphs),
                graphs=facts.command_buffers, plan_weight_bytes=layout.memory.weight_bytes,
                plan_pool_bytes=layout.memory.pool_bytes))
    return rows


def _is_collective(kind: str) -> bool:
    return any(part in kind for part in ("AllReduce", "AllGather", "Collective", "ReduceScatter"))


def section(rows: list[ShardedRow]) -> list[str]:
    """The table and what it says, in Markdown."""
    cells = [["program", "layers", "weights", "pool", "arguments", "aliased", "temporaries", "collectives",
              "outside of graphs", "CUDA graphs"], ["---"] * 10]
    for row in rows:
        cells.append([row.program, str(row.layers),
                      *(f"{size / 2**20:,.1f}" for size in (row.weight_bytes, row.pool_bytes, row.argument_bytes,
                                                            row.alias_bytes, row.temporary_bytes)),
                      "; ".join(f"{count} {kind}" for kind, count in sorted(row.collectives.items())) or "none",
                      str(row.collectives_outside), str(row.graphs)])
    whole = rows[0]
    weights, pool = whole.plan_weight_bytes / 2**30, whole.plan_pool_bytes / 2**30
    return [
        "## Llama-3.1-70B shared by eight H200s", "",
        f"MiB on each device, {whole.layers} of 80 layers; the whole model's weights are {weights:.2f} GiB and its KV "
        f"pool {pool:.2f} GiB on each. The sampler's sums lie in loops, as many passes as a cut-off needs.", "",
        *(f"| {' | '.join(line)} |" for line in cells), ""]
