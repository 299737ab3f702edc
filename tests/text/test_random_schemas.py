"""Random schemas: each is refused, or jsonschema finds nothing wrong with what a random model writes under it."""

import contextlib
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.text.structured_outputs import GrammarCompiler
from tests.support.random_walk import RandomModel, random_model
from tests.support.schema_judge import errors
from tests.support.tiny_tokenizers import byte_level_metadata, wrap

COMPILER = GrammarCompiler()
NAMES = ["a", "b", "c"]
NUMBERS = [0, 1, -1, 5, -5, 100, 0.5, -0.5, 1.5, -2.75, 9.99, 0.001, 12345, 1e3]
VALUES = [1, -1, 0, 1.5, "a", "", None, True, [1], {"a": 1}, [], {}, 'é"\\\n', -0.25]
PATTERNS = ["^a", "^.?b$", "^[ab]{1,4}$", "^(a|b)+$", "[^a]", "^$", "x?", r"^\d+$", r"^\w*$", "^.{2}$",
    "(^a|^b)c?$"]
FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "uri", "hostname"]
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]


class Author:
    """Writes schemas."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def whole(self) -> dict[str, Any]:
        root = self.schema(3)
        return {**(root if isinstance(root, dict) else {}), "$defs": {name: self.schema(2) for name in NAMES}}

    def schema(self, depth: int) -> Any:
        kind = self.chance.random()
        if depth <= 0 or kind < 0.3:
            return self.leaf()
        if kind < 0.55:
            return self.shuffled(self.of_object(depth - 1))
        if kind < 0.7:
            return self.some({"type": "array"}, 0.9) | self.some({"items": self.schema(depth - 1)}, 0.7) | self.some(
                {"prefixItems": [self.schema(depth - 1)]}, 0.3) | self.some(
                    {"minItems": self.chance.randint(0, 2)}, 0.4) | self.some({"maxItems": self.chance.randint(0, 3)},
                    0.4)
        if kind < 0.9:
            options = [self.schema(depth - 1) for _ in range(self.chance.randint(1, 3))]
            beside = self.leaf()
            return self.shuffled({self.chance.choice(["anyOf", "allOf", "oneOf"]): options} | self.some(
                beside if isinstance(beside, dict) else {}, 0.4))
        return {"$ref": self.chance.choice(["#", *(f"#/$defs/{name}" for name in NAMES)])} | self.some(
            {"type": "object"}, 0.2)

    def some(self, keywords: dict[str, Any], probability: float) -> dict[str, Any]:
        return keywords if self.chance.random() < probability else {}

    def shuffled(self, keywords: dict[str, Any]) -> dict[str, Any]:
        items = list(keywords.items())
        self.chance.shuffle(items)
        return dict(items)

    def of_object(self, depth: int) -> dict[str, Any]:
        pick, few = self.chance.choice, self.chance.randint(0, 2)
        return (self.some({"type": "object"}, 0.85)
                | self.some({"properties": {name: self.schema(depth) for name in self.chance.sample(NAMES, few)}}, 0.85)
                | self.some({"required": self.chance.sample(NAMES, self.chance.randint(0, 2))}, 0.6)
                | self.some({"additionalProperties": pick([False, False, True, self.schema(depth)])}, 0.6)
                | self.some({"patternProperties": {pick(["^a", "^.?b$", "^x"]): self.schema(depth)}}, 0.12)
                | self.some({"minProperties": few}, 0.1) | self.some({"maxProperties": few + 1}, 0.1)
                | self.some({"propertyNames": pick([{"pattern": "^[ab]"}, {"enum": ["a", "b"]}, {"maxLength": 1}])},
                0.1)
                | self.some({"unevaluatedProperties": False}, 0.1))

    def leaf(self) -> Any:
        pick = self.chance.choice
        kind = pick(["integer", "number", "string", "boolean", "null", "const", "enum", "any"])
        if kind in ("integer", "number"):
            bounds = {key: pick(NUMBERS) for key in BOUNDS if self.chance.random() < 0.3}
            return {"type": kind} | bounds | self.some({"multipleOf": pick([2, 3, 10, 0.5, 0.1])}, 0.15)
        if kind == "string":
            return {"type": kind} | self.some({"minLength": self.chance.randint(0, 4)}, 0.3) | self.some(
                {"maxLength": self.chance.randint(0, 6)}, 0.3) | self.some({"pattern": pick(PATTERNS)},
                0.3) | self.some(
                    {"format": pick(FORMATS)}, 0.15)
        if kind == "const":
            return {"const": pick(VALUES)}
        if kind == "enum":
            return {"enum": self.chance.sample(VALUES, 3)}
        return {} if kind == "any" else {"type": kind}


@pytest.fixture(scope="module")
def model() -> Iterator[RandomModel]:
    with random_model(wrap(byte_level_metadata("gpt-2")), patience=25) as found:
        yield found


@pytest.mark.parametrize("part", [*range(4), *(pytest.param(part, marks=pytest.mark.slow) for part in range(4, 40))])
def test_random_schemas(part: int, model: RandomModel) -> None:
    met = 0
    for seed in range(60 * part, 60 * part + 60):
        schema = Author(seed).whole()
        try:
            grammar = COMPILER.grammar(StructuredOutputsParams(json=schema))
        except RequestError as error:
            assert " in the JSON schema " in error.message, error.message
            continue
        text = model.write(grammar, seed)
        with contextlib.suppress(RecursionError):  # jsonschema follows references that lead back without a step
            assert not errors(schema, json.loads(text)), (seed, text, schema)
        met += 1
    assert met > 20


def exact(number: float) -> Decimal:
    return Decimal(repr(number))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_random_numbers(part: int, model: RandomModel) -> None:
    """Judged in decimal arithmetic, where doubles are what their shortest digits say."""
    for seed in range(300 * part, 300 * part + 300):
        chance = random.Random(seed)
        numbers = [chance.randint(-20, 20), chance.randint(-(10**25), 10**25), chance.choice([-1,
        1]) * 2 ** chance.randint(
            50, 65), chance.uniform(-1, 1) * 10.0 ** chance.randint(-12, 18), *NUMBERS, -0.0, 1e-300, 5e-324, 1e300]
        schema: dict[str, Any] = {"type": chance.choice(["integer", "number"])}
        schema |= {key: chance.choice(numbers[:8]) for key in BOUNDS if chance.random() < 0.3}
        if chance.random() < 0.2:
            schema = {"const": chance.choice(numbers)}
        try:
            grammar = COMPILER.grammar(StructuredOutputsParams(json=schema))
        except RequestError:
            continue
        text = model.write(grammar, seed)
        value = Decimal(text)
        fits = {"minimum": value.__ge__, "maximum": value.__le__, "exclusiveMinimum": value.__gt__,
                "exclusiveMaximum": value.__lt__, "const": value.__eq__}
        assert all(fits[key](exact(bound)) for key, bound in schema.items() if key != "type"), (seed, text, schema)
        assert schema.get("type") != "integer" or int(text) == value
