"""The rule of sameness itself: strict before the first near-tie, blind after it."""

import pytest

from tests.support.sameness import compare_ids, num_decided

REFERENCE, GAPS = (5, 6, 7, 8), (1.0, 0.5, 0.0005, 2.0)


@pytest.mark.parametrize("ours", [(5, 6, 7, 8), (5, 6, 9, 9), (5, 6), (5, 6, 1, 2, 3)])
def test_same_up_to_the_first_near_tie(ours: tuple[int, ...]) -> None:
    assert num_decided(GAPS) == 2
    assert compare_ids(ours, REFERENCE, GAPS) is None


def test_a_different_id_before_it_is_named() -> None:
    assert compare_ids((5, 9, 7, 8), REFERENCE, GAPS) == "position 1: id 9, the reference has 6 with a margin of 0.5"


@pytest.mark.parametrize("ours", [(5,), (5, 6, 7), (5, 6, 7, 8, 9), ()])
def test_without_a_near_tie_the_lengths_are_equal_too(ours: tuple[int, ...]) -> None:
    error = compare_ids(ours, REFERENCE, (1.0,) * 4)
    assert error is not None and error.startswith("ended after")
