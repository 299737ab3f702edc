"""How a section reports its results, and the device's rates that they are compared with."""

import functools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16  # of Llama-3.1-8B
# Goals for the shares of the device's own rates, in the lines with a `goal`.
DECODE_GOAL, PREFILL_GOAL, STEP_GOAL = 0.85, 0.6, 0.8


@dataclass(frozen=True, slots=True)
class Report:
    """Where a section writes what it finds: each line at once, so that it survives whatever comes after it."""

    file: Path
    deadline: float
    smoke: bool

    def put(self, name: str, **values: Any) -> None:
        values = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
        with self.file.open("a") as file:
            file.write(json.dumps({"name": name, **values}) + "\n")
        print(f"{name}: {values}", flush=True)

    def run(self, name: str, check: Callable[[], dict[str, Any]], min_seconds: float = 2) -> None:
        """Write what `check` finds. Its failure is a line too, and so is that no time was left for it."""
        if self.deadline - time.monotonic() < min_seconds:
            self.put(name, skipped="no time left")
            return
        try:
            self.put(name, **check())
        except Exception as error:
            traceback.print_exc()
            self.put(name, error=f"{type(error).__name__}: {error}"[:300])


def median_seconds(call: Callable[[], Any], min_seconds: float = 0.1, repeats: int = 5) -> float:
    """Median time of a call; calls are queued one after the other, and waited for together."""
    import jax

    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    count = max(1, min(200, int(min_seconds / max(time.perf_counter() - begin, 1e-6))))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(count):
            result = call()  # only the last is referenced: some are gigabytes
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / count)
    return statistics.median(times)


@functools.cache
def read_rate(smoke: bool) -> float:
    """Bytes per second of reading memory once."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((2**20 if smoke else 2**30,), jnp.float32)
    total = jax.jit(lambda x: jnp.sum(x))
    return x.nbytes / median_seconds(lambda: total(x))


@functools.cache
def copy_rate(smoke: bool) -> float:
    """Bytes per second of reading memory and writing as much."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((2**20 if smoke else 2**30,), jnp.float32)
    increment = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_seconds(lambda: increment(x))


@functools.cache
def matmul_rate(smoke: bool) -> float:
    """Operations per second of a large bfloat16 product."""
    import jax
    import jax.numpy as jnp

    size = 256 if smoke else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / median_seconds(lambda: product(x))


def gpu_target(smoke: bool) -> Any:
    import jax

    from jaxpaged.pallas_kernels.lowering import GpuTarget

    return GpuTarget((9, 0), 4, interpret=True) if smoke else GpuTarget.of(jax.devices()[0])
