"""Which lowering attention gets on a GPU, and the trial at start that Mosaic GPU has to pass."""

import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest

from bench.bench_aot import MODELS
from jaxpaged.core.config import EngineConfig
from jaxpaged.engine.mosaic_check import Case, choose_gpu_attention, failure_of
from jaxpaged.engine.startup import layout_of, model_of, programs_of
from jaxpaged.execution import aot
from jaxpaged.execution.devices import DeviceInfo
from jaxpaged.execution.gpu_targets import find_gpu
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.metadata import uses_mosaic
from jaxpaged.pallas_kernels.lowering import GpuTarget
from tests.support.model_configs import uniform_layers, with_attention, with_windows

MODEL = ModelConfig("test", model_dim=512, vocab_size=64, max_model_len=128,
                    layers=uniform_layers(2, heads=8, kv_heads=2, head_dim=64, mlp_dim=48))
BFLOAT16 = jnp.dtype(jnp.bfloat16)
SMALL = Case(group=4, kv_heads=1, head_dim=64, page_size=32, dtype="bfloat16", interpret=True)
SPOILED = """
import sys
from jaxpaged.engine import mosaic_check
from jaxpaged.pallas_kernels import mosaic_attention

right = mosaic_attention.attend

def attend(*args, **more):
    out, partials, logsums = right(*args, **more)
    return 1.05 * out, partials, logsums

mosaic_attention.attend = attend
sys.exit(mosaic_check.main(sys.argv[1:]))
"""


def device(name: str, count: int = 1) -> DeviceInfo:
    gpu = find_gpu(name)
    return DeviceInfo("cuda", gpu.kind, gpu.memory_bytes, aot.compile_only_devices(gpu, count))


def test_the_choice_by_device() -> None:
    for name, wanted, sharded, mosaic in (
        ("a100-80g", "auto", False, False), ("l4", "auto", False, False), ("b200", "auto", False, False),
        ("h200", "auto", False, True), ("h100", "mosaic", False, True), ("h200", "auto", True, False),
        ("h200", "triton", False, False), ("a100-80g", "mosaic", False, False),
    ):
        assert GpuTarget.of(device(name).devices[0], wanted, sharded=sharded).mosaic == mosaic, (name, wanted)


def test_the_choice_by_model() -> None:
    """It is tried only if some step would use it."""
    target = GpuTarget.of(device("h200").devices[0], "auto")
    assert uses_mosaic(target, MODEL, BFLOAT16, BFLOAT16)
    assert uses_mosaic(target, with_windows(with_attention(MODEL, softcap=3.0), (100, None)), BFLOAT16, BFLOAT16)
    for model, dtype in ((MODEL, jnp.dtype(jnp.int8)), (with_attention(MODEL, alibi=True), BFLOAT16),
                         (with_attention(MODEL, sinks=True), BFLOAT16), (with_attention(MODEL, head_dim=80), BFLOAT16)):
        assert not uses_mosaic(target, model, BFLOAT16, dtype)


def test_right_results_pass() -> None:
    assert failure_of(SMALL) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case(group=7, kv_heads=2, head_dim=128, page_size=128, dtype="float16", windows=(None, 100), softcap=20.0,
         interpret=True),
    replace(SMALL, group=1, kv_heads=2, page_size=16, windows=(1, 40)),
], ids=repr)
def test_right_results_of_other_shapes_pass(case: Case) -> None:
    assert failure_of(case) is None


@pytest.mark.parametrize(("code", "seconds", "reason"), [
    (SPOILED, 60.0, "it failed with results that are off by 0."),
    ("import time; time.sleep(60)", 0.5, "it did not end within 0.5 s"),
    ("import os; os.abort()", 60.0, "it was ended by SIGABRT"),
    ("raise MemoryError('no room')", 60.0, "it failed with MemoryError: no room"),
    ("raise SystemExit(3)", 60.0, "it failed with exit code 3"),
], ids=["wrong", "hangs", "aborts", "raises", "ends"])
def test_what_goes_wrong_costs_one_warning(
    code: str, seconds: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And Triton is used."""
    def find_failure(case: Case) -> str | None:
        return failure_of(SMALL, seconds, (sys.executable, "-c", code))

    with caplog.at_level(logging.WARNING):
        found = choose_gpu_attention("auto", MODEL, 16, BFLOAT16, BFLOAT16, device("h200"), find_failure)
    assert found == "triton"
    [record] = caplog.records
    assert reason in record.getMessage() and "Triton computes it" in record.getMessage()


def test_what_is_right_or_was_asked_for_stays(caplog: pytest.LogCaptureFixture) -> None:
    def fail(case: Case) -> str:
        raise AssertionError("nothing is to be tried")

    settle = partial(choose_gpu_attention, model=MODEL, page_size=16, dtype=BFLOAT16, cache_dtype=BFLOAT16)
    tried: list[Case] = []
    assert settle("auto", device=device("h200"), find_failure=lambda case: tried.append(case)) == "auto"
    assert tried == [Case(4, 2, 64, 16, "bfloat16", [None])]
    for wanted, info in (("mosaic", device("h200")), ("triton", device("h200")), ("auto", device("a100-80g")),
                         ("auto", device("h200", 2)), ("auto", DeviceInfo("cpu", "CPU", 0, ()))):
        assert settle(wanted, device=info, find_failure=fail) == wanted
    assert settle("auto", model=with_attention(MODEL, alibi=True), device=device("h200"), find_failure=fail) == "auto"
    assert not caplog.records


def test_without_a_gpu_the_real_trial_fails_in_one_line() -> None:
    """All of it but the GPU: the process starts, imports and says what is missing."""
    failure = failure_of(replace(SMALL, interpret=False))
    assert failure is not None and failure.startswith("it failed with ") and "no cuda device" in failure


def test_a_store_made_ahead_holds_mosaic_and_is_not_used_where_the_trial_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    h200 = device("h200")

    def programs(wanted: str, store: Path | None) -> ProgramSet:
        config = EngineConfig(model="none", device="cuda", num_gpu_blocks_override=64, gpu_attention=wanted)
        source = model_of(config, MODELS["smollm2-135m"], "cuda")
        layout = layout_of(config, source, h200, print, compiling=False)
        return programs_of(config, layout, layout.definition, h200, print, store)

    ahead = programs("auto", None)
    assert ahead.attention == "Mosaic GPU below 32 tokens in a step, Triton above"
    ahead.store_in(tmp_path).save({}, 64)
    for wanted, uses in (("auto", True), ("mosaic", True), ("triton", False)):
        found = programs(wanted, tmp_path)
        assert found.uses_store == uses, wanted
    assert found.attention == "Triton"
    [record] = caplog.records
    assert "was compiled with another gpu_attention; compiling instead" in record.getMessage()
