"""Forms in which values arrive from Python code: numbers and arrays of numpy, schemas as dicts and classes."""

import json
from typing import Any

import numpy as np
import pydantic
import pytest

from jaxpaged import SamplingParams, StructuredOutputsParams
from jaxpaged.errors import RequestError


def made(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def test_numbers_of_numpy_in_every_field() -> None:
    ids = np.array([3, 1, 3])
    for form in (ids, list(ids), tuple(ids)):
        params = made(stop_token_ids=form, allowed_token_ids=form)
        assert params.stop_token_ids == params.allowed_token_ids == (3, 1)
        assert {type(item) for item in params.stop_token_ids or ()} == {int}
    params = made(logit_bias={ids[0]: np.float32(2.5)}, temperature=np.float32(0.5), n=np.int64(2))
    assert params.logit_bias == {3: 2.5} and (params.temperature, params.n) == (0.5, 2)
    for bad in ([np.True_], [True], np.array([0.5]), [np.int64(-1)], np.array([[1]])):
        with pytest.raises(RequestError, match="stop_token_ids"):
            made(stop_token_ids=bad)


class City(pydantic.BaseModel):
    """An answer."""

    name: str
    people: int


@pytest.mark.parametrize("form", [City, City.model_json_schema(), {"json": City}, {"json": City.model_json_schema()},
                                  StructuredOutputsParams(json=City)])  # type: ignore[arg-type]
def test_schemas_as_dicts_and_pydantic_classes(form: Any) -> None:
    wanted = SamplingParams(structured_outputs=form).structured_outputs
    assert isinstance(wanted, StructuredOutputsParams) and wanted.json == City.model_json_schema()
    assert json.dumps(wanted.json)


@pytest.mark.parametrize(("form", "text"), [
    ({"regex": "a", "pattern": "b"}, "no field 'pattern'"), (5, "pydantic class"),
    ({"regex": "a", "json": {}}, "exactly one of"),
])
def test_other_forms_are_refused(form: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        SamplingParams(structured_outputs=form)
