"""The device, and its rates of reading, copying and multiplying."""

import sys

from bench.gpu_checks.report import Report, copy_rate, matmul_rate, read_rate


def check_device(report: Report) -> None:
    """What there is, and its rates: the denominators of everything else."""
    import jax

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    report.put("device", kind=device.device_kind, jax=jax.__version__, python=sys.version.split()[0],
               memory_limit=int(stats.get("bytes_limit", 0)))

    report.run("copy", lambda: {"gb_per_s": copy_rate(report.smoke) / 1e9})
    report.run("read", lambda: {"gb_per_s": read_rate(report.smoke) / 1e9})
    report.run("matmul bf16", lambda: {"tflop_per_s": matmul_rate(report.smoke) / 1e12})
