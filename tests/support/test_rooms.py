"""The order of the test files names files that are there, and the table per room adds up."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import LONGEST, SAME_WORKER, seconds_by_room

TESTS = Path(__file__).resolve().parents[1]


def test_every_file_of_the_order_exists_once() -> None:
    files = (*LONGEST, *SAME_WORKER)
    assert len(set(files)) == len(files)
    assert not [file for file in (*files, *SAME_WORKER.values()) if not (TESTS / file).is_file()]


def test_a_room_has_the_seconds_of_its_tests_and_their_fixtures() -> None:
    def report(node_id: str, when: Any, duration: float) -> pytest.TestReport:
        return pytest.TestReport(node_id, ("", None, ""), {}, "passed", None, when, duration=duration)

    found = seconds_by_room([
        report("tests/core/test_a.py::one", "setup", 1.0), report("tests/core/test_a.py::one", "call", 2.0),
        report("tests/core/test_b.py::two", "call", 0.5), report("tests/test_c.py::three", "call", 4.0)])
    assert found == {".": (1, 4.0), "core": (2, 3.5)} and list(found) == [".", "core"]
