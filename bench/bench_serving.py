"""Load a running server over HTTP and measure what its clients see.

    python -m jaxpaged.server &
    python bench/bench_serving.py --num-prompts 32 --request-rate 4
    python bench/bench_serving.py --workload FILE.json --max-concurrency 16

TTFT: time to first token. TPOT: time per output token after the first. ITL: time between chunks. E2E: whole request.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.common import Job, Workload, print_table, read_workload, spread, synthetic_workload, write_json


@dataclass(slots=True)
class Answer:
    """What one client saw; times in seconds of `time.perf_counter()`."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    done: float = math.nan
    tokens_in: int = 0
    tokens_out: int = 0
    error: str | None = None


async def ask(client: httpx.AsyncClient, model: str, job: Job) -> Answer:
    """Stream one completion."""
    body = {"model": model, "prompt": list(job.prompt), "max_tokens": job.output_len, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    answer.done = time.perf_counter()
                    break
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    answer.error = str(chunk["error"])
                    return answer
                if chunk.get("usage"):
                    answer.tokens_in = chunk["usage"]["prompt_tokens"]
                    answer.tokens_out = chunk["usage"]["completion_tokens"]
                if chunk["choices"]:
                    answer.chunks.append(time.perf_counter())
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    if math.isnan(answer.done):
        answer.error = "the stream ended without [DONE]"
    elif not answer.chunks or not answer.tokens_out:
        answer.error = "the stream held no token, or no usage"
    return answer


async def load(base_url: str, api_key: str | None, workload: Workload, rate: float, concurrency: int | None,
               model: str | None, seed: int) -> tuple[list[Answer], float]:
    """Send all requests, at random times with `rate` a second on average; returns answers and the whole time."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    gate = asyncio.Semaphore(concurrency or len(workload.jobs))
    draw = random.Random(seed)
    async with httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=None) as client:
        if model is None:
            model = str((await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"])
        warm = await ask(client, model, Job(workload.jobs[0].prompt, 2))
        if warm.error:
            sys.exit(f"the first request failed: {warm.error}")

        async def one(job: Job, delay: float) -> Answer:
            await asyncio.sleep(delay)
            async with gate:
                return await ask(client, model, job)

        delays, at = [], 0.0
        for _ in workload.jobs:
            delays.append(at)
            at += 0.0 if math.isinf(rate) else draw.expovariate(rate)
        begin = time.perf_counter()
        answers = await asyncio.gather(*(one(job, delay) for job, delay in zip(workload.jobs, delays, strict=True)))
        return answers, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--model", metavar="NAME", help="(default: the first that the server names)")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="token ids and output lengths")
    parser.add_argument("--num-prompts", type=int, metavar="N",
                        help="only the first N of the workload; without one, N synthetic requests (default: 32)")
    parser.add_argument("--request-rate", type=float, default=math.inf, metavar="X",
                        help="requests a second, at random times (default: all at once)")
    parser.add_argument("--max-concurrency", type=int, metavar="N", help="maximum number of concurrent requests")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the synthetic requests and the times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    if not args.request_rate > 0:
        parser.error("--request-rate must be above 0")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        parser.error("--max-concurrency must be at least 1")
    workload = (read_workload(args.workload, args.num_prompts) if args.workload
                else synthetic_workload(args.num_prompts or 32, args.seed))
    answers, elapsed = asyncio.run(load(args.base_url.rstrip("/").removesuffix("/v1"), args.api_key, workload,
                                        args.request_rate, args.max_concurrency, args.model, args.seed))

    good = [answer for answer in answers if answer.error is None]
    tokens_in, tokens_out = sum(answer.tokens_in for answer in good), sum(answer.tokens_out for answer in good)
    times = {
        "TTFT": spread([answer.chunks[0] - answer.sent for answer in good]),
        "TPOT": spread([(answer.chunks[-1] - answer.chunks[0]) / (answer.tokens_out - 1)
                        for answer in good if answer.tokens_out > 1]),
        "ITL": spread([after - before for answer in good
                       for before, after in zip(answer.chunks, answer.chunks[1:], strict=False)]),
        "E2E": spread([answer.done - answer.sent for answer in good]),
    }
    rows: list[list[str]] = [
        ["requests done / failed", f"{len(good)} / {len(answers) - len(good)}", "", ""],
        ["elapsed", f"{elapsed:.2f} s", "", ""],
        ["requests/s", f"{len(good) / elapsed:.2f}", "", ""],
        ["tokens in / out", f"{tokens_in:,} / {tokens_out:,}", "", ""],
        ["output tokens/s", f"{tokens_out / elapsed:.1f}", "", ""],
        ["total tokens/s", f"{(tokens_in + tokens_out) / elapsed:.1f}", "", ""],
    ]
    rows += [[f"{name} ms", *(f"{1000 * value:.1f}" for value in figures.values())] for name, figures in times.items()]
    print_table(workload.describe(), ["", "figure or mean", "median", "P99"], rows)
    write_json(args.json, {
        "workload": workload.name, "request_rate": None if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency, "done": len(good), "failed": len(answers) - len(good),
        "elapsed_s": elapsed, "tokens_in": tokens_in, "tokens_out": tokens_out,
        "output_tokens_per_s": tokens_out / elapsed, "total_tokens_per_s": (tokens_in + tokens_out) / elapsed,
        **{f"{name.lower()}_s": figures for name, figures in times.items()},
    })
    for text in sorted({answer.error for answer in answers if answer.error}):
        print(f"failed: {text}", file=sys.stderr)
    sys.exit(len(good) < len(answers))


if __name__ == "__main__":
    main()
