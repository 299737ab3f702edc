"""Which keyword of a schema the compiler does not accept, found by compiling its parts."""

from collections.abc import Callable
from typing import Any

from jaxpaged.text.schema_nodes import SchemaNode, children, subschemas

_MAX_REFERENCES = 64
_UNSATISFIABLE = "nsatisfiable"


def find_blame(root: SchemaNode, compile: Callable[[dict[str, Any]], str]) -> tuple[SchemaNode, str | None]:
    """The innermost schema that does not compile, and the keyword without which it does.

    Args:
        root: a prepared schema that does not compile; it is changed and changed back.
        compile: the error that a schema makes; empty if it compiles.

    Returns:
        The schema, which is `root` if no part alone is to blame, and its keyword or None.
    """
    definitions = root.pop("$defs")
    try:
        for top in [*definitions.values(), root]:
            if isinstance(top, SchemaNode) and (error := compile(_alone(top))):
                return _innermost(top, error, compile)
        compile_all = lambda: compile({**root, "$defs": definitions})  # noqa: E731
        nodes = [node for top in [root, *definitions.values()] for node in subschemas(top) if "$ref" in node]
        for node in nodes[:_MAX_REFERENCES]:
            if len(node) == 1:
                continue
            reference = node.pop("$ref")
            error = compile_all()
            node["$ref"] = reference
            if not error:
                return node, "$ref"
        return root, None
    finally:
        root["$defs"] = definitions


def _innermost(node: SchemaNode, error: str, compile: Callable[[dict[str, Any]], str]) -> tuple[SchemaNode, str | None]:
    for holder, key in children(node):
        child = holder[key]
        found = compile(_alone(child)) if isinstance(child, SchemaNode) else ""
        # A part that no value fits does no harm where it may be left out.
        if found and (_UNSATISFIABLE in error or _UNSATISFIABLE not in found):
            return _innermost(child, found, compile)
    # Those that hold other schemas last: they are to blame for what a small one beside them cannot be joined with.
    for key in sorted((key for key in node if key != "type"), key=lambda key: isinstance(node[key], (dict, list))):
        if not compile(_alone({name: value for name, value in node.items() if name != key})):
            return node, key
    return node, None


def _alone(node: Any) -> Any:
    """A copy without references."""
    if not isinstance(node, dict):
        return node
    copy = {key: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
            for key, value in node.items() if key != "$ref"}
    for holder, key in children(copy):
        holder[key] = _alone(holder[key])
    return copy
