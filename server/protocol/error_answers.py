"""JSON answers, above all OpenAI's error object."""

import json

from jaxpaged.core.errors import ContextLengthError, OverloadedError, RequestError

RETRY_AFTER_SECONDS = 1


class BodyTooLargeError(RequestError):
    """The request body exceeds the limit."""


class BodyTimeoutError(RequestError):
    """The request body did not arrive in time."""


class TooManyBodiesError(OverloadedError):
    """The request body was given up for others that are being received, too."""


class MediaTypeError(RequestError):
    """The content type of the request body is not plain JSON."""


def error_status(error: RequestError) -> int:
    """The HTTP status of a refused request."""
    if isinstance(error, OverloadedError):
        return 503
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, BodyTimeoutError):
        return 408
    if isinstance(error, MediaTypeError):
        return 415
    return 404 if error.code == "model_not_found" else 400


def error_body(error: RequestError) -> bytes:
    """OpenAI's error object for a refused request."""
    code = error.code
    if code is None and isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    kind = "overloaded_error" if isinstance(error, OverloadedError) else "invalid_request_error"
    return error_json(error.message, kind, error.param, code)


def error_json(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object."""
    return to_json({"error": {"message": message, "type": kind, "param": param, "code": code}})


def to_json(value: object) -> bytes:
    """Compact UTF-8; a NaN or infinity, which JSON lacks, is a bug and raises ValueError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
