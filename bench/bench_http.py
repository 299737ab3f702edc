"""The CPU time of the server's HTTP process per streamed token; the engine's process does not count.

For whoever changes the HTTP side.

    python bench/bench_http.py --streams 32 512

The model is a tiny one that counts, so that the engine leaves some time to the rest; each client follows one stream.
"""

import argparse
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from bench.common import print_table, write_json
from tests.support.live_server import LiveServer
from tests.support.scripted_model import write_counting_model


def follow(address: tuple[str, int], streams: int, tokens: int) -> None:
    """Read `streams` streams concurrently to their ends, with little work, in this process."""
    body = (b'{"prompt": [1], "max_tokens": %d, "temperature": 0, "ignore_eos": true, "stream": true}' % tokens)
    head = (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body))

    def one() -> None:
        with socket.create_connection(address) as raw:
            raw.sendall(head + body)
            while raw.recv(65536):
                pass

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(server: LiveServer, streams: int, tokens: int) -> dict[str, float]:
    """CPU microseconds of the HTTP process per token."""
    host, port = server.url.removeprefix("http://").split(":")
    process = psutil.Process(server.process.pid)
    before, generated = process.cpu_times(), server.metrics()["vllm:generation_tokens_total"]
    began = time.perf_counter()
    client = multiprocessing.get_context("spawn").Process(target=follow, args=((host, int(port)), streams, tokens))
    client.start()
    client.join()
    elapsed = time.perf_counter() - began
    after = process.cpu_times()
    count = server.metrics()["vllm:generation_tokens_total"] - generated
    assert count == streams * tokens, f"{count} tokens of {streams * tokens}"
    seconds = after.user + after.system - before.user - before.system
    return {"streams": streams, "tokens": count, "cpu_us_per_token": 1e6 * seconds / count,
            "user_us_per_token": 1e6 * (after.user - before.user) / count, "tokens_per_s": count / elapsed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 512], metavar="N", help="(default: 32 512)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="of each stream (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_counting_model(Path(folder) / "model")
        slots = str(max(args.streams))
        with LiveServer(Path(folder) / "log", str(model), "--max-num-seqs", slots, "--max-num-batched-tokens", slots,
                        "--num-gpu-blocks-override", str(16 * max(args.streams)), "--disable-access-log") as server:
            server.wait_ready()
            measure(server, args.streams[0], 10)
            rows = [measure(server, streams, args.tokens) for streams in args.streams]
    print_table("HTTP side of the server", ["streams", "tokens", "CPU us per token", "of it user", "tokens/s"],
                [[f"{row['streams']:.0f}", f"{row['tokens']:.0f}", f"{row['cpu_us_per_token']:.1f}",
                  f"{row['user_us_per_token']:.1f}", f"{row['tokens_per_s']:.0f}"] for row in rows])
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
