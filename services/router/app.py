"""The HTTP API: routes and nothing else. Bodies are read and parsed by hand so that every error has one form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from services.router.api_keys import ApiKeys
from services.router.error_object import error_response, status_response
from services.router.frontend import Frontend
from services.router.http_edge import HttpEdge, read_json_body, receipt_of
from services.router.metrics import CONTENT_TYPE, RouterMetrics
from services.router.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from services.router.responses_request import ResponsesRequest
from services.router.served_model import ServedModel
from services.router.workers import WorkerDirectory
from shared.cache.redis_prefix_index import RedisPrefixIndexReader
from shared.errors import PagewireError, ResponseNotFoundError


@dataclass(frozen=True)
class RouterParts:
    """What the routes need, built in __main__. `start` and `stop` run on the server's event loop."""

    model: ServedModel
    api_keys: ApiKeys
    directory: WorkerDirectory
    index: RedisPrefixIndexReader
    frontend: Frontend
    metrics: RouterMetrics
    start: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]


def package_version() -> str:
    try:
        return version("pagewire")
    except PackageNotFoundError:
        return "0.0.0"


def create_app(parts: RouterParts) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await parts.start()
        try:
            yield
        finally:
            await parts.stop()

    app = FastAPI(title="pagewire", version=package_version(), lifespan=lifespan, redirect_slashes=False)
    _add_error_handlers(app)
    _add_generation_routes(app, parts)
    _add_model_routes(app, parts)
    _add_status_routes(app, parts)
    return HttpEdge(app, parts.api_keys, lambda route, status: parts.metrics.http_requests.labels(route, str(status)).inc())


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(PagewireError)
    async def ours(_request: Request, error: PagewireError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path[:200]}"
        return status_response(error.status_code, message, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return status_response(400, str(error.errors()[0]["msg"]))

    @app.exception_handler(Exception)
    async def bug(_request: Request, _error: Exception) -> Response:
        """The framework raises it again when it has sent this, so that the edge logs it."""
        return status_response(500, "internal error; the log of the router has the details")

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return status_response(400, "the client hung up while sending the body")


def _body_schema(body_type: type[BaseModel]) -> dict[str, Any]:
    schema = body_type.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    # Nested models stand in place: FastAPI does not know of schemas given by hand.
    text = orjson.dumps(schema).decode()
    for _ in definitions:
        for name, definition in definitions.items():
            text = text.replace(f'{{"$ref":"#/components/schemas/{name}"}}', orjson.dumps(definition).decode())
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": orjson.loads(text)}}}}


def _add_generation_routes(app: FastAPI, parts: RouterParts) -> None:
    @app.post("/v1/completions", response_model=None, openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionRequest, await read_json_body(request))
        return await parts.frontend.complete(body, receipt_of(request))

    @app.post("/v1/chat/completions", response_model=None, openapi_extra=_body_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatCompletionRequest, await read_json_body(request))
        return await parts.frontend.chat(body, receipt_of(request))

    @app.post("/v1/responses", response_model=None, openapi_extra=_body_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        body = parse_body(ResponsesRequest, await read_json_body(request))
        return await parts.frontend.respond(body, receipt_of(request))

    @app.api_route("/v1/responses/{response_id}", methods=["GET", "DELETE"], response_model=None)
    async def stored_response(response_id: str) -> Response:
        raise ResponseNotFoundError(f"there is no response {response_id[:100]!r}: this server stores none (as with store=false)")


def _add_model_routes(app: FastAPI, parts: RouterParts) -> None:
    model = parts.model

    def card() -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "pagewire",
            "root": model.name,
            "parent": None,
            "max_model_len": parts.frontend.max_model_len,
            "permission": [],
        }

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        model.check_name(name)
        return _json(card())

    @app.post("/tokenize", response_model=None, openapi_extra=_body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        token_ids = await parts.frontend.tokenize(parse_body(TokenizeRequest, await read_json_body(request)))
        return _json({"tokens": token_ids, "count": len(token_ids), "max_model_len": parts.frontend.max_model_len})

    @app.post("/detokenize", response_model=None, openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeRequest, await read_json_body(request))
        model.check_name(body.model)
        model.check_prompt_ids(body.tokens)
        return _json({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_status_routes(app: FastAPI, parts: RouterParts) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/ping", response_model=None)
    async def ping() -> Response:
        return Response(status_code=200)

    @app.get("/version", response_model=None)
    async def show_version() -> Response:
        return _json({"version": package_version()})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        directory = parts.directory
        details = {
            "ready": directory.is_ready,
            "model": parts.model.name,
            "prefill": len(directory.usable("prefill")),
            "decode": len(directory.usable("decode")),
            "required_roles": directory.required_roles,
            "redis": "ok" if directory.redis_ok else "unreachable",
            "prefix_index": "ok" if parts.index.healthy else "degraded",
            "workers": [
                {"worker_id": worker.record.worker_id, "role": worker.record.role, "connected": worker.client.is_connected}
                for worker in directory.workers
            ],
        }
        return _json(details, 200 if directory.is_ready else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(parts.metrics.render(), media_type=CONTENT_TYPE)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
