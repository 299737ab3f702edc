"""Request bodies: from bytes to checked fields, and the errors of invalid ones."""

import logging
import math
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxpaged.core.compatibility import IGNORED_FIELDS, OLD_STRUCTURED_FIELDS, UNSUPPORTED_FIELDS
from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.core.limits import LIMITS, Limits
from jaxpaged.text.conversation import unknown_message_fields

logger = logging.getLogger(__name__)

MAX_UNKNOWN_FIELDS_LOGGED = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some clients on Windows send it, and readers of JSON may ignore it

_EXPECTED = {"stop": "must be a string or a list of strings", "stream_options": "must be an object",
             "messages": "must be a list of objects", "tools": "must be a list of objects",
             "stop_token_ids": "must be a list of token ids", "allowed_token_ids": "must be a list of token ids",
             "bad_words": "must be a list of strings", "logit_bias": "must map token ids to numbers",
             "structured_outputs": "must be an object", "response_format": "must be an object",
             "guided_json": "must be a JSON schema", "guided_choice": "must be a list of strings"}


class Body(BaseModel):
    """The base of all request bodies. A field set to null counts as left out."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="a name that GET /v1/models lists")

    def check(self, limits: Limits) -> None:
        """Refuse values that the fields' types allow.

        Raises:
            RequestError: names the field.
        """


_Body = TypeVar("_Body", bound=Body)


class BodyReader:
    """Parses and checks request bodies, and logs each unknown field name once."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._unknown: set[str] = set()
        self._warned = False

    def read_body(self, kind: type[_Body], body: bytes) -> _Body:
        """Parse and check one body.

        Raises:
            RequestError: the body is invalid; the text names the field, never its value.
        """
        body = body.removeprefix(_BYTE_ORDER_MARK)
        _check_structure(body, self._limits)
        try:
            request = kind.model_validate_json(body)
        except ValidationError as error:
            raise _explain(error) from None
        if b"NaN" in body or b"Infinity" in body:  # maybe only in a string; pydantic accepts them as numbers
            for name, value in request:
                if not _is_finite(value):
                    raise RequestError(f"{name} holds a number that is not valid JSON", param=name)
        for name in _unknown_fields(request):
            if name not in UNSUPPORTED_FIELDS and name not in IGNORED_FIELDS and name not in self._unknown \
                    and len(self._unknown) < MAX_UNKNOWN_FIELDS_LOGGED:
                self._unknown.add(name)
                logger.warning("ignoring the unknown request field %r", name[:64])
        old = [name for name in OLD_STRUCTURED_FIELDS if getattr(request, name, None) is not None]
        if old and not self._warned:
            self._warned = True
            logger.warning("%s is an old name: use structured_outputs", old[0])
        _refuse_unsupported(request)
        request.check(self._limits)
        return request


def _refuse_unsupported(request: Body) -> None:
    for name, value in (request.model_extra or {}).items():
        neutral = UNSUPPORTED_FIELDS.get(name)
        if neutral is not None and value is not None and not any(
                type(value) is type(item) and value == item for item in neutral):
            raise NotSupportedError(f"{name} is not supported here; leave it out", param=name)


def _unknown_fields(model: BaseModel, prefix: str = "") -> list[str]:
    """Names of unknown fields, also in nested objects, as `stream_options.name`."""
    names = [prefix + name for name, value in (model.model_extra or {}).items() if value is not None]
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            names += _unknown_fields(value, f"{prefix}{name}.")
        elif name == "messages" and value:
            names += unknown_message_fields(value)
    return names


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


def _check_structure(body: bytes, limits: Limits) -> None:
    """Refuse a body that would take seconds to parse, during which the event loop is blocked."""
    _at_most(body.count(b'"'), "quotation marks", limits.max_body_quotes)
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # strings
    containers = sum(map(outside.count, (b":", b"{", b"[")))
    _at_most(containers, "keys, objects and lists", limits.max_body_containers)
    _at_most(outside.count(b","), "values", limits.max_body_values)


def _at_most(count: int, what: str, maximum: int) -> None:
    if count > maximum:
        raise RequestError(f"the request body's JSON holds more than {maximum} {what}")


def _explain(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path, text = first["loc"], first["msg"]
    if first["type"] == "json_invalid":
        hint = "; half of a surrogate pair is no character" if "hex escape" in text else ""
        return RequestError(f"the request body is not valid JSON: {text.removeprefix('Invalid JSON: ')}{hint}")
    if not path:
        return RequestError("the request body must be a JSON object")
    param = str(path[0])
    if param == "stream_options" and len(path) == 2:
        return RequestError(f"stream_options.{path[1]} must be true or false", param=param)
    if param in _EXPECTED:
        return RequestError(f"{param} {_EXPECTED[param]}", param=param)
    return RequestError(f"{param} {text.replace('Input should be', 'must be')}", param=param)
