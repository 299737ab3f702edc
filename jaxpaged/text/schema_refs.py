"""What a `$ref` in a JSON schema points to. Nothing outside the schema is ever read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

# Keywords whose values are schemas, lists of schemas, and objects of schemas.
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
        "unevaluatedItems", "unevaluatedProperties", "contentSchema")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class RefError(Exception):
    """A reference leads nowhere; the text says why, to follow "$ref at ... "."""


@dataclass(frozen=True, slots=True)
class Located:
    """A schema inside a document.

    Attributes:
        node: the schema.
        place: its JSON pointer from the document's root.
        base: URI that relative references in it start from; empty for the document's own.
    """

    node: Any
    place: str
    base: str

    def child(self, *steps: str | int) -> "Located":
        """What lies some keys and indices below."""
        node, place = self.node, self.place
        for step in steps:
            node, place = node[step], f"{place}/{escape(str(step))}"
        return Located(node, place, _base_of(node, self.base))


class Document:
    """One schema document, and the targets of references in it: pointers, `$id`, `$anchor` and `$dynamicAnchor`.

    Args:
        schema: the document's root.
    """

    def __init__(self, schema: Any) -> None:
        self.root = Located(schema, "", _base_of(schema, ""))
        self._resources: dict[str, Located | None] = {"": self.root}  # None: two schemas have this name
        self._anchors: dict[tuple[str, str], Located] = {}
        self._dynamic: dict[str, int] = {}
        for found in _subschemas(self.root):
            self._register(found)

    def resolve(self, ref: object, base: str, *, dynamic: bool = False) -> Located:
        """The schema that a reference points to.

        Args:
            ref: the value of `$ref`.
            base: of the schema that holds it.
            dynamic: it is that of `$dynamicRef` or `$recursiveRef`.

        Raises:
            RefError: it points to nothing, or outside the document, or depends on how it was reached.
        """
        if not isinstance(ref, str):
            raise RefError("must be a string")
        uri, _, fragment = (base + ref if ref.startswith("#") else urljoin(base, ref)).partition("#")
        if uri not in self._resources:
            raise RefError("points outside the schema, and nothing is fetched: put what it means into $defs")
        resource = self._resources[uri]
        if resource is None:
            raise RefError("names an $id that two schemas have")
        fragment = unquote(fragment)
        if dynamic and (self._dynamic.get(fragment, 0) > 1 or (not fragment and self._dynamic.get("#", 0) > 1)):
            raise RefError("has several targets, one for each way that leads to it; use $ref")
        if not fragment:
            return resource
        found = self._follow(resource, fragment) if fragment.startswith("/") else self._anchors.get((uri, fragment))
        if found is None or not isinstance(found.node, (Mapping, bool)):
            raise RefError("points to nothing in the schema")
        return found

    def _register(self, found: Located) -> None:
        node = found.node
        if _own_id(node) is not None:
            self._resources[found.base] = None if found.base in self._resources else found
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._anchors[found.base, node[key]] = found
        if isinstance(node.get("$dynamicAnchor"), str):
            self._dynamic[node["$dynamicAnchor"]] = self._dynamic.get(node["$dynamicAnchor"], 0) + 1
        if node.get("$recursiveAnchor") is True:
            self._dynamic["#"] = self._dynamic.get("#", 0) + 1
        for key in ("$id", "id"):  # until draft 7 an anchor was an id of this form
            if isinstance(node.get(key), str) and node[key].startswith("#") and len(node[key]) > 1:
                self._anchors[found.base, node[key][1:]] = found

    @staticmethod
    def _follow(found: Located, pointer: str) -> Located | None:
        for step in pointer[1:].split("/"):
            key: str | int = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found.node, list) and step.isascii() and step.isdecimal() and len(step) < 9:
                key = int(step)
                if key >= len(found.node):
                    return None
            elif not isinstance(found.node, Mapping) or key not in found.node:
                return None
            found = found.child(key)
        return found


def escape(key: str) -> str:
    """A key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _own_id(node: Any) -> str | None:
    """The URI that a schema gives itself. Draft 4 calls it `id`, which elsewhere is a keyword without meaning."""
    if not isinstance(node, Mapping):
        return None
    found = node.get("$id")
    if found is None and "draft-04" in str(node.get("$schema")):
        found = node.get("id")
    return found if isinstance(found, str) and found and not found.startswith("#") else None


def _base_of(node: Any, base: str) -> str:
    own = _own_id(node)
    return base if own is None else urljoin(base, own).partition("#")[0]


def _subschemas(found: Located) -> Iterator[Located]:
    """A schema and all schemas inside it, never the data of `const`, `enum`, `default` and `examples`."""
    node = found.node
    if not isinstance(node, Mapping):
        return
    yield found
    for key in _ONE:
        if isinstance(node.get(key), Mapping):
            yield from _subschemas(found.child(key))
    for key in _LISTS:
        if isinstance(node.get(key), list):
            for index in range(len(node[key])):
                yield from _subschemas(found.child(key, index))
    for key in _MAPS:
        if isinstance(node.get(key), Mapping):
            for name in node[key]:
                yield from _subschemas(found.child(key, name))
