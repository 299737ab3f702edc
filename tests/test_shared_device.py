"""Several engines on one device, each within its share of the memory."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.execution.devices import process_memory_bytes
from jaxpaged.execution.memory_plan import BLOCK_MULTIPLE, MemoryPlan, plan_memory
from tests.live_server import ROOT, LiveServer, write_tiny_model

GIB = 2**30
SHARES = (0.06, 0.09)


def plan(share: float, weight_bytes: int, block_bytes: int) -> MemoryPlan:
    return plan_memory(memory_bytes=80 * GIB, weight_bytes=weight_bytes, temporary_bytes=GIB // 4, block_size=16,
                       block_bytes=block_bytes, kv_bytes_per_token=block_bytes // 16, on_cpu=False, share=share,
                       pool_bytes=None, num_blocks=None)


@given(st.floats(0.05, 0.95), st.integers(0, 30 * GIB), st.integers(0, 30 * GIB), st.sampled_from([2**16, 2**21]))
def test_two_plans_fit_beside_each_other(share: float, one: int, other: int, block_bytes: int) -> None:
    """Each stays within its share and uses it up, whatever the other is."""
    plans = [plan(share, one, block_bytes), plan(1 - share, other, block_bytes)]
    for found, part in zip(plans, (share, 1 - share), strict=True):
        if found.fits:
            assert 80 * GIB * part - BLOCK_MULTIPLE * block_bytes - 1 <= found.needed_bytes <= 80 * GIB * part
        else:
            assert found.num_blocks < 2, "refused although there was room for a pool"
    if all(found.fits for found in plans):
        assert sum(found.needed_bytes for found in plans) <= 80 * GIB


@pytest.mark.parametrize("environment", [{}, {"XLA_CLIENT_MEM_FRACTION": "0.75"}], ids=["plain", "with JAX's variable"])
def test_the_share_is_what_jax_takes_of_a_gpu(environment: dict[str, str]) -> None:
    """The options with which JAX would start a GPU's client; the user's other options stay."""
    code = """
import jax
from jax._src import xla_bridge
from jaxlib import xla_client
from jaxpaged.errors import ConfigError
from jaxpaged.execution.devices import select_device
jax.config.update("jax_pjrt_client_create_options", "abort_collectives_on_failure:true")
try:
    select_device("cuda", memory_share=0.4)
except ConfigError:
    pass
seen = {}
xla_client.make_c_api_client = lambda name, options, *rest: seen.update(options)
xla_bridge.make_pjrt_c_api_client("cuda", xla_client.generate_pjrt_gpu_plugin_options)
print(seen["memory_fraction"], seen["abort_collectives_on_failure"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "JAX_PLATFORMS": "cpu", **environment})
    assert done.stdout == "0.4 true\n", done.stderr


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[LiveServer]]:
    model = write_tiny_model(tmp_path / "tiny")
    started = [LiveServer(tmp_path / f"log{share}", str(model), "--max-num-seqs", "4", "--max-num-batched-tokens", "16",
                          "--gpu-memory-utilization", str(share)) for share in SHARES]
    yield started
    for server in started:
        server.__exit__(None, None, None)


def test_two_servers_share_one_device(servers: list[LiveServer]) -> None:
    """Both hold what their share allows, and serve at the same time."""
    body = {"prompt": "the same for both", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def ask(server: LiveServer) -> str:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        return str(answer.json()["choices"][0]["text"])

    pools = []
    for server, share in zip(servers, SHARES, strict=True):
        found = re.search(r"hold [\d,]+ tokens \(([\d,]+) MiB\)", server.wait_ready().log)
        assert found, server.log
        pools.append(int(found[1].replace(",", "")) * 2**20)
        allowed = share * process_memory_bytes()
        assert allowed - GIB < pools[-1] < allowed, "the share does not decide"
    assert pools[1] - pools[0] == pytest.approx((SHARES[1] - SHARES[0]) * process_memory_bytes(), rel=0.02)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, servers * 2))
    assert len(set(answers)) == 1 and answers[0]
