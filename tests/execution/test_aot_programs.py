"""The engine's own programs compiled for absent GPUs: in place, few launches, one CUDA graph, good code.

The numbers are compared with bench/results/aot.md, so that a change for the worse is seen.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from bench.bench_aot import DECODE, FEW, GPUS, MODELS, MOSAIC, PREFILL, ProgramRow, compile_in_children, document
from jaxpaged.pallas_kernels.tiles import MOSAIC as TILES
from tests.support.compile_only import OTHER_GPU, QUICK_GPU

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "bench" / "results" / "aot.md"
MIB = 2**20

# Most temporaries of a step in MiB: activations of its tokens, cuBLASLt's workspace, partial results of attention.
MAX_TEMPORARIES = {
    "llama-3.1-8b": {FEW: 40, DECODE: 40, PREFILL: 700},
    "smollm2-135m": {FEW: 20, DECODE: 20, PREFILL: 60},
    "qwen3-30b-a3b": {FEW: 20, DECODE: 20, PREFILL: 350},
}
# Two norms, four products, rotation and write, attention and its merge, the gate. With experts: norms of heads, the
# router and its choice, the order, both products, the sum; XLA orders the pairs of many tokens.
MAX_LAUNCHES_PER_LAYER = {
    "llama-3.1-8b": {FEW: 10, DECODE: 10, PREFILL: 10},
    "smollm2-135m": {FEW: 10, DECODE: 10, PREFILL: 10},
    "qwen3-30b-a3b": {FEW: 20, DECODE: 20, PREFILL: 29},
}


# Each model for each GPU; the quick tests compile the larger one for one.
BUILDS = [pytest.param((gpu, model), marks=[] if (gpu, model) == (QUICK_GPU, "llama-3.1-8b") else [pytest.mark.slow],
                       id=f"{gpu}-{model}") for gpu in (QUICK_GPU, OTHER_GPU) for model in MODELS]


@dataclass(frozen=True)
class Build:
    """Two layers of a model, compiled for a GPU."""

    gpu: str
    model: str
    version: str
    rows: list[ProgramRow]

    def programs(self, kind: str) -> list[ProgramRow]:
        return [row for row in self.rows if row.program.startswith(f"{kind}[")]


@pytest.fixture(scope="module", params=BUILDS)
def compiled(request: pytest.FixtureRequest) -> Build:
    gpu, model = request.param
    return Build(gpu, model, *compile_in_children((gpu,), (model,), 2))


def test_every_gpu_of_the_table_is_compiled_for() -> None:
    assert set(GPUS) == {QUICK_GPU, OTHER_GPU}


def check_forward(row: ProgramRow) -> None:
    """What must hold of a step's program at any number of layers."""
    name = " ".join(row.key)
    tokens = int(re.findall(r"\d+", row.program)[-1])
    assert row.alias_bytes >= row.pool_bytes, f"{name}: the pool is not updated in place"
    assert row.largest_copy < row.largest_pool / 4, f"{name}: copies {row.largest_copy:,} bytes"
    assert row.temporary_bytes < MAX_TEMPORARIES[row.model][tokens] * MIB, f"{name}: {row.temporary_bytes:,} bytes"
    assert row.temporary_bytes < row.largest_pool, name
    assert row.graphs == 1 and not row.outside_graphs, f"{name}: {row.graphs} graphs, outside {row.outside_graphs}"
    kernels = {kernel["name"]: kernel for kernel in row.kernels}
    limit = MAX_LAUNCHES_PER_LAYER[row.model][tokens]
    assert row.launches_per_layer <= limit, f"{name}: {row.launches_per_layer} launches per layer"
    for kernel in kernels.values():
        assert kernel["spill_bytes"] == 0 and kernel["registers"] <= 255, f"{name}: {kernel}"
        assert kernel["blocks_per_sm"] >= 1, f"{name}: {kernel}"
    assert (MOSAIC in kernels) == (row.gpu == "h200" and row.program == f"forward[{FEW}]"), name
    if attention := kernels.get(MOSAIC):
        # At limit keys and values of a block before the loop for each stage but one, and as many in it; barriers of
        # each stage, and one of the queries.
        assert attention["tma_loads"] >= 2 * TILES.num_stages and attention["wgmma"] > 0, f"{name}: {attention}"
        assert attention["barriers"] == 2 * TILES.num_stages + 1, f"{name}: {attention}"
    else:
        attention = kernels["paged_attention"]
        assert attention["async_loads"] > 0 and attention["narrow_async_loads"] == 0, f"{name}: {attention}"
        assert attention["mma"] + attention["wgmma"] > 0, f"{name}: {attention}"
        assert max(attention["wait_groups"]) > 0, f"{name}: loads do not overlap with arithmetic: {attention}"
    if row.gpu == "h200" and tokens == PREFILL:
        assert attention["wgmma"] > 0, f"{name}: {attention}"
    assert kernels["rotary_kv_write"]["wide_loads"] > 0, f"{name}: {kernels['rotary_kv_write']}"


