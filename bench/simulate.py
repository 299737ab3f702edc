"""Simulates how latency grows with load, by policy and memory management, and the number of GPUs for some traffic.

For capacity planning and for work on the scheduler.

    python bench/simulate.py --plot latency.png            # a sweep over both kinds of traffic, a few minutes
    python bench/simulate.py --traffic 30 --slo 0.1        # GPUs for 30 requests/s with P99 within 0.1 s per token
    python bench/simulate.py --long-prompt 32768           # the effect of one long prompt on the others

The scheduler, the block pool and the policies are the engine's; only the time of a step is modeled, as base + tokens x
a + context x b. The default coefficients are arithmetic, not measurements: a model of 13 billion parameters in 16 bits
on a device with 1.5 TB/s, 312 TFLOP/s and 12 GiB for KV, at 85 and 70 % of these rates, as in the setting of Kwon et
al. (SOSP 2023). `--measure` fits them to the engine on this machine, which gets the remaining flags.
Requests arrive by a Poisson process; their lengths are log-normal with the means that the paper gives for ShareGPT and
Alpaca, one in ten is important (for `priority`). Latency is seconds per token of the answer, from arrival to end.
"""

import argparse
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import (
    engine_arguments,
    generate,
    print_table,
    short_jobs,
    spread,
    synthetic_workload,
    write_json,
)
from bench.simulation import Device, StepTime, fit_step_time, simulate
from bench.traffic import DATASETS, Arrival, poisson_traffic

RATES = {"sharegpt": (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5),
         "alpaca": (2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0)}
HOPELESS_SECONDS = 2.0  # a mean latency beyond which a curve is not followed to higher rates
HINT_ERROR = 0.7


@dataclass(frozen=True, slots=True)
class PolicyCurve:
    """One curve: a policy, and how well senders know the lengths of their answers."""

    label: str
    policy: str
    hint_error: float | None = None


