"""Checks at start-up that attention by Mosaic GPU is correct on this GPU, before the engine uses it.

The kernel had been compiled and interpreted, but not run on a GPU, when it was written. So, unless a flag chooses, a
separate process first computes a few sequences in the model's shapes and compares them with the reference. A wrong
result, a crash or a hang there costs one warning, and Triton computes attention.

The process allocates only what it needs, some hundred MiB and CUDA's own: the engine may have preallocated its share.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.execution.devices import DeviceInfo, select_device
from jaxpaged.models.config import AttentionSpec, ModelConfig
from jaxpaged.models.metadata import uses_mosaic
from jaxpaged.pallas_kernels import paged_attention, reference
from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.lowering import GpuTarget, lowering_for
from jaxpaged.pallas_kernels.work_list import make_work_list

logger = logging.getLogger(__name__)

MAX_SECONDS = 90.0  # mostly of importing, starting CUDA and compiling
_KILL_SECONDS = 5.0  # a process whose GPU hangs may not end even when killed
PROGRAM = (sys.executable, "-m", "jaxpaged.engine.mosaic_check")
TOKENS = 16  # in the step that is tried
LIMITS = {"bfloat16": 0.03, "float16": 0.01}  # results are of the size of 1


@dataclass(frozen=True, slots=True)
class Case:
    """What is checked; windows: those of all layers, None for full attention; interpret: on the CPU, for tests."""

    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    windows: Sequence[int | None] = (None,)
    softcap: float | None = None
    interpret: bool = False

    @classmethod
    def of(cls, model: ModelConfig, page_size: int, dtype: jnp.dtype) -> "Case":
        spec, windows = model.attention[0], {spec.window for spec in model.attention}
        assert isinstance(spec, AttentionSpec), spec
        return cls(spec.num_heads // spec.num_kv_heads, min(spec.num_kv_heads, 2), spec.head_dim, page_size,
                   dtype.name, sorted(windows, key=lambda window: window or 0), spec.softcap)


def failure_of(case: Case, seconds: float = MAX_SECONDS, program: Sequence[str] = PROGRAM) -> str | None:
    """Try a case in a separate process; None if it passes, else what happened, as text."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                                "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen([*program, json.dumps(asdict(case))], env=environment, stdin=subprocess.DEVNULL,
                                 stdout=output, stderr=subprocess.STDOUT)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end within {seconds:g} s"
        finally:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_KILL_SECONDS)
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
        return f"it failed with {lines[-1][:300] if lines else f'exit code {code}'}" if code else None


def choose_gpu_attention(
    wanted: str, model: ModelConfig, page_size: int, dtype: jnp.dtype, cache_dtype: jnp.dtype, device: DeviceInfo,
    find_failure: Callable[[Case], str | None] = failure_of,
) -> str:
    """`wanted` of --gpu-attention, or "triton" where that is auto and Mosaic GPU fails on the device."""
    if wanted != "auto" or device.platform != "cuda":
        return wanted
    target = GpuTarget.of(device.devices[0], wanted, sharded=len(device.devices) > 1)
    if not uses_mosaic(target, model, dtype, cache_dtype):
        return wanted
    failure = find_failure(Case.of(model, page_size, cache_dtype))
    if failure is None:
        return wanted
    logger.warning("attention by Mosaic GPU was tried on this GPU and is not used, Triton computes it: %s "
                   "(--gpu-attention triton tries nothing)", failure)
    return "triton"


def main(argv: Sequence[str]) -> int:
    """Try the case that the one argument holds as JSON; 0 if the results are right."""
    signal.alarm(int(2 * MAX_SECONDS))  # ends a hanging process even if its parent is gone
    case = Case(**json.loads(argv[0]))
    device = select_device("cpu" if case.interpret else "cuda").devices[0]
    target = GpuTarget((9, 0), 1, interpret=True, mosaic=True) if case.interpret else GpuTarget.of(device, "mosaic")
    with lowering_for(device):
        off = max(_largest_error(case, window, target) for window in case.windows)
    print(f"results that are off by {off:.3g}")
    return 0 if off <= LIMITS[case.dtype] else 1


def _largest_error(case: Case, window: int | None, target: GpuTarget) -> float:
    """The largest difference from the reference over some steps; infinite where a result is not finite."""
    page, heads = case.page_size, case.group * case.kv_heads
    # Context and new tokens of sequences: around a page's borders, long enough to be split, a chunk of a prompt.
    chunks = [(1, 1), (page - 1, 1), (page, 1), (page + 1, 1), (300, 1), (700, 1), (2 * page + 3, 3)]
    slots, width = len(chunks), -(-700 // page)
    slot, position = np.full(TOKENS, slots, np.int32), np.zeros(TOKENS, np.int32)
    rows = 0
    for index, (context, new) in enumerate(chunks):
        slot[rows : rows + new], position[rows : rows + new] = index, np.arange(context - new, context)
        rows += new
    dtype = jnp.dtype(case.dtype)
    tiles = paged_attention.choose_tiles(target, TOKENS, case.group, case.head_dim, dtype, dtype)
    assert tiles.mosaic, case
    sizes = paged_attention.work_sizes(target, tiles, TOKENS, slots, heads, case.kv_heads)
    rule = AttentionRule(case.head_dim**-0.5, window, case.softcap)

    @jax.jit
    def attend(q: Any, pages: Any, table: Any) -> Any:
        work = make_work_list(jnp.asarray(slot), jnp.asarray(position), slots, sizes, window)
        return paged_attention.paged_attention(q, pages, table, work, rule, HeadBias(), tiles=tiles, target=target)

    wanted = jax.jit(partial(reference.paged_attention, rule=rule, bias=HeadBias()))
    largest = 0.0
    for seed in range(1 if case.interpret else 3):
        rng = np.random.default_rng(seed)
        used = rng.permutation(slots * width).reshape(slots, width) + 1
        in_use = np.arange(width) * page < np.array([[context] for context, _ in chunks])
        # Page 0, which must not be read, is full of NaN.
        table = np.zeros((slots + 1, width), np.int32)
        table[:slots] = np.where(in_use, used, 0)
        q = jnp.asarray(rng.standard_normal((TOKENS, heads, case.head_dim)), case.dtype)
        shape = (slots * width + 1, page, case.kv_heads, case.head_dim)
        k, v = (jnp.asarray(rng.standard_normal(shape), case.dtype) for _ in range(2))
        found = attend(q, KVPages(*(pool.at[0].set(jnp.nan) for pool in (k, v))), table)
        wide_q, wide_k, wide_v = (array.astype(jnp.float32) for array in (q, k, v))
        with jax.default_matmul_precision("highest"):
            right = wanted(wide_q[:rows], KVPages(wide_k, wide_v), table, slot[:rows], position[:rows])
        results = np.asarray(found, np.float32)
        off = np.abs(results[:rows] - np.asarray(right)).max()
        largest = max(largest, float(off) if np.isfinite(results).all() else np.inf)
    return largest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
