"""The KV blocks that sharing saves: several choices of one prompt, and beams.

    python bench/bench_sharing.py

Prompts and answers are as long as Alpaca's on average (19 and 58 tokens), as in the PagedAttention paper (Kwon et al.,
SOSP 2023, section 6.3), which saved 6.1 to 9.8 % of the blocks with parallel sampling and 37.6 to 55.2 % with beams.
The saving is the share of the blocks that requests would use without sharing, summed up over steps. Other
flags are the server's.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import engine_arguments, print_table, write_json


def prompts(count: int) -> Iterator[dict[str, list[int]]]:
    draw = random.Random(0)
    for _ in range(count):
        length = max(4, round(draw.gauss(19, 5)))
        yield {"prompt_token_ids": [draw.randrange(100, 10_000) for _ in range(length)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--num-prompts", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=58, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 6], metavar="N",
                        help="choices or beams of a prompt (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args, flags = parser.parse_known_args()

    from jaxpaged import LLM, SamplingParams

    arguments = engine_arguments(flags, parser.prog)
    report = []
    with LLM(**arguments) as llm:
        for size in args.sizes:
            row: list[float] = []
            for beams in (False, True):
                params = SamplingParams(n=size, max_tokens=args.output_len, ignore_eos=True, use_beam_search=beams,
                                        detokenize=False)
                row.append(saved(llm, list(prompts(args.num_prompts)), params))
            report.append({"size": size, "choices_saved": row[0], "beams_saved": row[1]})
    print_table(f"KV blocks saved by sharing, {args.num_prompts} prompts at once",
                ["choices or beams", "choices", "beams"],
                [[item["size"], f"{item['choices_saved']:.1%}", f"{item['beams_saved']:.1%}"] for item in report])
    write_json(args.json, report)


def saved(llm: object, requests: Sequence[object], params: object) -> float:
    llm.reset_prefix_cache()  # type: ignore[attr-defined]
    before = llm.get_metrics()  # type: ignore[attr-defined]
    llm.generate(requests, params, use_tqdm=False)  # type: ignore[attr-defined]
    after = llm.get_metrics()  # type: ignore[attr-defined]
    used, shared = (after[name] - before[name]
                    for name in ("jaxpaged:kv_blocks_used_sum", "jaxpaged:kv_blocks_shared_sum"))
    return float(shared / (used + shared))


if __name__ == "__main__":
    main()
