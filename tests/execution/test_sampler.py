"""The sampler against sorting in float64 NumPy, and its draws against the distribution they should have."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.execution.sampler import keep_mask, sample, state_of
from jaxpaged.scheduling.scheduler_output import FAILED_TOKEN

VOCAB, ROWS = 97, 8

run_keep_mask = jax.jit(keep_mask)
run_sample = jax.jit(sample)


def naive_mask(scaled: np.ndarray, top_k: int, top_p: float, min_p: float, slack: float) -> np.ndarray:
    """Tokens of one row that survive; with `slack` > 0 only those that do so clearly, with < 0 also near misses."""
    relative = (scaled - scaled.max()).astype(np.float64)
    kept = relative >= (np.log(min_p) + slack if min_p > 0 else -np.inf)
    if 0 < top_k < len(scaled):
        kept &= relative >= np.sort(relative)[-top_k]
    if top_p < 1:
        mass = np.where(kept, np.exp(relative), 0)
        order = np.argsort(-relative)
        up_to = np.concatenate([[0], np.cumsum(mass[order])])
        above = up_to[np.searchsorted(-relative[order], -relative, side="left")]  # mass of the more probable tokens
        kept &= above < top_p * mass.sum() * (1 - slack)
    return kept | (relative == 0)


def check_mask(scaled: np.ndarray, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> np.ndarray:
    found = np.asarray(run_keep_mask(scaled, np.array(top_k, np.int32), np.array(top_p, np.float32),
                                     np.array(min_p, np.float32)))
    for row, logits in enumerate(scaled):
        cut = top_k[row], float(np.float32(top_p[row])), float(np.float32(min_p[row]))
        surely, perhaps = (naive_mask(logits, *cut, slack=slack) for slack in (1e-5, -1e-5))
        assert (surely <= found[row]).all() and (found[row] <= perhaps).all(), f"row {row}: {cut}"
    return found


rows_of = {
    "spread": st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed).normal(0, 3, VOCAB)),
    "flat": st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed).normal(0, 1e-3, VOCAB)),
    "ties": st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed).integers(-3, 4, VOCAB) / 2),
    "peaked": st.integers(0, VOCAB - 1).map(lambda token: np.where(np.arange(VOCAB) == token, 40.0, 0.0)),
    "huge": st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed).normal(0, 1e6, VOCAB)),
    "banned": st.integers(0, 2**31).map(
        lambda seed: np.where(np.random.default_rng(seed).random(VOCAB) < 0.5, -np.inf, 1.0) + np.eye(VOCAB)[3]),
}


@settings(max_examples=80)
@given(st.data())
def test_what_survives_the_cuts(data: st.DataObject) -> None:
    rows = [data.draw(st.one_of(*rows_of.values())) for _ in range(ROWS)]
    scaled = np.stack([np.nan_to_num(row, nan=-np.inf, neginf=-np.inf) for row in rows]).astype(np.float32)

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(values, min_size=ROWS, max_size=ROWS))

    check_mask(scaled,
               each(st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1, 10**6])),
               each(st.one_of(st.just(1.0), st.floats(1e-6, 1.0))),
               each(st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1.0))))


def test_nothing_is_cut_by_default() -> None:
    scaled = np.random.default_rng(0).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    assert check_mask(scaled, [0] * ROWS, [1.0] * ROWS, [0.0] * ROWS).all()
    # nor in a row whose neighbors have everything cut
    found = check_mask(scaled, [0, 1] * (ROWS // 2), [1.0, 0.1] * (ROWS // 2), [0.0, 0.9] * (ROWS // 2))
    assert found[::2].all() and (found[1::2].sum(axis=1) == 1).all()


def test_ties_at_a_cut_all_stay() -> None:
    scaled = np.zeros((ROWS, VOCAB), np.float32)
    scaled[:, :2] = 1
    assert check_mask(scaled, [3] * ROWS, [1.0] * ROWS, [0.0] * ROWS).all()
    assert (check_mask(scaled, [1] * ROWS, [1.0] * ROWS, [0.0] * ROWS).sum(axis=1) == 2).all()
    assert (check_mask(scaled, [0] * ROWS, [0.01] * ROWS, [0.0] * ROWS).sum(axis=1) == 2).all()


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 the first two hold 7/9 of the first three."""
    probabilities = np.full((ROWS, VOCAB), 1e-30)
    probabilities[:, :4] = 0.4, 0.3, 0.2, 0.1
    scaled = np.log(probabilities).astype(np.float32)
    assert (check_mask(scaled, [3] * ROWS, [0.75] * ROWS, [0.0] * ROWS).sum(axis=1) == 2).all()
    assert (check_mask(scaled, [0] * ROWS, [0.75] * ROWS, [0.45] * ROWS).sum(axis=1) == 2).all()
    assert (check_mask(scaled, [0] * ROWS, [0.75] * ROWS, [0.0] * ROWS).sum(axis=1) == 3).all()


