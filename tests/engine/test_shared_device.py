"""Several engines on one device, each within its share of the memory."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.memory_plan import BLOCK_MULTIPLE, MemoryPlan, plan_memory
from jaxpaged.execution.devices import process_memory_bytes
from tests.support.live_server import ROOT, LiveServer, write_tiny_model

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
from jaxpaged.core.errors import ConfigError
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


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LiveServer]]:
    """One for each share, with a policy of its own."""
    folder = tmp_path_factory.mktemp("servers")
    model = write_tiny_model(folder / "tiny")
    started = [LiveServer(folder / policy, str(model), "--max-num-seqs", "2", "--max-num-batched-tokens", "16",
                          "--gpu-memory-utilization", str(share), "--scheduling-policy", policy, "--enforce-eager")
               for policy, share in zip(("fcfs", "priority"), SHARES, strict=True)]
    yield started
    for server in started:
        server.__exit__(None, None, None)


def ask(server: LiveServer, max_tokens: int = 200, **fields: Any) -> httpx.Response:
    body = {"prompt": "the same for both", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_two_servers_share_one_device(servers: list[LiveServer]) -> None:
    """Both hold what their share allows, and serve at the same time."""
    pools = []
    for server, share in zip(servers, SHARES, strict=True):
        found = re.search(r"hold [\d,]+ tokens \(([\d,]+) MiB\)", server.wait_ready().log)
        assert found, server.log
        pools.append(int(found[1].replace(",", "")) * 2**20)
        allowed = share * process_memory_bytes()
        assert allowed - GIB < pools[-1] < allowed, "the share does not decide"
    assert pools[1] - pools[0] == pytest.approx((SHARES[1] - SHARES[0]) * process_memory_bytes(), rel=0.02)
    with ThreadPoolExecutor(4) as threads:
        answers = set(map(text, threads.map(ask, servers * 2)))
    assert len(answers) == 1 and answers.pop()


def test_priorities_over_http(servers: list[LiveServer]) -> None:
    """Refused where the policy does not look at them; else the important one takes a slot, and no text is lost."""
    fcfs, priority = (server.wait_ready() for server in servers)
    refused = ask(fcfs, 5, priority=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert text(ask(fcfs, 5, priority=0)) == text(ask(priority, 5, priority=-3))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(ask, priority, 2500, priority=2) for _ in range(2)]
        priority.wait_for(lambda: priority.metrics()["vllm:num_requests_running"] == 2, 20)
        assert text(ask(priority, 5, priority=1))
        assert not any(item.done() for item in waiting), "it had to wait for a slot"
        first, second = (text(item.result()) for item in waiting)
    assert first == second == text(ask(fcfs, 2500))
    assert priority.metrics()["vllm:num_preemptions_total"] >= 1
