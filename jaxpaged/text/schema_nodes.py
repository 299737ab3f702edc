"""The schemas of a prepared JSON schema, and what errors say of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxpaged.core.errors import RequestError

_MAX_PLACE_CHARS = 80

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
APPLICATORS = (*REFERENCES, "allOf", "anyOf", "oneOf", "if", "dependentSchemas")  # of schemas for the same value


class SchemaNode(dict[str, Any]):
    """A schema in a prepared one.

    Attributes:
        place: how errors call its place.
        lenient: its keywords may be dropped.
    """

    def __init__(self, place: str, lenient: bool, items: Mapping[str, Any] | None = None) -> None:
        super().__init__(items or {})
        self.place, self.lenient = place, lenient


def schema_error(key: str, place: str, why: str) -> RequestError:
    """The error of a schema that is invalid or cannot be met exactly."""
    if len(place) > _MAX_PLACE_CHARS:
        place = f"{place[:_MAX_PLACE_CHARS // 2]}...{place[-_MAX_PLACE_CHARS // 2:]}"
    text = f"{key} at {place} in the JSON schema {why}"
    return RequestError(text.encode(errors="replace").decode(), param="structured_outputs")


def subschemas(node: Any) -> Iterator[SchemaNode]:
    """All objects that are schemas in a prepared schema, outer ones first."""
    if isinstance(node, SchemaNode):
        yield node
        for holder, key in children(node):
            yield from subschemas(holder[key])


def children(node: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The schemas right inside a prepared one, each as what holds it and its key or index there."""
    for key in ("items", "additionalProperties"):
        if key in node:
            yield node, key
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield from ((node[key], index) for index in range(len(node.get(key, ()))))
    for key in ("properties", "patternProperties", "$defs"):
        yield from ((node[key], name) for name in node.get(key, ()))
