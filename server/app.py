"""The ASGI application: its routes, and the answers to errors."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from jaxpaged import __version__
from jaxpaged.core.errors import EngineDeadError, RequestError, UnavailableError
from jaxpaged.core.limits import LIMITS
from jaxpaged.server.engine.output_stream import RequestFailedError, StreamClosedError
from jaxpaged.server.gate import Gate
from jaxpaged.server.protocol.body import Body
from jaxpaged.server.protocol.error_answers import (
    RETRY_AFTER_SECONDS,
    BodyTimeoutError,
    BodyTooLargeError,
    TooManyBodiesError,
    error_body,
    error_json,
    error_status,
)
from jaxpaged.server.protocol.requests import ChatCompletionRequest, CompletionRequest
from jaxpaged.server.protocol.responses import json_response, server_error
from jaxpaged.server.routes.api import Api
from jaxpaged.server.routes.embedding_route import EmbeddingRequest
from jaxpaged.server.routes.token_routes import DetokenizeRequest, TokenizeRequest

_CLIENT_CLOSED_REQUEST = 499  # only for the access log


def make_app(api: Api) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="jaxpaged", version=__version__, root_path=api.config.root_path, redirect_slashes=False)
    bodies: tuple[tuple[str, Any, type[Body]], ...] = (
        ("/v1/completions", api.completions, CompletionRequest),
        ("/v1/chat/completions", api.chat_completions, ChatCompletionRequest),
        ("/v1/embeddings", api.embeddings, EmbeddingRequest),
        ("/tokenize", api.tokenize, TokenizeRequest), ("/detokenize", api.detokenize, DetokenizeRequest))
    for path, route, body in bodies:
        schema = body.model_json_schema()
        properties = schema["properties"]
        properties["model"]["enum"] = [*api.names, None]
        for name in ("n", "best_of"):
            if name in properties:
                properties[name]["maximum"] = api.max_n
        content = {"required": True, "content": {"application/json": {"schema": schema}}}
        app.add_api_route(path, route, methods=["POST"], openapi_extra={"requestBody": content})
    for path, route in (("/v1/models", api.models), ("/health", api.health), ("/ping", api.health),
                        ("/version", api.version), ("/metrics", api.metrics), ("/engine/state", api.engine_state)):
        app.add_api_route(path, route, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"], openapi_extra={"parameters": [
        {"name": "name", "in": "path", "required": True, "schema": {"enum": list(api.names)}}]})
    app.add_api_route("/", api.page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"],
                      include_in_schema=api.config.enable_reset_prefix_cache)
    app.add_api_route("/health", api.health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/ping", api.health, methods=["HEAD", "POST"], include_in_schema=False)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Gate, keys=api.config.api_key, max_id_chars=LIMITS.max_request_id_chars)
    # Outermost: a browser asks for permission before it sends the key.
    app.add_middleware(CORSMiddleware, allow_origins=list(api.config.allowed_origins), allow_methods=["*"],
                       allow_headers=["*"], expose_headers=["x-request-id"])
    return app


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    status = error_status(error)
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status == 503 else {}
    if isinstance(error, (BodyTimeoutError, BodyTooLargeError, TooManyBodiesError)):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_response(error_body(error), status, headers)


async def _on_server_error(request: Request, error: Exception) -> Response:
    if isinstance(error, EngineDeadError):  # part of the body may still be in transit
        return json_response(server_error(error), 503, {"connection": "close"})
    if isinstance(error, UnavailableError):
        return json_response(server_error(error), 503, {"retry-after": str(RETRY_AFTER_SECONDS)})
    return json_response(server_error(error), 500)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "there is no such route", 405: "this route does not take this method"}.get(
        error.status_code, str(error.detail))
    return json_response(error_json(message, "invalid_request_error"), error.status_code, error.headers)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    # starlette raises the error again after this answer, which logs the traceback.
    return json_response(error_json("internal error; see the server's log", "internal_error"), 500)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    RequestError: _on_request_error, EngineDeadError: _on_server_error, UnavailableError: _on_server_error,
    RequestFailedError: _on_server_error,
    HTTPException: _on_http_error, ClientDisconnect: _on_client_gone, StreamClosedError: _on_client_gone,
    Exception: _on_bug,
}
