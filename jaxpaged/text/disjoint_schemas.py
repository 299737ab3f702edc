"""Whether no value fits two schemas: `oneOf` of such schemas is `anyOf`, which is all that a grammar can say."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

_MAX_STEPS = 20_000
_MAX_DEPTH = 12
_ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class Disjointness:
    """Finds disjoint schemas. It errs on one side only: disjoint schemas may go unnoticed.

    Args:
        definitions: targets of the references, by the last step of `#/$defs/...`.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._steps = 0

    def all_disjoint(self, schemas: list[Any]) -> bool:
        """Whether no value fits two of these schemas."""
        if any(map(_all_differ, self._telling_values(schemas))):
            return True
        return all(self._disjoint(left, right, 0) for left, right in combinations(schemas, 2))

    def _telling_values(self, schemas: list[Any]) -> Iterator[list[frozenset[Any] | None]]:
        """The values that each schema names, and those of each property that the first of them requires."""
        views = [[*self._joined(schema, 0)] for schema in schemas]
        yield [next((found for view in each if (found := _values(view)) is not None), None) for each in views]
        for name in {name for view in views[0] for name in view.get("required", ())}:
            yield [next((found for view in each if view.get("type") == "object" and name in view.get("required", ())
                         and isinstance(of_name := view.get("properties", {}).get(name), Mapping)
                         and (found := _values(of_name)) is not None), None) for each in views]

    def _disjoint(self, left: Any, right: Any, depth: int) -> bool:
        self._steps += 1
        if left is False or right is False:
            return True
        if self._steps > _MAX_STEPS or depth > _MAX_DEPTH:
            return False
        all_left, all_right = [*self._joined(left, 0)], [*self._joined(right, 0)]
        if any(self._simply_disjoint(one, other, depth) for one in all_left for other in all_right):
            return True
        for views, other in ((all_left, right), (all_right, left)):
            for view in views:
                for key in ("anyOf", "oneOf"):
                    if key in view and all(self._disjoint(option, other, depth + 1) for option in view[key]):
                        return True
        return False

    def _joined(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """The schemas that a value has to fit all of, where it fits this one."""
        if isinstance(schema, Mapping) and depth < _MAX_DEPTH:
            yield schema
            if "$ref" in schema:
                yield from self._joined(self._definitions[schema["$ref"].removeprefix("#/$defs/")], depth + 1)
            for part in schema.get("allOf", ()):
                yield from self._joined(part, depth + 1)

    def _simply_disjoint(self, left: Mapping[str, Any], right: Mapping[str, Any], depth: int) -> bool:
        values, others = _values(left), _values(right)
        if values is not None and others is not None and values.isdisjoint(others):
            return True
        types, other_types = _types(left), _types(right)
        if types.isdisjoint(other_types):
            return True
        return types & other_types == {"object"} and (
            self._differ_in_a_property(left, right, depth) or self._differ_in_a_property(right, left, depth))

    def _differ_in_a_property(self, left: Mapping[str, Any], right: Mapping[str, Any], depth: int) -> bool:
        """Whether a property that `left` requires cannot be one of `right`."""
        named, others = left.get("properties", {}), right.get("properties", {})
        for name in left.get("required", ()):
            if name in others:
                if self._disjoint(named.get(name, True), others[name], depth + 1):
                    return True
            elif right.get("additionalProperties") is False and "patternProperties" not in right:
                return True
        return False


def _all_differ(values: list[frozenset[Any] | None]) -> bool:
    known = [found for found in values if found is not None]
    return len(known) == len(values) and sum(map(len, known)) == len(frozenset().union(*known))


def _values(schema: Mapping[str, Any]) -> frozenset[Any] | None:
    """The values that a schema names, None for one that names none."""
    if "const" in schema:
        return frozenset({_canonical(schema["const"])})
    return frozenset(map(_canonical, schema["enum"])) if "enum" in schema else None


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    found = schema.get("type")
    if found is None:
        values = _values(schema)
        return _ALL_TYPES if values is None else frozenset(str(kind) for kind, _ in values)
    kinds = [found] if isinstance(found, str) else found
    return frozenset("number" if kind == "integer" else kind for kind in kinds)


def _canonical(value: Any) -> tuple[str, Any]:
    """A value of JSON with its type, equal for equal values."""
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, (int, float)):
        return "number", value
    if isinstance(value, str):
        return "string", value
    if isinstance(value, Mapping):
        return "object", frozenset((name, _canonical(item)) for name, item in value.items())
    return "array", tuple(map(_canonical, value))
