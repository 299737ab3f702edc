"""Middleware before every route: checks the API key, echoes X-Request-Id and cleans the path."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpaged.server.protocol.error_answers import error_json

OPEN_ROUTES = frozenset({"/health", "/ping", "/"})  # the page asks for the key itself


class Gate:
    """ASGI middleware. With keys, every path but OPEN_ROUTES needs one, whether a route exists there or not.

    Behind it, double and trailing slashes of the path are dropped: clients join base addresses and paths in many ways.

    Args:
        max_id_chars: a longer X-Request-Id is not sent back.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], max_id_chars: int) -> None:
        self._app, self._max_id_chars = app, max_id_chars
        # digests have equal lengths, so that comparing them leaks nothing about a key's length
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _header(scope, b"x-request-id")
        if 0 < len(request_id) <= self._max_id_chars:
            send = _echoing(send, request_id)
        if self._keys and route_path(scope) not in OPEN_ROUTES and not self._has_valid_key(scope):
            await _refuse(send)
            return
        await self._app({**scope, "path": clean_path(scope)}, receive, send)

    def _has_valid_key(self, scope: Scope) -> bool:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def route_path(scope: Scope) -> str:
    """The path used for routing, without the prefix of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(root + "/") else path


def clean_path(scope: Scope) -> str:
    """The path without double and trailing slashes, with the prefix of a proxy if it has one."""
    path, within = scope["path"], route_path(scope)
    prefix: str = path.removesuffix(within)
    return prefix + "/" + "/".join(filter(None, within.split("/")))


def _header(scope: Scope, name: bytes) -> bytes:
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _echoing(send: Send, request_id: bytes) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
        await send(message)

    return send_with_id


async def _refuse(send: Send) -> None:
    body = error_json("a valid key is needed: send it as `Authorization: Bearer KEY`", "authentication_error",
                      code="invalid_api_key")
    await send({"type": "http.response.start", "status": 401, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer")]})
    await send({"type": "http.response.body", "body": body})
