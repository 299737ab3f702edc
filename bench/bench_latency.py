"""One request at a time: time to the first token, and time per token after it, as one interactive user sees them.

    python bench/bench_latency.py --read-weights
    python bench/bench_latency.py --workload FILE.json

With --read-weights the time is set against its floor on a CPU, reading all weights once: a jitted sum over them, in the
same process. Other flags are the server's, such as --model.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxpaged
from bench.common import (
    Job,
    Workload,
    engine_arguments,
    generate,
    print_table,
    read_workload,
    short_jobs,
    synthetic_workload,
    write_json,
)


def read_weights_s(llm: Any, repeat: int = 20) -> float:
    """Least time in seconds to read the engine's weights once."""
    import jax

    weights = [leaf.ravel() for leaf in jax.tree.leaves(llm.get_params())]
    # Sums of several parts, since XLA on a CPU computes the sum of a whole array on one core.
    parts = [8 if leaf.size % 8 == 0 else 1 for leaf in weights]

    def read(weights: list[jax.Array]) -> list[jax.Array]:
        return [leaf.reshape(count, -1).sum(1) for leaf, count in zip(weights, parts, strict=True)]

    program = jax.jit(read).lower(weights).compile()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        jax.block_until_ready(program(weights))
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--workload", type=Path, metavar="FILE", help="token ids and output lengths; the first is used")
    parser.add_argument("--input-len", type=int, default=64, metavar="N", help="without a workload (default: 64)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="without a workload (default: 128)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--read-weights", action="store_true", help="measure the floor too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args, engine_flags = parser.parse_known_args()
    engine = engine_arguments(engine_flags, parser.prog)
    if args.workload:
        workload = read_workload(args.workload, 1)
    else:
        ids = [token for job in synthetic_workload(args.input_len, 0).jobs for token in job.prompt][: args.input_len]
        workload = Workload("one stream", (Job(tuple(ids), args.output_len),))
    job = workload.jobs[0]
    if job.output_len < 2:
        parser.error("a time per token needs at least two output tokens")

    first, each, whole, floors = [], [], [], []
    with jaxpaged.LLM(**engine) as llm:
        generate(llm, short_jobs([job], 1))
        for _ in range(args.repeat):
            if args.read_weights:
                floors.append(read_weights_s(llm))
            begin = time.perf_counter()
            times = generate(llm, [job])[0].metrics
            whole.append((time.perf_counter() - begin) / job.output_len)
            first.append(times.first_token_time - times.arrival_time)
            each.append((times.last_token_time - times.first_token_time) / (job.output_len - 1))

    figures = {"time_to_first_token_s": first, "per_token_after_the_first_s": each, "per_token_overall_s": whole}
    if floors:
        figures["read_weights_once_s"] = floors
    rows = [[name.removesuffix("_s").replace("_", " "), f"{1000 * statistics.median(values):.1f}",
             " ".join(f"{1000 * value:.1f}" for value in values)] for name, values in figures.items()]
    ratio = None
    if floors:
        ratio = statistics.median(value / floor for value, floor in zip(each, floors, strict=True))
        rows.append(["per token over reading the weights", f"{ratio:.2f} x", ""])
    print_table(workload.describe(), ["ms", "median", "every run"], rows)
    write_json(args.json, {"workload": workload.name, "tokens_in": workload.tokens_in,
                           "tokens_out": workload.tokens_out, "engine": engine, **figures,
                           "ratio_to_reading_weights": ratio})


if __name__ == "__main__":
    main()
