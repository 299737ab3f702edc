"""The same workload through Hugging Face transformers and jaxpaged in turn, and the median ratio of their times.

    python bench/compare.py --workload FILE.json [FILE.json ...]

transformers runs in float32 in static batches, sorted by output length so that few rows run past their end, and
padded on the left. vLLM, OpenVINO GenAI (with optimum-intel) and llama.cpp's server join where they are installed; one
that needs an environment of its own is named with --python. Every run is a process of its own. Other flags are the
server's and go to jaxpaged.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import Workload, machine_cpu_s, print_table, read_workload, write_json
from bench.peers import ENGINES, PeerRun, export_weights

# Rows of transformers' static batches, where not 16: what serves each workload best on a small CPU.
BATCHES = {"W3": 4, "W4": 1, "W5": 8}
REFERENCE = "transformers"
# Share of the cores that other work, the host's included, may take before a run is void: libraries whose threads wait
# actively, transformers' among them, lose far more than that share.
QUIET = 0.1


def installed(engine: str, python: str) -> bool:
    module = ENGINES[engine][1]
    if not module:
        return shutil.which("llama-server") is not None
    probe = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], cwd=Path(__file__).parents[1]).returncode == 0


def same_as_reference(weights: Path, workload: Workload, runs: dict[str, PeerRun]) -> dict[str, list[str]]:
    """For each engine, how its requests differ from the reference by the rule of sameness; empty if none does."""
    from tests.support.reference_model import ReferenceModel
    from tests.support.sameness import compare_ids

    model = ReferenceModel(weights)
    found: dict[str, list[str]] = {}
    for engine, run in runs.items():
        found[engine] = []
        for number, (job, ids) in enumerate(zip(workload.jobs, run.ids, strict=True)):
            reference = model.check(job.prompt, ids)
            error = compare_ids(ids, reference.ids, reference.gaps)
            if error:
                found[engine].append(f"request {number}, {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--workload", type=Path, nargs="+", required=True, metavar="FILE",
                        help="token ids and output lengths")
    parser.add_argument("--model", default="", help="a .gguf file, or a folder in Hugging Face layout "
                        "(default: SmolLM2-135M-Instruct)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="(default: all that are installed)")
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PATH", help="Python that runs an engine")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--batch", type=int, metavar="N", help="rows of transformers' static batches")
    parser.add_argument("--no-check", action="store_true", help="do not compare the ids with the reference's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run here too")
    args, engine_flags = parser.parse_known_args()
    pythons = dict(item.split("=", 1) for item in args.python)
    if pythons.keys() - ENGINES.keys():
        parser.error(f"--python: the engines are {', '.join(ENGINES)}")
    engines = args.engines or [name for name in ENGINES if installed(name, pythons.get(name, sys.executable))]

    from jaxpaged.core.config import DEFAULT_MODEL
    from jaxpaged.loading.hub import resolve_model

    model = Path(resolve_model(args.model or DEFAULT_MODEL))
    report = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = model
        if model.suffix == ".gguf":
            weights = folder / "weights"
            export_weights(model, weights)
        for path in args.workload:
            workload = read_workload(path, args.num_prompts)
            batch = args.batch or BATCHES.get(workload.name, 16)
            runs: dict[str, list[PeerRun]] = {engine: [] for engine in engines}
            disturbed = 0.0
            for _ in range(args.repeat):
                for engine in engines:
                    run, others = run_once(engine, pythons.get(engine, sys.executable), path, args.num_prompts, model,
                                           weights, batch, engine_flags, folder)
                    runs[engine].append(run)
                    disturbed = max(disturbed, others)
            differences = {} if args.no_check else same_as_reference(
                weights, workload, {engine: list_of_runs[0] for engine, list_of_runs in runs.items()})
            show(workload, batch, runs, differences)
            if disturbed > QUIET:
                print(f"Other work took up to {disturbed:.0%} of the cores during a run: quote none of these figures.")
            report.append({
                "workload": workload.name, "requests": len(workload.jobs), "tokens_in": workload.tokens_in,
                "tokens_out": workload.tokens_out, "batch": batch, "differences": differences,
                "largest_share_of_other_work": disturbed,
                "runs": {engine: [{key: value for key, value in asdict(run).items() if key != "ids"}
                                  for run in list_of_runs] for engine, list_of_runs in runs.items()}})
            write_json(args.json, report)


def run_once(engine: str, python: str, workload: Path, limit: int | None, model: Path, weights: Path, batch: int,
             engine_flags: list[str], folder: Path) -> tuple[PeerRun, float]:
    """One engine in a process of its own, so that its memory is given back; and the share of the cores others took."""
    out = folder / "run.json"
    command = [python, str(Path(__file__).with_name("peers.py")), engine, "--model", str(model), "--weights",
               str(weights), "--workload", str(workload), "--batch", str(batch), "--out", str(out), *engine_flags]
    if limit is not None:
        command += ["--num-prompts", str(limit)]
    begin, machine, own = time.perf_counter(), machine_cpu_s(), children_cpu_s()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    cores = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    others = max(0.0, (machine_cpu_s() - machine) - (children_cpu_s() - own)) / cores
    if done.returncode:
        sys.exit(f"{engine} failed:\n{done.stdout[-4000:]}")
    run = PeerRun(**json.loads(out.read_text()))
    print(f"{workload.stem} {engine}: {run.elapsed_s:.2f} s, other work on {others:.0%} of the cores", file=sys.stderr,
          flush=True)
    return run, others


def children_cpu_s() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(workload: Workload, batch: int, runs: dict[str, list[PeerRun]], differences: dict[str, list[str]]) -> None:
    """One row per engine; the ratio is the median over turns of the reference's time over the engine's."""
    rows = []
    for engine, list_of_runs in runs.items():
        times = [run.elapsed_s for run in list_of_runs]
        middle = statistics.median(times)
        ratios = [base.elapsed_s / run.elapsed_s for base, run in zip(runs.get(REFERENCE, []), list_of_runs,
                                                                      strict=False)]
        equal = len(workload.jobs) - len(differences.get(engine, []))
        rows.append([
            engine + (f", batches of {batch}" if engine == REFERENCE else ""),
            f"{workload.tokens_out / middle:.1f}",
            f"{(workload.tokens_in + workload.tokens_out) / middle:.1f}",
            f"{1000 * middle / workload.tokens_out:.1f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            " ".join(f"{seconds:.1f}" for seconds in times),
            f"{statistics.median(run.load_s for run in list_of_runs):.1f}",
            f"{max(run.peak_memory_bytes for run in list_of_runs) / 2**20:,.0f}",
            f"{equal} of {len(workload.jobs)}" if differences else "not checked",
        ])
    print_table(workload.describe(), ["engine", "out tok/s", "total tok/s", "ms per out token", "ratio", "runs s",
                                      "load s", "peak MiB", "same as reference"], rows)
    for engine, texts in differences.items():
        for text in texts:
            print(f"{engine}: {text}")


if __name__ == "__main__":
    main()
