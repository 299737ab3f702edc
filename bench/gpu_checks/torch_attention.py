"""PyTorch's attention on the same device, where it is installed."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.gpu_checks.report import HEAD_DIM, HEADS, KV_HEADS, Report


def check_torch(report: Report) -> None:
    """PyTorch's attention on contiguous keys and values, for comparison; FlexAttention compiles for half a minute."""
    try:
        import torch
    except ImportError:
        report.put("torch", skipped="not installed")
        return
    if not torch.cuda.is_available():
        report.put("torch", skipped="sees no GPU")
        return

    def median(call: Callable[[], Any]) -> float:
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 20)
        return statistics.median(times)

    def tensors(batch: int, queries: int, context: int) -> Any:
        sizes = ((HEADS, queries), (KV_HEADS, context), (KV_HEADS, context))
        return [torch.randn(batch, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                for heads, length in sizes]

    def decode(batch: int, context: int) -> dict[str, Any]:
        q, k, v = tensors(batch, 1, context)
        seconds = median(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        return {"us": 1e6 * seconds, "gb_per_s": 4 * KV_HEADS * HEAD_DIM * batch * context / seconds / 1e9}

    def prefill(flex: bool) -> dict[str, Any]:
        q, k, v = tensors(1, 8192, 8192)
        if flex:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            mask = create_block_mask(lambda b, h, row, column: row >= column, None, None, 8192, 8192)
            compiled = torch.compile(flex_attention)
            seconds = median(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))
        else:
            seconds = median(lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True))
        return {"us": 1e6 * seconds, "tflop_per_s": 4 * HEADS * HEAD_DIM * 8192 * 8193 / 2 / seconds / 1e12}

    for batch, context in ((64, 8192), (16, 8192), (64, 1024), (1, 8192)):
        report.run(f"torch SDPA decode {batch} x {context}", functools.partial(decode, batch, context))
    report.run("torch SDPA prefill 8192", lambda: prefill(False))
    report.run("torch FlexAttention prefill 8192", lambda: prefill(True), 10)
