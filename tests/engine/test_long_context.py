"""Long contexts: against a dense reference in float64, at every block size, and beside short requests."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.simulation import Device, SimulatedRun, StepTime, simulate
from bench.traffic import DATASETS, Arrival, poisson_traffic
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.messages import EngineRequest, TokenDelta
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine import Engine
from tests.support.sameness import MARGIN
from tests.support.tiny_llama import CONFIG, Reference, _rotate, random_prompt, random_weights, write_model

NUM_QUERIES = 64
TOLERANCE = 1e-4


class LongReference(Reference):
    """The dense model in float64, at some positions of a long sequence: the last layer attends from those alone."""

    def logits_at(self, tokens: Sequence[int], wanted: np.ndarray) -> np.ndarray:
        """[len(wanted), V]: after each wanted position, what may follow."""
        config = self.config
        size, layers = config["head_dim"], config["num_hidden_layers"]
        x = self._weight("model.embed_tokens")[list(tokens)]
        frequency = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
        turn = np.exp(1j * np.arange(len(tokens))[:, None] * frequency)[:, None]
        for layer in range(layers):
            name = f"model.layers.{layer}."
            rows = wanted if layer == layers - 1 else np.arange(len(tokens))
            y = self._norm(x, name + "input_layernorm")
            k, v = ((y @ self._weight(f"{name}self_attn.{part}_proj").T).reshape(len(tokens), -1, size)
                    for part in "kv")
            q = (y[rows] @ self._weight(f"{name}self_attn.q_proj").T).reshape(len(rows), -1, size)
            mixed = _attend(_rotate(q, turn[rows]), _rotate(k, turn), v, rows)
            x = x[rows] + mixed @ self._weight(name + "self_attn.o_proj").T
            y = self._norm(x, name + "post_attention_layernorm")
            gate, up = (y @ self._weight(f"{name}mlp.{part}_proj").T for part in ("gate", "up"))
            x = x + gate / (1 + np.exp(-gate)) * up @ self._weight(name + "mlp.down_proj").T
        return self._norm(x, "model.norm") @ self._weight("lm_head").T


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[Q, N * H]: each row over all positions up to its own."""
    group = q.shape[1] // k.shape[1]
    mixed = np.empty_like(q)
    for first in range(0, len(rows), 64):
        part = rows[first : first + 64]
        for head in range(q.shape[1]):
            scores = q[first : first + 64, head] @ k[: part[-1] + 1, head // group].T * q.shape[-1] ** -0.5
            scores[np.arange(part[-1] + 1) > part[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[first : first + 64, head] = weights @ v[: part[-1] + 1, head // group] / weights.sum(
                axis=-1, keepdims=True)
    return mixed.reshape(len(rows), -1)


def check_at_sampled_positions(folder: Path, length: int, block_size: int, *, layers: int, budget: int) -> None:
    """One request of `length` tokens in chunks, then one that ends at each sampled position of it, on its blocks."""
    config = {**CONFIG, "max_position_embeddings": length + 16, "num_hidden_layers": layers, "hidden_size": 32,
              "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
    path = write_model(folder / "model", config)
    engine = Engine(EngineConfig(
        model=str(path), block_size=block_size, num_gpu_blocks_override=2 * length // block_size + 8, max_num_seqs=4,
        max_num_batched_tokens=budget, enforce_eager=True))
    tokens = random_prompt(length, 0)
    draw = np.random.default_rng(1)
    wanted = np.sort(np.append(draw.choice(length - 1, NUM_QUERIES - 1, replace=False), length - 1))
    try:
        run(engine, [EngineRequest("whole", tuple(tokens), SamplingParams(temperature=0), 1)])
        params = SamplingParams(temperature=0, logprobs=5)
        found = run(engine, [EngineRequest(str(end), tuple(tokens[: end + 1]), params, 1) for end in wanted.tolist()])
    finally:
        engine.shutdown()
    logits = LongReference(config, random_weights(config)).logits_at(tokens, wanted)
    logprobs = logits - np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)) \
        - logits.max(axis=-1, keepdims=True)
    for row, end in zip(logprobs, wanted.tolist(), strict=True):
        delta = found[str(end)]
        assert delta.num_cached_tokens == end // block_size * block_size, "the prefix was computed again"
        best = np.sort(row)
        assert delta.token_ids == (row.argmax(),) or best[-1] - best[-2] < MARGIN
        for token, logprob in delta.logprobs[0].top:
            assert logprob == pytest.approx(row[token], abs=TOLERANCE), f"position {end}"


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, TokenDelta]:
    for request in requests:
        engine.add_request(request)
    last = {}
    while engine.has_work():
        for delta in engine.step().deltas:
            last[delta.request_id] = delta
    engine.check_integrity()
    return last


@pytest.mark.parametrize("block_size", [32, 128])
def test_two_thousand_tokens(tmp_path: Path, block_size: int) -> None:
    check_at_sampled_positions(tmp_path, 2048, block_size, layers=2, budget=256)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_thirty_two_thousand_tokens(tmp_path: Path, block_size: int) -> None:
    check_at_sampled_positions(tmp_path, 2**15, block_size, layers=2, budget=512)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 128])
def test_a_hundred_and_twenty_eight_thousand_tokens(tmp_path: Path, block_size: int) -> None:
    """One layer: the reference attends from the sampled positions only, and two would take it hours."""
    check_at_sampled_positions(tmp_path, 2**17, block_size, layers=1, budget=512)


# Beside short requests

DEVICE = Device(StepTime(0.02, 1.2e-4, 6e-7), kv_tokens=200_000, context=2**16)


@pytest.mark.parametrize("budget", [512, 2048, 8192])
@pytest.mark.parametrize("rate", [1.0, 2.5])
def test_short_requests_are_hardly_slower_beside_a_prompt_of_thirty_two_thousand(budget: int, rate: float) -> None:
    """On a modeled device; steps full of the long prompt would make those that come meanwhile wait 4 s of it."""
    device = replace(DEVICE, max_num_batched_tokens=budget)
    short = poisson_traffic(DATASETS["sharegpt"], rate, 200, seed=0, context=2048)
    long = Arrival(short[70].time, 2**15, 64, None, 0)
    without = simulate(short, device)
    mixed = simulate(sorted([*short, long], key=lambda item: item.time), device)
    alone = simulate([long], device).outcomes[0]
    [took] = [item for item in mixed.outcomes if item.arrival is long]
    beside = replace(mixed, outcomes=tuple(item for item in mixed.outcomes if item.arrival is not long))
    assert mean_end(beside) < 1.25 * mean_end(without)
    meanwhile = [item.first_token for item in beside.outcomes
                 if long.time < item.arrival.time < long.time + took.first_token]
    assert statistics.mean(meanwhile) < 0.2 + 2 * (0.02 + budget / 8 * 1.2e-4)
    assert took.first_token < 4 * alone.first_token, "the long one does not starve either"


def mean_end(run: SimulatedRun) -> float:
    return statistics.mean(item.end for item in run.outcomes)
