"""Does a program that was compiled without a GPU load and run on one?"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.bench_aot import MODELS, ROOT, engine_programs
from bench.gpu_checks.report import Report, gpu_target


def small_programs(devices: Any, platform: str, lowering: str) -> tuple[Any, Any]:
    """The engine's programs for a small model's first two layers, and its layout; attention by this lowering."""
    from jaxpaged.execution.devices import DeviceInfo

    hf = MODELS["smollm2-135m"] | {"max_position_embeddings": 512}
    return engine_programs(hf, DeviceInfo(platform, "", 2**34, tuple(devices)), 2, max_num_seqs=8,
                           max_num_batched_tokens=64, num_gpu_blocks_override=64, gpu_attention=lowering)


PROGRAM = ("forward", 8)


def compile_without_device(gpu: str, lowering: str, file: str) -> None:
    """In a process that sees no GPU: compile a program for `gpu` ("cpu" is itself) and pickle the executable."""
    import jax
    from jax.experimental.serialize_executable import serialize

    from jaxpaged.execution import aot
    from jaxpaged.execution.gpu_targets import find_gpu
    from jaxpaged.execution.programs import COMPILER_OPTIONS

    platform = "cpu" if gpu == "cpu" else "cuda"
    devices = jax.devices("cpu")[:1] if gpu == "cpu" else aot.compile_only_devices(find_gpu(gpu))
    programs, _ = small_programs(devices, platform, lowering)
    compiled = programs.lower(PROGRAM).compile(compiler_options=COMPILER_OPTIONS[platform])
    Path(file).write_bytes(pickle.dumps(serialize(compiled)))


def check_aot(report: Report) -> None:
    """Programs that a process without a GPU has compiled; those that hold a kernel by Mosaic GPU last."""
    import jax

    from jaxpaged.execution.gpu_targets import GPUS

    device = jax.devices()[0]
    platform = "cpu" if report.smoke else "cuda"
    names = [name for name, gpu in GPUS.items() if gpu.kind == device.device_kind]
    name = "cpu" if report.smoke else names[0] if names else ""
    if not name:
        report.put("compile without GPU", skipped=f"{device.device_kind} is not in the table of GPUs")
        return
    check_loading(report, device, platform, name, "triton" if platform == "cuda" else "auto")
    if not report.smoke and gpu_target(report.smoke).has_mosaic and report.deadline - time.monotonic() > 25:
        check_loading(report, device, platform, name, "mosaic")


def check_loading(report: Report, device: Any, platform: str, name: str, lowering: str) -> None:
    """Load and run what a process without a GPU has compiled for `name`, and compare with what is compiled here."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.serialize_executable import deserialize_and_load

    by = " by Mosaic" if lowering == "mosaic" else ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program")
        code = f"from bench.gpu_checks import load; load.compile_without_device({name!r}, {lowering!r}, {str(file)!r})"
        hidden = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
                  "JAX_ENABLE_COMPILATION_CACHE": "false"}
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], env=hidden, capture_output=True, text=True, timeout=120)
        if done.returncode:
            report.put(f"compile without GPU{by}", error=(done.stderr.strip().splitlines() or ["died"])[-1][:300])
            return
        report.put(f"compile without GPU{by}", seconds=time.perf_counter() - begin, bytes=file.stat().st_size)
        payload = pickle.loads(file.read_bytes())
    programs, _ = small_programs([device], platform, lowering)

    def arguments() -> Any:
        """Small random weights and pools, and zeros: every row is token 0 at position 0 of slot 0."""
        rng = np.random.default_rng(0)
        values, _ = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(0, 0.05, leaf.shape) if jnp.issubdtype(leaf.dtype, jnp.floating)
                                     else np.zeros(leaf.shape), leaf.dtype), programs.lower(PROGRAM).in_avals)
        return values

    def load_and_compare() -> dict[str, Any]:
        begin = time.perf_counter()
        loaded = deserialize_and_load(*payload)
        seconds = time.perf_counter() - begin
        found, wanted = (np.asarray(run(*arguments())[0]) for run in (loaded, programs.get(PROGRAM)))
        off = float(np.abs(found - wanted).max())
        return {"load_seconds": seconds, "off_by": off, "ok": off < 0.05}

    report.run(f"load and run{by}", load_and_compare)
