"""Facts about the engine's GPU programs, compiled without a GPU: memory, launches, kernels; bench/results/aot.md.

    python bench/bench_aot.py --write bench/results/aot.md      # compiles for each GPU in a process of its own
    python bench/bench_aot.py --gpu h200 --json FILE            # one GPU, as JSON
    python bench/bench_aot.py --layers 32 --models llama-3.1-8b # whole models instead of two layers

The programs are the engine's own, with its defaults on a GPU (256 slots, 8,192 tokens in a step, blocks of 16) and a KV
pool that fills the GPU as for the whole model. Nothing here has run on a GPU: these are facts about code.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.aot_sharded import ShardedRow, compile_sharded, section
from bench.common import write_json

GPUS = ("h200", "a100-80g")
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}},
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16"},
}
FEW, DECODE, PREFILL = 16, 64, 8192  # below 32 tokens attention has smaller tiles
PROGRAMS = (("forward", FEW), ("forward", DECODE), ("forward", PREFILL), ("sample", 256), ("sample_full", 256))
# More programs, with flags: what is added to the name, the GPUs and the model that it is compiled for, program, flags.
VARIANTS: tuple[tuple[str, tuple[str, ...], str, tuple[str, int], dict[str, Any]], ...] = (
    (" by Triton", ("h200",), "llama-3.1-8b", ("forward", FEW), {"gpu_attention": "triton"}),
    ("", GPUS, "smollm2-135m", ("prompt_logprobs", 64), {}),
    (" processed", ("h200",), "smollm2-135m", ("sample_full", 256), {"logprobs_mode": "processed_logprobs"}),
)
KERNELS = "paged_attention|rotary_kv_write|sampler|top_tokens|experts|mosaic_gpu"
MOSAIC = "paged_attention_mosaic"  # the name of what has none of ours in its PTX
PER_LAYER_KERNEL = "paged_attention_combine"  # one in each layer, after everything that the layers share


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """One program: bytes, launches, and its Pallas kernels as dicts of `gpu_code.Kernel`, with the launch's sizes."""

    gpu: str
    model: str
    program: str
    layers: int
    pool_bytes: int
    largest_pool: int
    alias_bytes: int
    temporary_bytes: int
    largest_copy: int
    launches: int
    launches_per_layer: int
    graphs: int
    outside_graphs: tuple[str, ...]
    kernels: tuple[dict[str, Any], ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.gpu, self.model, self.program


def compile_rows(gpu_name: str, models: tuple[str, ...], layers: int) -> list[ProgramRow]:
    """Compile for one GPU."""
    import jax

    from jaxpaged.execution import aot
    from jaxpaged.execution.devices import DeviceInfo
    from jaxpaged.execution.gpu_targets import find_gpu

    gpu = find_gpu(gpu_name)
    device = DeviceInfo("cuda", gpu.kind, gpu.memory_bytes, aot.compile_only_devices(gpu))
    rows = []
    with aot.no_persistent_cache():
        for model in models:
            programs, layout = engine_programs(MODELS[model], device, layers)
            shapes = replace(layout.cache, num_strips=layers).shapes(layout.shape.num_blocks)
            pools = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)]
            for program in PROGRAMS:
                rows.append(_row(programs, program, pools, gpu, model, layers))
            for suffix, gpus, of_model, program, flags in VARIANTS:
                if gpu.name in gpus and model == of_model:
                    programs, _ = engine_programs(MODELS[model], device, layers, **flags)
                    rows.append(_row(programs, program, pools, gpu, model, layers, suffix))
    return rows


