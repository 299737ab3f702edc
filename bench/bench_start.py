"""The time from the server's start to its first token: cold, with a filled cache, and with a store of programs.

    python bench/bench_start.py

The first run has an empty cache directory of its own, so that everything is compiled; the second one finds it filled;
the third one loads a store that `python -m jaxpaged.compile` has made. The model's files are there already. Flags that
are not its own are the server's.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.common import print_table, write_json
from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.loading.hub import resolve_model

_LONGEST_S = 600
ROOT = Path(__file__).resolve().parents[1]


def first_token_s(model: Path, flags: list[str], cache: Path) -> float:
    """Seconds from starting the server to its first token, asked for as soon as it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    begin = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxpaged.server", str(model), "--host", "127.0.0.1", "--port", str(port), *flags],
        env=environment, cwd=ROOT)
    try:
        body = {"model": str(model), "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        while time.perf_counter() - begin < _LONGEST_S:
            if server.poll() is not None:
                sys.exit("the server has ended; see its message above")
            try:
                httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).raise_for_status()
                return time.perf_counter() - begin
            except httpx.ConnectError:
                time.sleep(0.05)
        sys.exit(f"no token within {_LONGEST_S} s")
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args, flags = parser.parse_known_args()
    model = resolve_model(args.model).resolve()
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (first_token_s(model, flags, Path(folder)) for _ in range(2))
        store = Path(folder) / "store"
        subprocess.run([sys.executable, "-m", "jaxpaged.compile", str(model), "--out", str(store), *flags],
                       env=os.environ | {"XDG_CACHE_HOME": folder}, cwd=ROOT, check=True)
        stored = first_token_s(model, [*flags, "--compiled", str(store)], Path(folder))
    print_table("Seconds from the command to the first token", ["programs", "seconds"],
                [["compiled at the start", f"{cold:.1f}"], ["from JAX's cache", f"{warm:.1f}"],
                 ["from a store (--compiled)", f"{stored:.1f}"]])
    write_json(args.json, {"cold_s": cold, "warm_s": warm, "stored_s": stored})


if __name__ == "__main__":
    main()
