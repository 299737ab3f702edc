"""What the device is, and what it reads, copies and multiplies per second."""

import sys
from typing import Any

from bench.gpu_checks.report import Report, matmul_rate, median_seconds, read_rate


def check_device(report: Report) -> None:
    """What there is, and its rates: the denominators of everything else."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    report.put("device", kind=device.device_kind, jax=jax.__version__, python=sys.version.split()[0],
               memory_limit=int(stats.get("bytes_limit", 0)))

    def copy() -> dict[str, Any]:
        x = jnp.zeros((2**20 if report.smoke else 2**30,), jnp.float32)
        increment = jax.jit(lambda x: x + 1)
        return {"gb_per_s": 2 * x.nbytes / median_seconds(lambda: increment(x)) / 1e9}

    report.run("copy", copy)
    report.run("read", lambda: {"gb_per_s": read_rate(report.smoke) / 1e9})
    report.run("matmul bf16", lambda: {"tflop_per_s": matmul_rate(report.smoke) / 1e12})
