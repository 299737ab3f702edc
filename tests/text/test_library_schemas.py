"""Schemas as client libraries write them: each compiles, and what it lets through is valid by jsonschema's judgment.

The files hold one list for each library, with `refused` where a schema cannot be met exactly: the key and place that
the error has to name. As the parameters of a tool that is not strict these compile, too, without that key.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import SchemaPart, StructuredOutputsParams
from jaxpaged.text.structured_outputs import GrammarCompiler
from jaxpaged.text.tokenizer_files import load_tokenizer
from tests.support.random_walk import RandomModel, random_model
from tests.support.schema_judge import errors

FILES = sorted((Path(__file__).parents[1] / "support" / "data" / "schemas").glob("*.json"))
CASES = {f"{file.stem}: {case['name']}": case for file in FILES for case in json.loads(file.read_text())}
COMPILER = GrammarCompiler()
NAME = "tools[0].function.parameters"


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[RandomModel]:
    with random_model(load_tokenizer(smollm2_path)) as found:
        yield found


def test_there_are_sixty_of_six_libraries() -> None:
    assert len(FILES) == 6 and len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_a_schema_is_met_or_refused_by_key_and_place(name: str, model: RandomModel) -> None:
    case = CASES[name]
    wanted = StructuredOutputsParams(json=case["schema"])
    if "refused" in case:
        with pytest.raises(RequestError) as caught:
            COMPILER.grammar(wanted)
        assert caught.value.message.startswith(case["refused"] + " ")
        return
    grammar = COMPILER.grammar(wanted)
    assert not grammar.dropped
    for seed in range(3):
        text = model.write(grammar, seed)
        assert not errors(case["schema"], json.loads(text)), text


@pytest.mark.parametrize("name", CASES)
def test_a_tool_that_is_not_strict_loses_that_key_alone(name: str) -> None:
    case = CASES[name]
    key = case.get("refused", "").partition(" ")[0]
    part = SchemaPart("", NAME, strict=False)
    wanted = StructuredOutputsParams(json=case["schema"], schema_parts=(part,))
    if key == "$ref":  # not a note: nobody can guess what it means
        with pytest.raises(RequestError, match=r"\$ref at tools\[0\]\.function\.parameters#/properties/a"):
            COMPILER.grammar(wanted)
    else:
        assert COMPILER.grammar(wanted).dropped == ((key,) if key else ())


def test_tools_may_share_the_names_of_their_definitions(model: RandomModel) -> None:
    """And anchors, and ids: the parameters of each tool are a document of their own."""
    kinds: list[dict[str, Any]] = [
        {"$id": "https://example.com/tool", "$ref": "#/$defs/X", "$defs": {"X": {
            "$anchor": "x", "type": "object", "properties": {"v": inner, "w": {"$ref": "#x"}}, "required": ["v"],
            "additionalProperties": False}}} for inner in ({"const": 1}, {"type": "boolean"}, {"enum": ["a"]})]
    schema = {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": 2}
    parts = tuple(SchemaPart(f"/items/anyOf/{index}", f"tool {index}") for index in range(3))
    grammar = COMPILER.grammar(StructuredOutputsParams(json=schema, schema_parts=parts))
    seen = set()
    for seed in range(40):
        for item in json.loads(model.write(grammar, seed)):
            fits = [index for index, kind in enumerate(kinds) if not errors(kind, item)]
            assert fits
            seen.update(fits)
    assert seen == {0, 1, 2}
