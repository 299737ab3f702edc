"""What `jaxpaged models` says is true of the registry, of the formats and of the tests."""

import pytest

from jaxpaged.commands.cli import main
from jaxpaged.commands.models import support_matrix
from jaxpaged.loading.gguf import TENSOR_TYPES
from jaxpaged.loading.gguf_checkpoint import gguf_names
from jaxpaged.models.registry import FAMILIES, find_family
from tests.loading.test_gguf import KINDS
from tests.models.test_models import CHECKPOINTS
from tests.models.test_twins import TWINS


def test_every_family_is_a_row_and_every_row_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = support_matrix()
    assert list(rows) == sorted(FAMILIES)
    assert main(["models"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for name, facts in rows.items():
        at = printed.index(name) + 1
        assert printed[at:at + len(facts)] == [f"  {key:<11}{value}" for key, value in facts.items()]


def test_every_family_is_tested_as_it_says() -> None:
    """Tiny checkpoints of each are compared with transformers, or with another model of it that is equal."""
    tested = {changes.get("model_type", "llama") for changes in CHECKPOINTS.values()}
    twins = {find_family(twin.config).model_type for twin in TWINS.values()}
    for name, facts in support_matrix().items():
        own = "tiny checkpoints, against transformers" in facts["tested by"]
        assert own or "tiny checkpoints, against those of an equal model" in facts["tested by"]
        assert FAMILIES[name].model_type in (tested if own else twins)


def test_the_formats_are_those_of_the_readers() -> None:
    for name, facts in support_matrix().items():
        assert all(file in facts["formats"] for file in gguf_names(name))
        assert ("GGUF" in facts["formats"]) == bool(gguf_names(name))
        assert ("GGUF" in facts["quantized"]) == bool(gguf_names(name))
    assert {kind.name for kind in KINDS} == set(TENSOR_TYPES)
