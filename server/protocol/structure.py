"""The structured output of a request, under all its field names."""

from typing import Any

from jaxpaged.core.compatibility import OLD_STRUCTURED_FIELDS
from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.core.sampling_params import STRUCTURED_KINDS, StructuredOutputsParams

# Of `structured_outputs`: exactly one of the first, and any of the others.
_KEYS = (*STRUCTURED_KINDS, "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def structured_outputs(request: Any) -> StructuredOutputsParams | None:
    """The structured output that a request asks for, under any name.

    Raises:
        RequestError: it is invalid, or there are several.
    """
    found = _named(request)
    if not found:
        return None
    if len(found) > 1:
        raise RequestError(f"{found[0][0]} and {found[1][0]} cannot be combined; leave one out", param=found[1][0])
    [(name, wanted)] = found
    given = {key: value for key, value in wanted.items() if value is not None}
    for key in given:
        if key not in _KEYS:
            raise NotSupportedError(f"{name}.{key[:40]} is not supported; known are {', '.join(_KEYS)}", param=name)
    try:
        return StructuredOutputsParams(**given)
    except RequestError as error:
        raise error.with_param(name) from None


def structured_outputs_field(request: Any) -> str:
    """The field that asks for structured output; without one it is tools, whose calls are required."""
    return next((name for name, _ in _named(request)), "tools")


def _named(request: Any) -> list[tuple[str, dict[str, Any]]]:
    """The fields of a request that ask for structured output, each as `structured_outputs` would be."""
    found: list[tuple[str, dict[str, Any]]] = []
    if request.structured_outputs is not None:
        found.append(("structured_outputs", request.structured_outputs))
    if request.response_format is not None:
        wanted = _response_format(request.response_format)
        if wanted is not None:
            found.append(("response_format", wanted))
    for name, key in OLD_STRUCTURED_FIELDS.items():
        if getattr(request, name) not in (None, False):
            found.append((name, {key: getattr(request, name)}))
    return found


def _response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # as several servers had it before json_schema
        return {"json_object": True} if schema is None else {"json": _schema(schema, "response_format.schema")}
    if kind != "json_schema":
        raise RequestError("response_format.type must be text, json_object or json_schema", param="response_format")
    if given.get("json_schema") is None and given.get("schema") is not None:
        return {"json": _schema(given["schema"], "response_format.schema")}
    inner = given.get("json_schema")
    return {"json": _schema(inner.get("schema") if isinstance(inner, dict) else None,
                            "response_format.json_schema.schema")}


def _schema(given: object, name: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RequestError(f"{name} must be a JSON schema", param="response_format")
    return given