def engine_programs(hf: dict[str, Any], device: Any, layers: int, **flags: Any) -> tuple[Any, Any]:
    """The engine's programs for a model cut to `layers` layers, and the layout of the whole model.

    Args:
        device: a DeviceInfo, whose devices may be compile-only ones.
        flags: of the EngineConfig.
    """
    from jaxpaged.core.config import EngineConfig
    from jaxpaged.engine.startup import layout_of, model_of
    from jaxpaged.execution.programs import ProgramSet
    from jaxpaged.execution.sharding import Placement

    config = EngineConfig(model="none", device=device.platform, **flags)
    source = model_of(config, hf, device.platform)
    layout = layout_of(config, source, device, lambda line: None, compiling=False)
    cut = source.define(source.config.with_layers(layers), layout.partition)
    cache = replace(layout.cache, num_strips=cut.config.kv_layout.num_strips)
    programs = ProgramSet(
        cut.graph, cut.shapes, cut.config, cache, layout.shape, axes=cut.axes,
        placement=Placement.of(device.devices, layout.partition), vocab_size=cut.vocab_size, dtype=layout.dtype,
        platform=device.platform, gpu_attention=config.gpu_attention)
    return programs, layout


def _row(programs: Any, program: tuple[str, int], pools: list[int], gpu: Any, model: str, layers: int,
         suffix: str = "") -> ProgramRow:
    from bench import gpu_code
    from jaxpaged.execution import aot

    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        with gpu_code.mosaic_dump(dump):
            compiled = programs.compile(program, aot.dump_options(dump))
        facts = gpu_code.analyze(compiled, dump, kernels=KERNELS)
    names = [launch.name for launch in facts.work]
    marks = [index for index, name in enumerate(names) if name.startswith(PER_LAYER_KERNEL)]
    kernels = []
    for kernel in sorted(facts.kernels, key=lambda kernel: kernel.name):
        launch = facts.launch_of(kernel)
        kernels.append(asdict(kernel) | {"name": MOSAIC if kernel.is_mosaic else kernel.name} | {
            "grid": launch.grid, "threads": launch.threads, "shared_bytes": launch.shared_bytes,
            "blocks_per_sm": gpu_code.resident_blocks(kernel, launch, gpu)})
    return ProgramRow(
        gpu=gpu.name, model=model, program=f"{program[0]}[{program[1]}]{suffix}", layers=layers,
        pool_bytes=sum(pools), largest_pool=max(pools),
        alias_bytes=facts.alias_bytes, temporary_bytes=facts.temporary_bytes,
        largest_copy=max((op.num_bytes for op in facts.copies), default=0),
        launches=len(facts.work), launches_per_layer=marks[1] - marks[0] if len(marks) > 1 else 0,
        graphs=facts.command_buffers, outside_graphs=tuple(launch.name for launch in facts.outside_graphs),
        kernels=tuple(kernels))


def compile_in_children(gpus: tuple[str, ...], models: tuple[str, ...], layers: int) -> tuple[str, list[ProgramRow]]:
    """One process per GPU, all at once: a compiler that aborts ends only its own process.

    Returns:
        jax's version, and the rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for gpu in gpus:
            file = Path(folder, f"{gpu}.json")
            command = [sys.executable, __file__, "--gpu", gpu, "--json", str(file), "--layers", str(layers), "--models",
                       *models]
            children.append((file, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)))
        version, rows = "", []
        errors_of = [child.communicate(timeout=1200)[1].decode() for _, child in children]
        for (file, child), errors in zip(children, errors_of, strict=True):
            if child.returncode:
                raise RuntimeError(f"{file.stem}: exit code {child.returncode}\n{errors[-4000:]}")
            content = json.loads(file.read_text())
            version = content["jax"]
            rows += [ProgramRow(**row) for row in content["rows"]]
        return version, rows


def compile_sharded_in_child(layers: int) -> list[ShardedRow]:
    """The model that several GPUs share, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sharded.json")
        command = [sys.executable, __file__, "--sharded", "--json", str(file), "--layers", str(layers)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stderr.decode()[-4000:]}")
        return [ShardedRow(**row) for row in json.loads(file.read_text())["rows"]]


