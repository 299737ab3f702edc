"""What can be said of a JSON schema only when all of it has been translated."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.text.disjoint_schemas import Disjointness
from jaxpaged.text.schema_nodes import APPLICATORS, BOUNDS, SchemaNode, schema_error, subschemas
from jaxpaged.text.schema_numbers import next_inside

_OF_NUMBERS = (*BOUNDS, "multipleOf")


def check_cycles(definitions: Mapping[str, Any]) -> None:
    """Refuse references that lead back to themselves and describe nothing."""
    checked: set[str] = set()
    for name in definitions:
        seen: set[str] = set()
        while name not in checked and isinstance(node := definitions[name], SchemaNode) and node.keys() == {"$ref"}:
            if name in seen:
                raise schema_error("$ref", node.place, "leads back to itself")
            seen.add(name)
            name = node["$ref"].removeprefix("#/$defs/")
        checked |= seen


def resolve_one_of(root: SchemaNode, disjointness: Disjointness) -> list[str]:
    """Turn `oneOf` into `anyOf` where no value fits two of its schemas; returns the keywords dropped to do so."""
    dropped: list[str] = []
    for node in list(subschemas(root)):
        options = node.get("oneOf")
        if options is None:
            continue
        if not disjointness.all_disjoint(options):
            if not node.lenient:
                raise schema_error("oneOf", node.place, "may have values that fit two of its schemas; "
                                   "use anyOf")
            dropped.append("oneOf")
        items = list(node.items())
        node.clear()
        for key, value in items:
            if key != "oneOf":
                node[key] = [*node.get("allOf", ()), *value] if key == "allOf" else value
            elif any(other == "anyOf" for other, _ in items):
                node["allOf"] = [*node.get("allOf", ()), SchemaNode(node.place, node.lenient, {"anyOf": value})]
            else:
                node["anyOf"] = value
    return dropped


def check_names(root: SchemaNode) -> None:
    """Refuse names of the model's choice where it may write them as escapes: they could be known ones."""
    for node in subschemas(root):
        if node.keys() & {"properties", "required"} and node.get("additionalProperties") is not False:
            raise schema_error("additionalProperties", node.place, "must be false in a schema whose constants "
                               "hold control characters")


def joins_numbers(root: SchemaNode) -> bool:
    """Whether a number may have to fit two schemas of numbers."""
    return any("allOf" in node or not (node.keys().isdisjoint(APPLICATORS) or node.keys().isdisjoint(_OF_NUMBERS))
               for node in subschemas(root))


def avoid_exclusive(node: SchemaNode, joined: bool) -> None:
    """Include the double next to an exclusive integer where the compiler would include the integer itself.

    It does so beside another bound less than 1 away, which other schemas may hold if `joined`.
    """
    for lower in (True, False) if node.get("type") != "integer" else ():
        same, other, exclusive, other_exclusive = BOUNDS if lower else (BOUNDS[1], BOUNDS[0], BOUNDS[3], BOUNDS[2])
        value = node.get(exclusive)
        near = joined or any(abs(node[key] - value) < 1 for key in (other, other_exclusive) if key in node and value
                             is not None)
        if value is None or not near or (inside := next_inside(value, lower=lower)) is None:
            continue
        del node[exclusive]
        if same in node:
            node["allOf"] = [*node.get("allOf", ()), SchemaNode(node.place, node.lenient, {same: inside})]
        else:
            node[same] = inside
