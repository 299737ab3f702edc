"""A request to an ASGI application in the same process."""

import asyncio

from starlette.types import ASGIApp, Message, Scope


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """POST a JSON body.

    Returns:
        The status and the response's body.
    """
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]}
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, list[bytes]()

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # the client stays
        return incoming.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