def table_lines(rows: list[ProgramRow]) -> list[str]:
    """The table of programs and the table of kernels, in Markdown."""
    programs = [{
        "GPU": row.gpu, "model": row.model, "program": row.program,
        "pool, MiB": f"{row.pool_bytes / 2**20:,.0f}", "aliased, MiB": f"{row.alias_bytes / 2**20:,.0f}",
        "temporaries, MiB": f"{row.temporary_bytes / 2**20:,.1f}",
        "largest copy, KiB": f"{row.largest_copy / 2**10:,.1f}", "launches": row.launches,
        "per layer": row.launches_per_layer or "", "CUDA graphs": row.graphs,
        "outside of them": ", ".join(row.outside_graphs) or "none",
    } for row in rows]
    kernels = [{
        "GPU": row.gpu, "model": row.model, "program": row.program, "kernel": kernel["name"],
        "registers": kernel["registers"], "spilled": kernel["spill_bytes"],
        "shared, KiB": f"{kernel['shared_bytes'] / 1024:.1f}", "threads": kernel["threads"],
        "blocks per SM": kernel["blocks_per_sm"], "16-byte async loads": kernel["async_loads"],
        "TMA loads": kernel["tma_loads"], "barriers": kernel["barriers"],
        "mma": kernel["mma"], "wgmma": kernel["wgmma"],
        "waits for": " ".join(map(str, kernel["wait_groups"])),
    } for row in rows for kernel in row.kernels]
    return [*_markdown(programs), "", *_markdown(kernels)]


def _markdown(rows: list[dict[str, Any]]) -> list[str]:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def document(version: str, rows: list[ProgramRow], sharded: Sequence[ShardedRow] = ()) -> str:
    """bench/results/aot.md."""
    layers = " and ".join(str(count) for count in sorted({row.layers for row in rows}))
    return "\n".join([
        "# Programs compiled for GPUs that were not there", "",
        f"Made by `python bench/bench_aot.py --write bench/results/aot.md` with jax {version}; models cut to {layers} "
        "layers, bfloat16, 256 slots, 8,192 tokens in a step, blocks of 16, the KV pool of each layer as large as the "
        "plan for the whole model makes it. tests/execution/test_aot_programs.py compiles the same again and "
        "compares. No number here was measured on a GPU.", "",
        *table_lines(rows), "",
        "Aliased: what a program updates in place: the pool, the block table, ids and sampling state. Waits for: "
        "asynchronous loads that may still be under way at each wait; more than 0 means that loads and arithmetic "
        f"overlap. {MOSAIC}, which `--gpu-attention auto` chooses for steps of few tokens on one Hopper, loads by TMA "
        "instead, into a ring of three blocks, each with a barrier for its keys and one for its values; it is a custom "
        "call to XLA, its sizes are read in its PTX. By Triton: with `--gpu-attention triton`, or where the trial at "
        "start fails. Processed: with `--logprobs-mode processed_logprobs`. Matrix products outside attention are "
        "cuBLASLt's.", "",
        *(section(list(sharded)) if sharded else ())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="compile for this one, in this process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="write the tables to this file")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sharded", action="store_true", help="compile only what several GPUs share, in this process")
    args = parser.parse_args()
    sharded: list[ShardedRow] = []
    if args.sharded:
        sharded = compile_sharded(args.layers)
        write_json(args.json, {"rows": [asdict(row) for row in sharded]})
        print("\n".join(section(sharded)))
        return
    if args.gpu:
        import jax

        version, rows = jax.__version__, compile_rows(args.gpu, tuple(args.models), args.layers)
    else:
        version, rows = compile_in_children(GPUS, tuple(args.models), args.layers)
        sharded = compile_sharded_in_child(args.layers)
    if args.json:
        write_json(args.json, {"jax": version, "rows": [asdict(row) for row in rows]})
    if args.write:
        args.write.write_text(document(version, rows, sharded))
    print("\n".join(table_lines(rows)))


if __name__ == "__main__":
    main()
