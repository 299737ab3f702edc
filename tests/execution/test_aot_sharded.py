"""Llama-3.1-70B's shape over eight absent H200s: few collectives, all in the graph, each device its shard.

The numbers are compared with bench/results/aot.md, so that a change for the worse is seen.
"""

from pathlib import Path

import jax
import pytest

from bench.aot_sharded import MODEL, SIZE, ShardedRow, section
from bench.bench_aot import compile_sharded_in_child
from tests.execution.test_aot_programs import tables

TABLE = Path(__file__).resolve().parents[2] / "bench" / "results" / "aot.md"
MIB = 2**20
LAYER = (2 * MODEL["hidden_size"] ** 2 + 2 * MODEL["hidden_size"] * 8 * 128
         + 3 * MODEL["hidden_size"] * MODEL["intermediate_size"])
ENDS = 2 * MODEL["vocab_size"] * MODEL["hidden_size"]
NORM = MODEL["hidden_size"]


@pytest.fixture(scope="module")
def rows() -> list[ShardedRow]:
    pytest.importorskip("jax_plugins", reason="JAX's CUDA plugin is not installed")
    return compile_sharded_in_child(2)


def check(rows: list[ShardedRow], layers: int) -> None:
    """What holds at any number of layers."""
    for row, tokens, max_temporaries in zip(rows[:2], (64, 8192), (40, 600), strict=True):
        assert row.collectives == {f"all-reduce bf16[{tokens},{MODEL['hidden_size']}]": 2 * layers + 1}, row
        assert row.graphs == 1 and row.collectives_outside == 0, "the collectives split the graph"
        assert row.weight_bytes == 2 * ((layers * LAYER + ENDS) // SIZE + NORM * (2 * layers + 1))
        assert row.plan_weight_bytes == 2 * ((80 * LAYER + ENDS) // SIZE + NORM * 161)
        assert row.pool_bytes == row.plan_pool_bytes * layers // 80
        assert row.pool_bytes <= row.alias_bytes < row.pool_bytes + 16 * MIB, "the pool is not updated in place"
        assert 0 <= row.argument_bytes - row.weight_bytes - row.pool_bytes < 16 * MIB
        assert row.temporary_bytes < max_temporaries * MIB


def test_a_step_shared_by_eight(rows: list[ShardedRow]) -> None:
    check(rows, 2)
    sampler = rows[2]
    assert sum(sampler.collectives.values()) == 7
    for name in sampler.collectives:
        sizes = name.split("[")[1].rstrip("]").split(",")
        assert name.startswith("all-reduce") and sizes[0] == "256" and int([*sizes, "1"][1]) <= 64, name


def test_nothing_is_worse_than_in_the_committed_table(rows: list[ShardedRow]) -> None:
    committed = TABLE.read_text()
    if f"with jax {jax.__version__};" not in committed:
        pytest.skip(f"the table was made with another version of jax than {jax.__version__}")
    hint = "if it is wanted: python bench/bench_aot.py --write bench/results/aot.md"
    was, [now] = tables(committed)[2], tables("\n".join(section(rows)))
    assert [key[:2] for key in was] == [key[:2] for key in now], hint
    for before, after in zip(was.values(), now.values(), strict=True):
        for column, slack in (("weights", 1), ("temporaries", 1.05), ("outside of graphs", 1), ("CUDA graphs", 1)):
            limit, found = (float(row[column].replace(",", "")) for row in (before, after))
            assert found <= limit * slack, f"{before['program']}: {column} was {limit}, is {found}; {hint}"
        assert before["collectives"] == after["collectives"], hint


@pytest.mark.slow
def test_all_80_layers() -> None:
    pytest.importorskip("jax_plugins", reason="JAX's CUDA plugin is not installed")
    check(compile_sharded_in_child(80), 80)