def test_steps_run_in_place_in_one_graph(compiled: Build) -> None:
    rows = [row for row in compiled.rows if row.program.startswith("forward")]
    assert len(rows) == 3 + ((compiled.model, compiled.gpu) == ("llama-3.1-8b", "h200"))
    for row in rows:
        check_forward(row)


def test_prompt_logprobs_are_one_graph(compiled: Build) -> None:
    rows = compiled.programs("prompt_logprobs")
    assert len(rows) == (compiled.model == "smollm2-135m")
    for row in rows:
        assert row.alias_bytes >= row.pool_bytes and row.graphs == 1 and not row.outside_graphs, row
        assert not any(kernel["spill_bytes"] for kernel in row.kernels), row


def test_sampling_is_one_launch_without_temporaries(compiled: Build) -> None:
    [row] = compiled.programs("sample")
    assert row.launches == 1 and row.temporary_bytes == 0, row
    assert [kernel["name"] for kernel in row.kernels] == ["sampler"] and row.kernels[0]["spill_bytes"] == 0


def test_full_sampling_is_one_graph(compiled: Build) -> None:
    """No sort, no loop and no branch: all of it is launched at once; for one model, in both modes of logprobs."""
    rows = compiled.programs("sample_full")
    assert len(rows) == 1 + ((compiled.gpu, compiled.model) == ("h200", "smollm2-135m"))
    for row in rows:
        assert row.graphs == 1 and not row.outside_graphs, row
        assert {kernel["name"] for kernel in row.kernels} >= {"sampler", "top_tokens"}
        assert not any(kernel["spill_bytes"] for kernel in row.kernels), row


def tables(text: str) -> tuple[dict[tuple[str, ...], dict[str, str]], ...]:
    """The two Markdown tables: rows by their first three or four cells."""
    found: list[dict[tuple[str, ...], dict[str, str]]] = []
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
            found.append({})
        elif not set(line) <= set("|- "):
            found[-1][tuple(cells[: 4 if "kernel" in header else 3])] = dict(zip(header, cells, strict=True))
    return tuple(found)


def test_nothing_is_worse_than_in_the_committed_table(compiled: Build) -> None:
    """Temporaries, registers and what the layers share may grow a little; the rest may only get better."""
    committed = TABLE.read_text()
    if f"with jax {jax.__version__};" not in committed:
        pytest.skip(f"the table was made with another version of jax than {jax.__version__}")
    hint = "if it is wanted: python bench/bench_aot.py --write bench/results/aot.md"
    for was, now in zip(tables(committed)[:2], tables(document(compiled.version, compiled.rows)), strict=True):
        assert {key for key in was if key[:2] == (compiled.gpu, compiled.model)} == now.keys(), hint
        for key in now:
            before = was[key]
            for column, slack in (("temporaries, MiB", 1.05), ("launches", 1.1), ("per layer", 1), ("CUDA graphs", 1),
                                  ("registers", 1.1), ("spilled", 1), ("shared, KiB", 1)):
                if before.get(column):
                    limit, found = (float(row[column].replace(",", "")) for row in (before, now[key]))
                    assert found <= limit * slack, f"{' '.join(key)}: {column} was {limit}, is {found}; {hint}"
            for column in ("blocks per SM", "waits for"):
                if before.get(column):
                    limit, found = (max(map(float, row[column].split())) for row in (before, now[key]))
                    assert found >= limit, f"{' '.join(key)}: {column} was {limit}, is {found}; {hint}"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("model", "layers"), [("llama-3.1-8b", 32), ("smollm2-135m", 30)])
def test_the_whole_model_is_as_its_first_layers(model: str, layers: int, gpu: str) -> None:
    """All layers: the same per layer, still one graph, no more temporaries."""
    _, rows = compile_in_children((gpu,), (model,), layers)
    steps = [row for row in rows if row.program.startswith("forward")]
    assert len(steps) >= 3
    for row in steps:
        check_forward(row)
