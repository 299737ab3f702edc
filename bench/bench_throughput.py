"""Offline throughput: all requests of a workload at once, greedy, exactly the wanted output lengths.

    python bench/bench_throughput.py --workload FILE.json
    python bench/bench_throughput.py --num-prompts 64

Other flags are the server's, such as --model, --max-num-seqs or --block-size.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxpaged
from bench.common import (
    engine_arguments,
    generate,
    peak_memory_bytes,
    print_table,
    read_workload,
    short_jobs,
    spread,
    synthetic_workload,
    write_json,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--workload", type=Path, metavar="FILE", help="token ids and output lengths")
    parser.add_argument("--num-prompts", type=int, metavar="N",
                        help="only the first N of the workload; without one, N synthetic requests (default: 32)")
    parser.add_argument("--workload-seed", type=int, default=0, metavar="N", help="of the synthetic requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args, engine_flags = parser.parse_known_args()
    engine = engine_arguments(engine_flags, parser.prog)
    workload = (read_workload(args.workload, args.num_prompts) if args.workload
                else synthetic_workload(args.num_prompts or 32, args.workload_seed))

    begin = time.perf_counter()
    with jaxpaged.LLM(**engine) as llm:
        load = time.perf_counter() - begin
        generate(llm, short_jobs(workload.jobs, 2))
        begin = time.perf_counter()
        outputs = generate(llm, workload.jobs)
        elapsed = time.perf_counter() - begin
        metrics = llm.get_metrics()
        peak = peak_memory_bytes()

    for job, output in zip(workload.jobs, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == job.output_len, "an output is shorter or longer than asked for"
    first = spread([output.metrics.first_token_time - output.metrics.arrival_time for output in outputs])
    empty = metrics["jaxpaged:kv_internal_fragmentation_ratio_mean"]
    print_table(workload.describe(), ["", "figure"], [
        ["requests", len(workload.jobs)],
        ["tokens in", f"{workload.tokens_in:,}"],
        ["tokens out", f"{workload.tokens_out:,}"],
        ["start of the engine", f"{load:.1f} s"],
        ["elapsed", f"{elapsed:.2f} s"],
        ["output tokens/s", f"{workload.tokens_out / elapsed:.1f}"],
        ["total tokens/s", f"{(workload.tokens_in + workload.tokens_out) / elapsed:.1f}"],
        ["time to first token, mean / median / P99", " / ".join(f"{value:.2f}" for value in first.values()) + " s"],
        ["KV slots held but empty", f"{empty:.2%}"],
        ["peak memory", f"{peak / 2**20:,.0f} MiB"],
    ])
    write_json(args.json, {
        "workload": workload.name, "requests": len(workload.jobs), "tokens_in": workload.tokens_in,
        "tokens_out": workload.tokens_out, "load_s": load, "elapsed_s": elapsed,
        "output_tokens_per_s": workload.tokens_out / elapsed,
        "total_tokens_per_s": (workload.tokens_in + workload.tokens_out) / elapsed,
        "time_to_first_token_s": first, "kv_slots_held_but_empty": empty, "peak_memory_bytes": peak,
        "engine": engine, "metrics": metrics,
    })


if __name__ == "__main__":
    main()
