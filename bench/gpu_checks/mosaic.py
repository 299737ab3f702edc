"""Attention by Mosaic GPU: correct, and faster than by Triton? In its own section, since it may hang."""

import functools
from dataclasses import replace
from typing import Any

from bench.gpu_checks.attention import measure_decode
from bench.gpu_checks.kernels import DECODE, compare
from bench.gpu_checks.report import HEAD_DIM, Report, gpu_target


def check_mosaic(report: Report) -> None:
    """Compared with the plain specification, then with Triton; `decode` has the figures that Triton reaches."""
    from jaxpaged.pallas_kernels.attention_rule import AttentionRule

    target = gpu_target(report.smoke)
    if not target.has_mosaic:
        report.put("mosaic", skipped="needs a Hopper GPU")
        return
    target = replace(target, mosaic=True)
    rule = AttentionRule(HEAD_DIM**-0.5, window=100, softcap=20.0)
    cases: dict[str, dict[str, Any]] = {"decode": {"heads": 4, "kv_heads": 2, "head_dim": 64}} if report.smoke else {
        "decode": {}, "window, soft cap": {"rule": rule},
        "group 7, head 64, float16": {"heads": 28, "kv_heads": 4, "head_dim": 64, "page": 64, "dtype": "float16"}}
    chunks = DECODE[:2] if report.smoke else DECODE
    for name, case in cases.items():
        report.run(f"attention by Mosaic, {name}", functools.partial(compare, chunks, 0.03, target, **case))
    for batch, context in () if report.smoke else ((16, 8192), (1, 8192), (16, 1024), (1, 1024)):
        measure = functools.partial(measure_decode, [context] * batch, target, report.smoke)
        report.run(f"decode {batch} x {context} by Mosaic", measure, 4)
