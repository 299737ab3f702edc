"""The time between tokens of a few streams while a long prompt is processed beside them, on this machine.

For the choice of --max-num-batched-tokens and the limits on long prompts.

A few streams are served; their time between tokens is measured alone, while one long prompt is processed, and while its
request generates too. Flags that are not this script's are the server's.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxpaged
from bench.common import engine_arguments, print_table, spread, write_json
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams

PROMPT_TOKENS = 64


def request(name: str, seed: int, length: int, max_tokens: int) -> EngineRequest:
    """Some prompt, whose answer does not end before its limit."""
    prompt = tuple((seed * 977 + index * 31) % 250 for index in range(length))
    return EngineRequest(name, prompt, SamplingParams(temperature=0), max_tokens, seed=1)


def gaps(engine: Any, steps: int, until: str | None = None) -> list[float]:
    """Seconds between tokens of the streams, over `steps` steps or until this request's first token."""
    found: list[float] = []
    last: dict[str, float] = {}
    for _ in range(steps):
        deltas = engine.step().deltas
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id == until:
                return found
            if delta.request_id in last:
                found.append(now - last[delta.request_id])
            last[delta.request_id] = now
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--long", type=int, default=4096, metavar="N", help="tokens of the long prompt (default: 4096)")
    parser.add_argument("--streams", type=int, default=16, metavar="N")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="of each measurement without a prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args, engine_flags = parser.parse_known_args()
    llm = jaxpaged.LLM(**engine_arguments(engine_flags, parser.prog))
    engine: Any = llm._engine
    for number in range(args.streams):  # with more tokens to come than will be measured
        engine.add_request(request(f"stream {number}", number, PROMPT_TOKENS, 2000))
    while engine.step().stats.num_running < args.streams:
        pass
    gaps(engine, 20)
    figures = {"alone": spread(gaps(engine, args.steps))}
    began = time.perf_counter()
    engine.add_request(request("long", 10_000, args.long, 500))
    figures["while the prompt is processed"] = spread(gaps(engine, 100_000, until="long"))
    first_token = time.perf_counter() - began
    figures["while its request generates"] = spread(gaps(engine, args.steps))
    llm.shutdown()
    print_table(
        f"{args.streams} streams beside a prompt of {args.long:,} tokens, whose first token came after "
        f"{first_token:.1f} s", ["time between tokens", "mean ms", "median ms", "P99 ms", "mean, over alone"],
        [[name, *(f"{found[part] * 1e3:.1f}" for part in ("mean", "median", "p99")),
          f"{found['mean'] / figures['alone']['mean']:.2f}"] for name, found in figures.items()])
    write_json(args.json, {"figures": figures, "first_token_s": first_token})


if __name__ == "__main__":
    main()