def check_counts(found: np.ndarray, wanted: np.ndarray) -> None:
    """Pearson's chi-square is within four of its standard deviations."""
    freedom = len(wanted) - 1
    chi_square = np.sum((found - wanted) ** 2 / wanted)
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom), f"{chi_square} with {freedom} degrees of freedom"


def request(choice: int = 0, *, seed: int = 0, **params: Any) -> EngineRequest:
    return EngineRequest("r", (1,), SamplingParams(**params), 1, seed=seed, choice=choice)


def draw(logits: np.ndarray, requests: Sequence[EngineRequest], positions: Sequence[int]) -> list[int]:
    """Ids of these rows, padded to a multiple of ROWS as the engine pads."""
    size = -(-len(requests) // ROWS) * ROWS
    padded = np.zeros((size, logits.shape[1]), np.float32)
    padded[: len(requests)] = logits
    position = np.zeros(size, np.int32)
    position[: len(requests)] = positions
    return np.asarray(run_sample(padded, state_of(requests, size), position))[: len(requests)].tolist()


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


def test_greedy_takes_the_best_and_of_equals_the_first() -> None:
    logits = random_logits(ROWS)
    logits[2, [5, 60]] = 50
    logits[3] = 0
    logits[4] = -np.inf
    logits[4, 96] = -1e30
    ids = draw(logits, [request(temperature=0)] * ROWS, range(ROWS))
    assert ids == logits.argmax(axis=1).tolist()
    assert ids[2:5] == [5, 0, 96]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-310, 1e-45, 1e-40, 1e-6, 1e-5, 1e-4, 1e-3])
def test_temperatures_down_to_nothing_are_greedy(temperature: float) -> None:
    logits = random_logits(ROWS, 1)
    logits[range(ROWS), logits.argmax(axis=1)] += 0.1
    for seed in range(4):
        ids = draw(logits, [request(temperature=temperature, seed=seed)] * ROWS, range(ROWS))
        assert ids == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-42}, {"top_p": 1e-60}, {"min_p": 1.0},
                                    {"min_p": 1.0, "temperature": 1.7}, {"top_p": 1e-6, "temperature": 0.3}], ids=str)
def test_cuts_down_to_one_token_are_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(ROWS, 2)
    for seed in range(4):
        ids = draw(logits, [request(seed=seed, **params)] * ROWS, range(ROWS))
        assert ids == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [100.0, 1e30, 1e300])
def test_very_hot_is_uniform(temperature: float) -> None:
    logits = random_logits(4000)
    ids = draw(logits, [request(temperature=temperature, seed=seed) for seed in range(4000)], [1] * 4000)
    check_counts(np.bincount(ids, minlength=VOCAB), np.full(VOCAB, 4000 / VOCAB))


BAD_ROWS = {
    "one nan": lambda row: np.where(np.arange(VOCAB) == 13, np.nan, row),
    "all nan": lambda row: np.full(VOCAB, np.nan),
    "one inf": lambda row: np.where(np.arange(VOCAB) == 13, np.inf, row),
    "nan and inf": lambda row: np.where(np.arange(VOCAB) % 2 == 0, np.nan, np.inf),
    "all -inf": lambda row: np.full(VOCAB, -np.inf),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.7, "min_p": 0.01}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(kind: str, params: dict[str, Any]) -> None:
    logits = random_logits(ROWS, 3)
    requests = [request(seed=seed, **params) for seed in range(ROWS)]
    wanted = draw(logits, requests, range(ROWS))
    for bad in (0, 3, ROWS - 1):
        spoiled = logits.copy()
        spoiled[bad] = BAD_ROWS[kind](logits[bad])
        ids = draw(spoiled, requests, range(ROWS))
        assert ids[bad] == FAILED_TOKEN
        assert ids[:bad] + ids[bad + 1 :] == wanted[:bad] + wanted[bad + 1 :]


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.full((2000, VOCAB), -np.inf, np.float32)
    logits[:, [7, 8]] = 0
    ids = draw(logits, [request(seed=seed) for seed in range(2000)], [5] * 2000)
    assert set(ids) == {7, 8}


