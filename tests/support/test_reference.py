"""The committed reference ids, and the cheap check that the larger tests use, agree with transformers today."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.sameness import MARGIN, compare_ids

FILE = Path(__file__).parent / "data" / "reference_smollm2.json"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Any:
    pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from tests.support.reference_model import ReferenceModel

    return ReferenceModel(smollm2_path)


@pytest.mark.parametrize("row", json.loads(FILE.read_text()), ids=lambda row: row["name"])
def test_made_again(model: Any, row: dict[str, Any]) -> None:
    again = model.greedy(row["prompt_token_ids"], len(row["ids"]))
    assert compare_ids(again.ids, row["ids"], row["gaps"]) is None
    checked = model.check(row["prompt_token_ids"], row["ids"])
    assert compare_ids(row["ids"], checked.ids, checked.gaps) is None
    assert checked.gaps == pytest.approx(row["gaps"], abs=MARGIN / 5)
    wrong = [*row["ids"][:5], row["ids"][5] + 1, *row["ids"][6:]]
    checked = model.check(row["prompt_token_ids"], wrong)
    assert compare_ids(wrong, checked.ids, checked.gaps) is not None
