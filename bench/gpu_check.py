"""Checks on a machine with a GPU that the kernels are correct there, and measures their speed.

    PYTHONPATH=. python bench/gpu_check.py --json check.json
    PYTHONPATH=. python bench/gpu_check.py --smoke              # on a CPU, tiny and interpreted: does the script work?

Each section is a process of its own with a time limit, so that one that fails, hangs or dies does not end the
others, and its results until then count. All of them end within six minutes; the last output is a short table.
Speeds are compared with the same GPU's in the same process: reading memory, and one large matrix product.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.gpu_checks.attention import check_decode, check_prefill
from bench.gpu_checks.device import check_device
from bench.gpu_checks.engine import check_engine
from bench.gpu_checks.kernels import check_kernels
from bench.gpu_checks.load import check_aot
from bench.gpu_checks.mosaic import check_mosaic
from bench.gpu_checks.report import Report
from bench.gpu_checks.torch_attention import check_torch

# Seconds that each section may take, in the order in which they run; and all of them together.
LIMITS = {"device": 40, "kernels": 90, "decode": 70, "prefill": 40, "engine": 160, "mosaic": 40, "aot": 60, "torch": 50}
TOTAL = 350
# Interpreted kernels compile more slowly than they run.
SMOKE_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def starts_cuda(report: Report, section: str) -> bool:
    """Start JAX on the GPU; a line says why where that fails."""
    from jaxpaged.execution.devices import select_device

    try:
        select_device("cuda")
    except Exception as error:
        report.put(section, error=str(error)[:300])
        return False
    return True


CHECKS = {"device": check_device, "kernels": check_kernels, "decode": check_decode, "prefill": check_prefill,
          "engine": check_engine, "mosaic": check_mosaic, "aot": check_aot, "torch": check_torch}


def run_section(name: str, seconds: float, smoke: bool) -> list[dict[str, Any]]:
    """Run one section in a process of its own, with a time limit; returns its lines."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lines")
        command = [sys.executable, __file__, "--section", name, "--lines", str(file), "--seconds", str(seconds - 5)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)} | (SMOKE_ENVIRONMENT if smoke else {})
        code: int | str
        try:
            code = subprocess.run([*command, *["--smoke"] * smoke], env=environment, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
        lines = []
        for line in file.read_text().splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):  # cut off in the middle
                lines.append(json.loads(line))
        if code:
            lines.append({"name": f"{name}: process", "error": str(code)})
        return [{"section": name, **line} for line in lines]


def summary(lines: list[dict[str, Any]]) -> list[str]:
    """One short line each; what does not fit is in the JSON alone."""
    shown = []
    for line in lines:
        mark = "FAIL" if "error" in line or line.get("ok") is False else "skip" if "skipped" in line else "ok"
        values = ""
        for key, value in line.items():
            item = f" {key}={value}"[:120]
            if key not in ("section", "name", "ok") and len(values) + len(item) <= 120:
                values += item
        shown.append(f"{mark:4} {line['section']:8} {line['name'][:38]:38}{values}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="write all results to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, kernels interpreted")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--section", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        report = Report(args.lines, time.monotonic() + args.seconds, args.smoke)
        if args.smoke or args.section == "torch" or starts_cuda(report, args.section):
            CHECKS[args.section](report)
        return
    begin, lines = time.monotonic(), []
    for name in args.only:
        left = TOTAL - (time.monotonic() - begin)
        if left < 15:
            lines.append({"section": name, "name": name, "skipped": "no time left"})
            continue
        lines += run_section(name, min(LIMITS[name], left), args.smoke)
        if args.json:
            args.json.write_text(json.dumps(lines, indent=1) + "\n")
    print("\n" + "\n".join(summary(lines)), flush=True)


if __name__ == "__main__":
    main()