VARIANTS = (
    PolicyCurve("maximum length reserved, fcfs", "reserve"),
    PolicyCurve("power of two reserved, fcfs", "reserve-pow2", 0.0),
    PolicyCurve("fcfs", "fcfs"),
    PolicyCurve("priority", "priority"),
    PolicyCurve("predicted, no hints", "predicted"),
    PolicyCurve("predicted, hints off by 2x", "predicted", HINT_ERROR),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One run's figures, in seconds."""

    dataset: str
    variant: str
    rate: float
    mean: float
    p99: float
    important_mean: float
    important_p99: float
    first_token_p99: float
    running: float
    filled: float
    preemptions: int


def run_point(dataset: str, variant: PolicyCurve, rate: float, device: Device, requests: int, seed: int) -> Point:
    """Simulate one rate."""
    traffic = poisson_traffic(DATASETS[dataset], rate, requests, seed=seed, context=device.context,
                              hint_error=variant.hint_error)
    run = simulate(traffic, device, variant.policy)
    every, important = run.normalized_latency(), run.normalized_latency(priority=0)
    return Point(dataset, variant.label, rate, every["mean"], every["p99"], important["mean"], important["p99"],
                 run.first_token()["p99"], run.mean_running, run.mean_filled, run.preemptions)


def run_curve(dataset: str, variant: PolicyCurve, rates: Sequence[float], device: Device, requests: int,
              seed: int) -> list[Point]:
    """Simulate rising rates until latency is hopeless."""
    points: list[Point] = []
    for rate in rates:
        points.append(run_point(dataset, variant, rate, device, requests, seed))
        if points[-1].mean > HOPELESS_SECONDS:
            break
    return points


def engines_needed(dataset: str, variant: PolicyCurve, rate: float, slo: float, device: Device, requests: int,
                   seed: int) -> tuple[int | None, dict[int, Point]]:
    """The minimum number of engines that share the traffic with P99 of the latency within `slo` seconds per token.

    A fair share of a Poisson process is one again, so simulating one engine is enough.

    Returns:
        The number, None where not even an idle engine is quick enough; and what was simulated, by number of engines.
    """
    tried: dict[int, Point] = {}

    def enough(engines: int) -> bool:
        if engines not in tried:
            tried[engines] = run_point(dataset, variant, rate / engines, device, requests, seed)
        return tried[engines].p99 <= slo

    many = 1
    while not enough(many):
        if tried[many].running < 1.05:  # hardly ever two requests at once: more engines change nothing
            return None, tried
        many *= 2
    few = many // 2
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many, tried


def plot(points: Sequence[Point], path: Path) -> None:
    """Mean latency of paged and reserved memory; mean and P99 of the policies; one row for each kind of traffic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    datasets = list(dict.fromkeys(point.dataset for point in points))
    figure, grid = pyplot.subplots(len(datasets), 3, figsize=(15, 4.2 * len(datasets)), squeeze=False,
                                   layout="constrained")
    reserve, power, fcfs, priority, *predicted = (variant.label for variant in VARIANTS)
    panels = (("mean, by memory", "mean", (reserve, power, fcfs)),
              ("mean, by policy", "mean", (fcfs, priority, *predicted)),
              ("P99, by policy", "p99", (fcfs, priority, *predicted)))
    colors = dict(zip((variant.label for variant in VARIANTS), ("C3", "C5", "C0", "C1", "C2", "C4"), strict=True))
    for row, dataset in zip(grid, datasets, strict=True):
        for axes, (title, field, labels) in zip(row, panels, strict=True):
            for label in labels:
                curve = [point for point in points if (point.dataset, point.variant) == (dataset, label)]
                name = "paged, fcfs" if label == fcfs and reserve in labels else label
                axes.plot([point.rate for point in curve], [getattr(point, field) for point in curve], "o-",
                          color=colors[label], markersize=3, label=name)
                if label == priority:
                    axes.plot([point.rate for point in curve],
                              [getattr(point, f"important_{field}") for point in curve], "o--", color=colors[label],
                              markersize=3, label="priority, the important tenth")
            axes.set(title=f"{dataset}: {title}", xlabel="requests/s", ylabel="seconds per output token",
                     yscale="log")
            axes.grid(alpha=0.3, which="both")
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def measured_device(engine: dict[str, Any], context: int) -> Device:
    """Run the engine on this machine and fit the time of its steps."""
    import jaxpaged

    samples: list[tuple[int, int, float]] = []
    with jaxpaged.LLM(**engine) as llm:
        workload = synthetic_workload(48, 0, min(1024, llm.info.max_model_len), llm.info.vocab_size)
        generate(llm, short_jobs(workload.jobs, 2))
        core: Any = llm._engine
        collect = core._collect

        def note(running: Any) -> Any:
            deltas = collect(running)
            context = sum(chunk.start + chunk.num_tokens for chunk in running.step.chunks)
            [(_, seconds)] = core._stats.step_seconds
            samples.append((running.size, context, seconds))
            return deltas

        core._collect = note
        generate(llm, workload.jobs)
        info = llm.info
    fitted = fit_step_time(samples)
    print(f"measured {len(samples)} steps on {info.device}: base {fitted.base * 1e3:.2f} ms, "
          f"{fitted.per_token * 1e6:.1f} us per token, {fitted.per_context * 1e6:.3f} us per token of context")
    return Device(fitted, (info.num_blocks - 1) * info.block_size, min(context, info.max_model_len), info.block_size,
                  info.max_num_seqs, info.max_num_batched_tokens)


def _rows(points: Iterable[Point]) -> list[list[object]]:
    return [[point.dataset, point.variant, f"{point.rate:g}", f"{point.mean:.3g}", f"{point.p99:.3g}",
             f"{point.important_mean:.3g} / {point.important_p99:.3g}", f"{point.first_token_p99:.2f}",
             f"{point.running:.1f}", f"{point.filled:.0%}", point.preemptions] for point in points]


def _sweep(args: argparse.Namespace, device: Device) -> None:
    datasets = [args.dataset] if args.dataset else list(DATASETS)
    curves = [(dataset, variant, args.rates or RATES[dataset], device, args.requests, args.seed)
              for dataset, variant in itertools.product(datasets, VARIANTS)]
    began = time.perf_counter()
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:  # --measure has started threads
        points = [point for curve in pool.map(run_curve, *zip(*curves, strict=True)) for point in curve]
    print_table(
        f"{args.requests:,} requests per run, {device.kv_tokens:,} tokens of KV, seed {args.seed}; "
        f"simulated in {time.perf_counter() - began:.0f} s",
        ["traffic", "policy", "requests/s", "mean s/token", "P99 s/token", "important mean / P99", "first token P99, s",
         "running", "KV filled", "preemptions"], _rows(points))
    write_json(args.json, [asdict(point) for point in points])
    if args.plot:
        plot(points, args.plot)


def _capacity(args: argparse.Namespace, device: Device) -> None:
    dataset = args.dataset or "sharegpt"
    found: list[dict[str, object]] = []
    for policy in args.policy or ["fcfs"]:
        variant = PolicyCurve(policy, policy, args.hint_error)
        engines, tried = engines_needed(dataset, variant, args.traffic, args.slo, device, args.requests, args.seed)
        found.append({"policy": policy, "engines": engines,
                      "tried": {count: asdict(point) for count, point in sorted(tried.items())}})
        print_table(
            f"{args.traffic:g} requests/s like {dataset}, P99 within {args.slo:g} s per token, policy {policy}",
            ["engines", "GPUs", "requests/s each", "mean s/token", "P99 s/token", "first token P99, s", "running",
             "KV filled", "within"],
            [[count, count * args.gpus_per_engine, f"{point.rate:.3g}", f"{point.mean:.3f}", f"{point.p99:.3f}",
              f"{point.first_token_p99:.2f}", f"{point.running:.1f}", f"{point.filled:.0%}",
              "yes" if point.p99 <= args.slo else "no"] for count, point in sorted(tried.items())])
        if engines is None:
            print(f"\nno number of GPUs is enough: one engine with hardly any load has P99 "
                  f"{min(point.p99 for point in tried.values()):.3f} s per token")
        else:
            print(f"\n{engines * args.gpus_per_engine} GPUs ({engines} engines of {args.gpus_per_engine})")
    write_json(args.json, found)


def _mixed(args: argparse.Namespace, device: Device) -> None:
    """The traffic without and with one long prompt, which comes after a third of it."""
    dataset, length = args.dataset or "sharegpt", args.long_prompt
    roomy = replace(device, kv_tokens=4 * device.kv_tokens + length, context=max(device.context, length + 64))
    alone = simulate([Arrival(0.0, length, 64, None, 0)], roomy).outcomes[0]
    rows: list[dict[str, Any]] = []
    for rate in args.rates or RATES[dataset][1:5]:
        short = poisson_traffic(DATASETS[dataset], rate, args.requests, seed=args.seed, context=device.context)
        long = Arrival(short[args.requests // 3].time, length, 64, None, 0)
        without, both = simulate(short, roomy), simulate(sorted([*short, long], key=lambda item: item.time), roomy)
        [took] = [item for item in both.outcomes if item.arrival is long]
        for name, run in (("without", without), ("with", both)):
            others = [item for item in run.outcomes if item.arrival is not long]
            meanwhile = [item.first_token for item in others
                         if long.time <= item.arrival.time <= long.time + took.first_token]
            rows.append({"rate": rate, "long_prompt": name,
                         "others_mean": spread([item.end for item in others])["mean"],
                         "others_p99": spread([item.normalized for item in others])["p99"],
                         "meanwhile_first_token": spread(meanwhile)["mean"],
                         "own_first_token": took.first_token if run is both else None})
    print_table(
        f"{args.requests:,} requests like {dataset} and one prompt of {length:,} tokens, which alone takes "
        f"{alone.first_token:.1f} s to its first token; steps of {device.max_num_batched_tokens:,} tokens",
        ["requests/s", "the long one", "others: mean s", "others: P99 s/token", "first token of those that come "
         "meanwhile, mean s", "its own first token, s"],
        [[f"{row['rate']:g}", row["long_prompt"], f"{row['others_mean']:.2f}", f"{row['others_p99']:.3f}",
          f"{row['meanwhile_first_token']:.2f}", "" if row["own_first_token"] is None else
          f"{row['own_first_token']:.1f}"] for row in rows])
    write_json(args.json, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--dataset", choices=list(DATASETS), help="only this kind of traffic (default: both)")
    parser.add_argument("--rates", type=float, nargs="+", metavar="X", help="requests per second to simulate")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="in each run (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same figures")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--long-prompt", type=int, metavar="N", help="tokens of one long prompt among the others, in "
                        "a pool where no request waits for memory")
    group = parser.add_argument_group("number of GPUs")
    group.add_argument("--traffic", type=float, metavar="X", help="requests per second that all engines get together")
    group.add_argument("--slo", type=float, default=0.1, metavar="SECONDS",
                       help="P99 of the seconds per token to keep (default: 0.1)")
    group.add_argument("--policy", nargs="+", choices=["fcfs", "priority", "predicted"],
                       help="policies to ask for (default: fcfs)")
    group.add_argument("--hint-error", type=float, metavar="X",
                       help="requests carry hints, with this deviation of their logarithm (default: no hints)")
    group.add_argument("--gpus-per-engine", type=int, default=1, metavar="N", help="tensor parallel size (default: 1)")
    group = parser.add_argument_group("the engine and its device")
    group.add_argument("--step-base-ms", type=float, default=20.0, metavar="X", help="of a step (default: 20)")
    group.add_argument("--step-token-us", type=float, default=120.0, metavar="X", help="per token (default: 120)")
    group.add_argument("--step-context-us", type=float, default=0.6, metavar="X",
                       help="per token of context that is read (default: 0.6)")
    group.add_argument("--kv-tokens", type=int, default=15_700, metavar="N", help="that the pool holds "
                       "(default: 15700)")
    group.add_argument("--context", type=int, default=2048, metavar="N", help="longest prompt and answer together "
                       "(default: 2048)")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    group.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N")
    group.add_argument("--measure", action="store_true", help="run the engine here and fit all of these to it")
    args, engine_flags = parser.parse_known_args()
    if args.requests < 1 or args.slo <= 0 or (args.traffic is not None and not 0 < args.traffic < math.inf):
        parser.error("--requests, --slo and --traffic must be above 0")
    if engine_flags and not args.measure:
        parser.error(f"unknown argument {engine_flags[0]}; flags of the engine need --measure")
    if args.plot and (args.traffic is not None or args.long_prompt is not None):
        parser.error("--plot draws the curves of a sweep; leave out --traffic and --long-prompt")
    if args.traffic is not None and args.long_prompt is not None:
        parser.error("--traffic and --long-prompt are two questions; ask one at a time")
    if args.measure:
        device = measured_device(engine_arguments(engine_flags, parser.prog), args.context)
    else:
        step_time = StepTime(args.step_base_ms / 1e3, args.step_token_us / 1e6, args.step_context_us / 1e6)
        device = Device(step_time, args.kv_tokens, args.context, max_num_seqs=args.max_num_seqs,
                        max_num_batched_tokens=args.max_num_batched_tokens)
    if args.traffic is not None:
        _capacity(args, device)
    elif args.long_prompt is not None:
        _mixed(args, device)
    else:
        _sweep(args, device)


if __name__ == "__main__":
    main()
