"""The fields of a request that ask for structured output: all their names, and what cannot work."""

import json
from typing import Any

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.server.protocol.body import BodyReader
from jaxpaged.server.protocol.requests import ChatCompletionRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(("fields", "wanted"), [
    ({"response_format": {"type": "text"}}, None), ({"structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
     {"json": SCHEMA}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_object", "schema": None}}, {"json_object": True}),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
    *[({"structured_outputs": given}, given) for given in (
        {"json_object": True, "disable_any_whitespace": True}, {"json": SCHEMA, "whitespace_pattern": " ?"},
        {"json": SCHEMA, "disable_additional_properties": True}, {"regex": "a", "disable_any_whitespace": False})],
    ({"guided_json": SCHEMA}, {"json": SCHEMA}), ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}), ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
    ({"guided_json_object": True}, {"json_object": True}), ({"guided_json_object": False}, None),
])
@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_all_names_of_the_field(kind: Any, fields: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    body = BodyReader().read_body(kind, json.dumps(fields).encode())
    expected = None if wanted is None else StructuredOutputsParams(**wanted)
    assert body.sampling_params(None, {}).structured_outputs == expected


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": {"type": "yaml"}}, "response_format"), ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format"),
    ({"structured_outputs": {"json_object": True, "structural_tag": {}}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": True, "schema_parts": []}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": 3}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": "yes"}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}},
     "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"guided_regex": 3}, "guided_regex"), ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
])
def test_fields_that_cannot_work(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BodyReader().read_body(CompletionRequest, json.dumps(fields).encode()).sampling_params(None, {})
    assert caught.value.param == param


def test_an_old_name_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader()
    for _ in range(3):
        reader.read_body(CompletionRequest, b'{"guided_regex": "a"}')
    [line] = [record.getMessage() for record in caplog.records]
    assert "structured_outputs" in line
