"""Thousands of requests of all kinds: nothing is lost, and nothing grows."""

import gc
import os
import random
from pathlib import Path

import pytest

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from tests.support.tiny_llama import COMPILED_ARGS, EOS, random_prompt, write_model


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Soak:
    """Feeds an engine with random requests, a few at a time, and aborts some."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(EngineConfig.from_kwargs(
            model=str(path), preemption_mode="swap", swap_space="0.0002",
            **COMPILED_ARGS | {"num_gpu_blocks_override": 10}))
        self.draw = random.Random(0)
        self.live: set[str] = set()
        self.ended = 0
        self.added = 0

    def run(self, requests: int) -> None:
        target = self.added + requests
        while self.added < target or self.engine.has_work():
            while self.added < target and len(self.live) < 12:
                self._add()
            if self.live and self.draw.random() < 0.02:
                self.engine.abort(self.draw.sample(sorted(self.live), 1))
            if self.draw.random() < 0.001:
                self.engine.reset_prefix_cache()
            for delta in self.engine.step().deltas:
                if delta.finish_reason is not None:
                    self.live.remove(delta.request_id)
                    self.ended += 1
        assert not self.live and self.ended == self.added
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.blocks_used, stats.num_running, stats.num_waiting, stats.kv_slots_held) == (0, 0, 0, 0)
        assert self.engine._pool.num_free == stats.blocks_total == len(self.engine.pool_state().state_codes)

    def _add(self) -> None:
        draw = self.draw
        prompt = (*random_prompt(draw.choice([0, 16, 40]), draw.randrange(4)),
                  *random_prompt(draw.randrange(1, 20), draw.randrange(10**6)))
        n = draw.choice([1, 1, 1, 2, 4])
        params = SamplingParams(n=n, temperature=draw.choice([0, 1]), logprobs=draw.choice([None, None, 2]),
                                use_beam_search=draw.random() < 0.05)
        max_tokens = draw.randrange(1, 10 if params.use_beam_search else 30)
        name = str(self.added)
        salt = draw.choice([None, None, "a"])
        for choice in range(n):
            request_id = f"{name}#{choice}"
            self.engine.add_request(EngineRequest(
                request_id, prompt, params, max_tokens, frozenset([EOS]), frozenset([EOS]),
                seed=draw.randrange(2**32), choice=choice, cache_salt=salt,
                fork_of=f"{name}#0" if choice else None))
            self.live.add(request_id)
            self.added += 1


def soak(folder: Path, requests: int, growth: int) -> None:
    run = Soak(write_model(folder / "model"))
    run.run(requests // 5)
    gc.collect()
    memory, descriptors = resident_bytes(), num_descriptors()
    compiled = run.engine.stats().compilations
    run.run(requests - requests // 5)
    gc.collect()
    assert resident_bytes() - memory < growth
    assert num_descriptors() <= descriptors
    assert run.engine.stats().compilations == compiled
    assert run.engine.stats().num_preemptions > 0 and run.engine.stats().blocks_swapped_in > 0
    run.engine.shutdown()


def test_a_hundred_requests(tmp_path: Path) -> None:
    soak(tmp_path, 150, 64 * 2**20)


@pytest.mark.slow
def test_ten_thousand_requests(tmp_path: Path) -> None:
    soak(tmp_path, 10_000, 64 * 2**20)