MIXED = [request(0, seed=1), request(1, seed=1), request(seed=2, temperature=0), request(seed=3, top_k=4),
         request(seed=4, temperature=0.3, top_p=0.9), request(seed=5, min_p=0.2), request(seed=2**63 + 5),
         request(seed=6, temperature=1.7, top_k=20, top_p=0.8, min_p=0.05)]


def test_a_draw_depends_on_its_own_row_alone() -> None:
    """Not on its index in the batch, its batch mates, or the size of the batch."""
    logits, positions = random_logits(ROWS, 4), [3, 3, 9, 27, 100, 1, 2000, 8]
    wanted = draw(logits, MIXED, positions)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(ROWS)
        ids = draw(logits[order], [MIXED[row] for row in order], [positions[row] for row in order])
        assert ids == [wanted[row] for row in order]
    for row in range(ROWS):
        assert draw(logits[row : row + 1], [MIXED[row]], [positions[row]]) == [wanted[row]]
    many = draw(np.tile(logits, (4, 1)), MIXED * 4, positions * 4)
    assert many == wanted * 4


def test_each_row_keeps_to_its_own_parameters() -> None:
    logits = np.tile(random_logits(1, 5), (ROWS, 1))
    seen: list[set[int]] = [set() for _ in range(ROWS)]
    for position in range(400):
        for row, token in enumerate(draw(logits, MIXED, [position] * ROWS)):
            seen[row].add(token)
    for row, found in enumerate(seen):
        params = MIXED[row].params
        scaled = logits[row] / np.float32(params.temperature or 1)
        allowed = naive_mask(scaled, params.top_k, params.top_p, params.min_p, -1e-5)
        assert found <= set(np.flatnonzero(allowed))
        assert len(found) == 1 if params.greedy else len(found) > allowed.sum() // 3


@pytest.mark.parametrize("params", [
    {}, {"temperature": 0.5}, {"temperature": 2.5}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
], ids=str)
def test_draws_have_the_distribution_of_the_softmax(params: dict[str, Any]) -> None:
    """Over seeds and over positions."""
    count = 8000
    logits = np.tile(random_logits(1, 6, vocab=16), (count, 1))
    options = SamplingParams(**params)
    scaled = logits[0] / np.float32(options.temperature)
    kept = naive_mask(scaled, options.top_k, options.top_p, options.min_p, 0.0)
    weights = np.where(kept, np.exp(scaled.astype(np.float64) - scaled.max()), 0)
    wanted = count * weights / weights.sum()
    for requests, positions in (
        ([request(seed=seed, **params) for seed in range(count)], [11] * count),
        ([request(seed=9, **params)] * count, range(count)),
        ([request(choice, seed=9, **params) for choice in range(count)], [11] * count),
    ):
        found = np.bincount(draw(logits, requests, positions), minlength=16)
        assert not found[~kept].any()
        check_counts(found[kept], wanted[kept])


def test_seeds_choices_and_positions_each_make_a_difference() -> None:
    """Neighboring numbers, swapped ones, and seeds that differ in their high half alone."""
    count = 24
    logits = np.zeros((count, VOCAB), np.float32)
    sequences = {
        (seed, choice, first): tuple(draw(logits, [request(choice, seed=seed)] * count, range(first, first + count)))
        for seed, choice, first in [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (2**63, 0, 0), (2**64 - 1, 0, 0), (0, 1, 0),
                                    (0, 2, 0), (1, 1, 0), (0, 0, 1000), (0, 0, 1024), (0, 1000, 0)]
    }
    assert len(set(sequences.values())) == len(sequences)
    assert all(len(set(sequence)) > count // 2 for sequence in sequences.values())
    again = draw(logits, [request(seed=0)] * count, range(count))
    assert tuple(again) == sequences[0, 0, 0]
    # what one choice draws at a position is not what another draws a position later
    matches = sum(a == b for a, b in zip(sequences[0, 0, 0][1:], sequences[0, 1, 0], strict=False))
    assert matches <= 3


def test_a_large_vocabulary() -> None:
    logits = np.random.default_rng(8).normal(0, 2, (ROWS, 49_152)).astype(np.float32)
    check_mask(logits[:4], [50, 0, 1000, 0], [1.0, 0.9, 0.5, 1.0], [0.0, 0.0, 1e-4, 0.05])
    ids = draw(logits, [request(seed=seed, top_k=3) for seed in range(ROWS)], range(ROWS))
    assert all(token in np.argsort(row)[-3:] for token, row in zip(ids, logits, strict=True))
