"""The simulator against queueing theory and plain arithmetic."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.simulate import PolicyCurve, engines_needed, main, run_point
from bench.simulation import Device, StepTime, fit_step_time, simulate
from bench.traffic import DATASETS, Arrival, Lengths, poisson_traffic

DEVICE = Device(StepTime(0.02, 1.2e-4, 6e-7), kv_tokens=15_700)


def test_a_request_alone_takes_its_steps() -> None:
    """A prompt of 300 tokens in chunks of 128, then a token per step; nothing else."""
    device = dataclasses.replace(DEVICE, max_num_batched_tokens=128)
    [found] = simulate([Arrival(3.0, 300, 5, None, 0)], device).outcomes
    sizes = [(128, 128), (128, 256), (44, 300), (1, 301), (1, 302), (1, 303), (1, 304)]
    seconds = [0.02 + 1.2e-4 * tokens + 6e-7 * context for tokens, context in sizes]
    assert found.first_token == pytest.approx(sum(seconds[:3]))
    assert found.end == pytest.approx(sum(seconds))
    assert found.normalized == found.end / 5


def test_one_slot_waits_as_the_formula_says() -> None:
    """Mean waiting time of a single server with any service time (Pollaczek and Khinchine)."""
    lengths = Lengths("short", 5, 0.1, 6, 0.5)
    device = dataclasses.replace(DEVICE, step_time=StepTime(1.0, 0, 0), max_num_seqs=1)
    rate = 0.08
    traffic = poisson_traffic(lengths, rate, 5000, seed=3, context=64)
    outcomes = simulate(traffic, device).outcomes
    service = np.array([item.output_tokens + 1 for item in traffic])  # a step is under way when an answer ends
    load = rate * service.mean()
    assert 0.4 < load < 0.7
    wanted = rate * np.mean(service**2) / (2 * (1 - load))
    waited = np.mean([found.end - item.output_tokens for found, item in zip(outcomes, traffic, strict=True)])
    # An arrival meets the server at the next step, half a step later in the mean.
    assert waited == pytest.approx(wanted + 0.5, rel=0.15)


def test_reserving_the_maximum_holds_as_many_as_fit_whole() -> None:
    traffic = poisson_traffic(DATASETS["sharegpt"], 50.0, 60, seed=0, context=2048)
    reserved, paged = simulate(traffic, DEVICE, "reserve"), simulate(traffic, DEVICE)
    assert reserved.mean_running <= 15_700 // 2048 < paged.mean_running
    assert reserved.mean_filled < paged.mean_filled <= 1
    assert reserved.preemptions == 0
    assert reserved.normalized_latency()["mean"] > 2 * paged.normalized_latency()["mean"]


def test_reserving_a_power_of_two_lies_between_the_maximum_and_blocks() -> None:
    """Room for twice the answer at reserve: never preempted, fuller than the maximum, emptier than blocks."""
    traffic = poisson_traffic(DATASETS["sharegpt"], 50.0, 60, seed=0, context=2048, hint_error=0.0)
    reserve, power, paged = (simulate(traffic, DEVICE, policy) for policy in ("reserve", "reserve-pow2", "fcfs"))
    assert power.preemptions == 0
    assert reserve.mean_filled < power.mean_filled < paged.mean_filled
    assert reserve.mean_running < power.mean_running < paged.mean_running
    means = [run.normalized_latency()["mean"] for run in (reserve, power, paged)]
    assert means == sorted(means, reverse=True)


def test_the_same_seed_gives_the_same_figures_and_the_same_requests_at_every_rate() -> None:
    one, same = (poisson_traffic(DATASETS["alpaca"], 9.0, 80, seed=5, context=2048, hint_error=0.7) for _ in range(2))
    assert one == same and simulate(one, DEVICE, "predicted") == simulate(same, DEVICE, "predicted")
    assert one != poisson_traffic(DATASETS["alpaca"], 9.0, 80, seed=6, context=2048, hint_error=0.7)
    faster = poisson_traffic(DATASETS["alpaca"], 18.0, 80, seed=5, context=2048)
    assert [item.output_tokens for item in faster] == [item.output_tokens for item in one]
    assert [item.time * 2 for item in faster] == pytest.approx([item.time for item in one])


@pytest.mark.parametrize("name", DATASETS)
def test_lengths_have_the_means_that_are_stated(name: str) -> None:
    lengths = DATASETS[name]
    traffic = poisson_traffic(lengths, 1.0, 20_000, seed=0, context=2**20)
    assert np.mean([item.prompt_tokens for item in traffic]) == pytest.approx(lengths.prompt_mean, rel=0.05)
    assert np.mean([item.output_tokens for item in traffic]) == pytest.approx(lengths.output_mean, rel=0.05)
    assert max(item.prompt_tokens + item.output_tokens
               for item in poisson_traffic(lengths, 1.0, 5000, seed=0, context=512)) <= 512


@pytest.mark.parametrize("true", [StepTime(0.02, 1e-4, 6e-7), StepTime(0.003, 0.0, 2e-6), StepTime(0.0, 5e-5, 0.0)])
def test_coefficients_are_found_again(true: StepTime) -> None:
    draw = np.random.default_rng(0)
    samples = [(tokens, context, true.base + true.per_token * tokens + true.per_context * context)
               for tokens, context in draw.integers((1, 1), (512, 20_000), (200, 2)).tolist()]
    found = fit_step_time(samples)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(true), rel=1e-6, abs=1e-12)


def test_coefficients_are_never_negative() -> None:
    """Even where the steps measured got quicker with more context."""
    found = fit_step_time([(tokens, context, 0.01 + 1e-4 * tokens - 1e-7 * context)
                           for tokens in (1, 50, 100) for context in (10, 1000, 20_000)])
    assert found.per_context == 0 < found.base and found.per_token == pytest.approx(1e-4, rel=0.2)


def test_the_number_of_engines_is_the_least_that_is_enough() -> None:
    ask = PolicyCurve("fcfs", "fcfs")
    engines, _ = engines_needed("alpaca", ask, 150.0, 0.05, DEVICE, 300, seed=1)
    enough = [run_point("alpaca", ask, 150.0 / count, DEVICE, 300, 1).p99 <= 0.05 for count in range(1, 12)]
    assert engines == enough.index(True) + 1 and all(enough[engines - 1 :])
    assert engines_needed("alpaca", ask, 2.0, 0.001, DEVICE, 50, seed=1)[0] is None


def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["bench/simulate.py", *arguments])
    main()
    return capsys.readouterr().out


def test_the_command_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                             ) -> None:
    out = tmp_path / "out.json"
    text = ask(capsys, monkeypatch, "--traffic", "6", "--slo", "0.05", "--requests", "150", "--gpus-per-engine", "2",
               "--json", str(out))
    [found] = json.loads(out.read_text())
    assert text.splitlines()[-1] == f"{2 * found['engines']} GPUs ({found['engines']} engines of 2)" and "| yes" in text
    text = ask(capsys, monkeypatch, "--long-prompt", "8192", "--requests", "60", "--rates", "1", "--json", str(out))
    without, with_it = json.loads(out.read_text())
    assert without["own_first_token"] is None and with_it["own_first_token"] > 0
    assert f"| {with_it['own_first_token']:.1f} " in text
    with pytest.raises(SystemExit):
        ask(capsys, monkeypatch, "--long-prompt", "8192", "--plot", "curves.png")
    assert "--plot" in capsys.readouterr().err
