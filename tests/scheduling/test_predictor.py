"""Predicted output lengths against numpy's quantiles, and over distributions that drift."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.scheduling.predictor import MAX_BUCKETS, MIN_SAMPLES, WINDOW, LengthPredictor


def request(prompt: int = 100, max_tokens: int = 2048, hint: int | None = None) -> EngineRequest:
    return EngineRequest("r", (1,) * prompt, SamplingParams(expected_output_tokens=hint), max_tokens)


def taught(lengths: Sequence[int], message: EngineRequest | None = None) -> LengthPredictor:
    predictor = LengthPredictor()
    for length in lengths:
        predictor.observe(message or request(), length)
    return predictor


@given(st.lists(st.integers(1, 2048), min_size=MIN_SAMPLES, max_size=2 * WINDOW), st.floats(0.01, 1),
       st.integers(0, 2047))
def test_the_remaining_length_is_the_quantile_of_the_latest_longer_answers(
    lengths: list[int], quantile: float, done: int
) -> None:
    longer = np.array([length for length in lengths[-WINDOW:] if length > done])
    wanted = (int(np.quantile(longer, quantile, method="inverted_cdf")) - done if len(longer)
              else min(done, 2048 - done))
    assert taught(lengths).remaining(request(), done, quantile) == wanted


@given(st.integers(1, 4096), st.integers(0, 4200), st.lists(st.integers(1, 4096), max_size=20))
def test_there_is_always_a_token_left_and_never_more_than_the_limit_allows(
    max_tokens: int, done: int, lengths: list[int]
) -> None:
    message = request(max_tokens=max_tokens)
    left = taught([min(length, max_tokens) for length in lengths], message).remaining(message, done)
    assert 1 <= left <= max(1, max_tokens - done)


def test_without_finished_requests_the_hint_counts_and_then_the_limit() -> None:
    assert LengthPredictor().remaining(request(hint=70)) == 70
    assert LengthPredictor().remaining(request(hint=70), 60) == 10
    assert LengthPredictor().remaining(request(hint=70), 80) == 2048 - 80
    assert LengthPredictor().remaining(request(max_tokens=50, hint=70)) == 50
    assert LengthPredictor().remaining(request()) == 2048


def test_prompts_limits_and_hints_have_buckets_of_their_own() -> None:
    predictor = LengthPredictor()
    kinds = {40: request(prompt=10), 300: request(prompt=1000), 12: request(max_tokens=16), 700: request(hint=600)}
    for _ in range(MIN_SAMPLES):
        for length, message in kinds.items():
            predictor.observe(message, length)
    assert [predictor.remaining(message) for message in kinds.values()] == list(kinds)


def test_an_unknown_prompt_length_is_judged_by_its_limit_and_an_unknown_limit_by_all() -> None:
    predictor = taught([50] * 20, request(prompt=10, max_tokens=64))
    for _ in range(60):
        predictor.observe(request(prompt=1000, max_tokens=2048), 500)
    assert predictor.remaining(request(prompt=100, max_tokens=100)) == 50
    assert predictor.remaining(request(prompt=100, max_tokens=600)) == 500


@pytest.mark.parametrize("before, after", [(5.0, 3.5), (3.5, 5.0)])
def test_it_follows_a_drift(before: float, after: float) -> None:
    """Once a window's worth of the new kind has finished, the old kind is forgotten."""
    draw = np.random.default_rng(0)
    first, second = (np.ceil(draw.lognormal(mean, 0.7, 4 * WINDOW)).clip(1, 2048).astype(int).tolist()
                     for mean in (before, after))
    predictor = taught(first)
    assert predictor.remaining(request()) == pytest.approx(np.exp(before), rel=0.2)
    for length in second:
        predictor.observe(request(), length)
    for quantile in (0.25, 0.5, 0.9):
        assert predictor.remaining(request(), 0, quantile) == np.quantile(second[-WINDOW:], quantile,
                                                                          method="inverted_cdf")


def test_memory_is_bounded() -> None:
    """Buckets that are not used any more make room for new ones."""
    predictor = LengthPredictor()
    for hint in range(24):
        for limit in range(24):
            for prompt in (1, 2, 4, 8):
                predictor.observe(request(prompt, 2**limit, 2**hint), 5)
    assert len(predictor._windows) == MAX_BUCKETS
    for length in range(3 * WINDOW):
        predictor.observe(request(), length + 1)
    assert max(map(len, predictor._windows.values())) == WINDOW
