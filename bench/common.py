"""Shared by the benchmarks: workloads, spreads, tables and the engine's flags."""

import json
import os
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt of token ids, and the exact number of tokens to generate."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def tokens_in(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def tokens_out(self) -> int:
        return sum(job.output_len for job in self.jobs)

    def describe(self) -> str:
        return f"{self.name}: {len(self.jobs)} requests, {self.tokens_in:,} tokens in, {self.tokens_out:,} out"


def read_workload(path: Path, limit: int | None = None) -> Workload:
    """Read {"name", "requests": [{"prompt_token_ids", "output_len"}]}; `limit` selects only the first requests."""
    content = json.loads(path.read_text())
    jobs = [Job(tuple(item["prompt_token_ids"]), item["output_len"]) for item in content["requests"][:limit]]
    return Workload(content.get("name", path.stem), tuple(jobs))


def synthetic_workload(count: int, seed: int, max_len: int = 1024, vocab_size: int = 10_000) -> Workload:
    """Random ids with lengths spread like those of ShareGPT conversations: lognormal, a long tail, medians near 100."""
    draw = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(4, min(int(draw.lognormvariate(0, sigma) * median), max_len // 2))

    jobs = [Job(tuple(draw.randrange(100, vocab_size) for _ in range(length(110, 0.8))), length(100, 0.8))
            for _ in range(count)]
    return Workload(f"synthetic, seed {seed}", tuple(jobs))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile (of few values: the largest)."""
    if not values:
        return {"mean": float("nan"), "median": float("nan"), "p99": float("nan")}
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"mean": statistics.fmean(values), "median": statistics.median(values), "p99": p99}


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """One table in Markdown, columns aligned."""
    cells = [list(map(str, header)), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in cells]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    print("\n".join(["", title, "", *lines]), flush=True)


def write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")


def peak_memory_bytes() -> int:
    """Peak memory of this process plus that of each live process below it.

    Of the address space: getrusage also counts what the parent held when it started the process.
    """
    total, waiting = 0, ["self"]
    while waiting:
        folder = Path("/proc", waiting.pop())
        status = (folder / "status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
        for task in (folder / "task").iterdir():
            waiting += (task / "children").read_text().split()
    return total


def machine_cpu_s() -> float:
    """CPU seconds that all programs of the machine, and its hypervisor, have used of its cores since boot."""
    user, nice, system, _idle, _iowait, *interrupts_and_steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts_and_steal))) / os.sysconf("SC_CLK_TCK")


def engine_arguments(flags: Sequence[str], prog: str) -> dict[str, Any]:
    """Keyword arguments of LLM from flags spelled as the server's."""
    from jaxpaged.server.args import parse_args

    config = parse_args(flags, prog).engine
    return {item.name: getattr(config, item.name) for item in fields(config)
            if getattr(config, item.name) != item.default}


def greedy(job: Job) -> Any:
    """Sampling parameters that generate exactly the job's number of tokens."""
    from jaxpaged import SamplingParams

    return SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True, detokenize=False)


def generate(llm: Any, jobs: Sequence[Job]) -> list[Any]:
    """Run the jobs all at once and return their RequestOutputs."""
    prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
    return list(llm.generate(prompts, [greedy(job) for job in jobs], use_tqdm=False))


def short_jobs(jobs: Sequence[Job], count: int) -> list[Job]:
    """Small jobs like the first ones, to run once before the clock starts."""
    return [Job(job.prompt[:32], 4) for job in jobs[:count]]


def static_batches(jobs: Sequence[Job], size: int) -> list[list[int]]:
    """Indices of the jobs in batches for an engine whose batch runs until its longest output is done.

    Sorted by output length first: that wastes fewest steps on rows that are done, which costs such an engine more than
    the padding of prompts does.
    """
    order = sorted(range(len(jobs)), key=lambda index: (jobs[index].output_len, len(jobs[index].prompt)))
    return [order[start : start + size] for start in range(0, len(order), size)]
