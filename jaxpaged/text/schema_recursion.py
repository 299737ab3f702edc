"""Where references lead: how deep, and whether to values that end."""

from collections.abc import Mapping, Set
from typing import Any

from jaxpaged.text.schema_nodes import children

_CONTAINERS = frozenset({"object", "array"})


def depth(root: Any, definitions: Mapping[str, Any]) -> int:
    """Levels of a schema as the compiler goes down it, into each definition at the first reference to it."""
    seen: set[str] = set()
    waiting, deepest = [(root, 1)], 1
    while waiting:
        node, level = waiting.pop()
        if isinstance(node, bool):
            continue
        deepest = max(deepest, level)
        waiting += [(holder[key], level + 1) for holder, key in reversed([*children(node)])]
        name = node.get("$ref", "").removeprefix("#/$defs/")
        if name and name not in seen:
            seen.add(name)
            waiting.append((definitions[name], level + 1))
    return deepest


def endless_definitions(definitions: Mapping[str, Any]) -> list[str]:
    """Names of the definitions that no finite value fits, such as an object that requires one of its own kind."""
    ending: set[str] = set()
    waiting, before = [*definitions], -1
    while len(waiting) != before:
        before = len(waiting)
        for name in waiting:
            if _ends(definitions[name], ending):
                ending.add(name)
        waiting = [name for name in reversed(waiting) if name not in ending]
    return [name for name in definitions if name not in ending]


def _ends(node: Any, ending: Set[str]) -> bool:
    """Whether a value of this schema may end, if those of the definitions in `ending` do."""
    if isinstance(node, bool) or "const" in node or "enum" in node:
        return True
    if "$ref" in node and node["$ref"].removeprefix("#/$defs/") not in ending:
        return False
    if not all(_ends(part, ending) for part in node.get("allOf", ())):
        return False
    if any(not any(_ends(option, ending) for option in node[key]) for key in ("anyOf", "oneOf") if key in node):
        return False
    kinds = node.get("type", "string")
    kinds = {kinds} if isinstance(kinds, str) else {*kinds}
    return bool(kinds - _CONTAINERS) or any(
        _object_ends(node, ending) if kind == "object" else _array_ends(node, ending) for kind in kinds)


def _object_ends(node: Mapping[str, Any], ending: Set[str]) -> bool:
    named, others = node.get("properties", {}), node.get("additionalProperties", True)
    return all(_ends(named.get(name, others), ending) for name in node.get("required", ()))


def _array_ends(node: Mapping[str, Any], ending: Set[str]) -> bool:
    first = node.get("prefixItems", [])[:node.get("minItems", 0)]
    rest = [node.get("items", True)] if node.get("minItems", 0) > len(first) else []
    return all(_ends(item, ending) for item in [*first, *rest])
