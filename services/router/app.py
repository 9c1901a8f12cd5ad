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

from services.router.frontend import Frontend
from services.router.http import openapi
from services.router.http.api_keys import ApiKeys
from services.router.http.error_object import error_response, status_response
from services.router.http.http_edge import HttpEdge, read_json_body, receipt_of
from services.router.metrics import CONTENT_TYPE, RouterMetrics
from services.router.openai.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from services.router.openai.responses_request import ResponsesRequest
from services.router.served_model import ServedModel
from services.router.workers import WorkerDirectory
from shared.cache.redis_prefix_index import RedisPrefixIndexReader
from shared.errors import PagewireError, ResponseNotFoundError

Route = Callable[..., Awaitable[Response]]
_BODY_TYPES = (CompletionRequest, ChatCompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)


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

    app = FastAPI(
        title="pagewire",
        version=package_version(),
        description="Large language models served with prefill and decode on separate services.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    _add_error_handlers(app)
    _add_generation_routes(app, parts)
    _add_model_routes(app, parts)
    _add_status_routes(app, parts)
    openapi.describe(app, _BODY_TYPES, parts.api_keys.are_needed)
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


def _add_generation_routes(app: FastAPI, parts: RouterParts) -> None:
    def route(path: str, body_type: type[BaseModel], answer: type[BaseModel], stream: str) -> Callable[[Route], Route]:
        responses = openapi.answers(answer, openapi.GENERATION_ERRORS, stream)
        return app.post(path, response_model=None, tags=["generate"], openapi_extra=openapi.takes(body_type), responses=responses)

    @route("/v1/completions", CompletionRequest, openapi.Completion, "A Completion a token, each with one choice, then [DONE].")
    async def completions(request: Request) -> Response:
        """Complete one or more prompts."""
        body = parse_body(CompletionRequest, await read_json_body(request))
        return await parts.frontend.complete(body, receipt_of(request))

    @route("/v1/chat/completions", ChatCompletionRequest, openapi.ChatCompletion, "A chat.completion.chunk a token, then [DONE].")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = parse_body(ChatCompletionRequest, await read_json_body(request))
        return await parts.frontend.chat(body, receipt_of(request))

    @route("/v1/responses", ResponsesRequest, openapi.ResponseObject, "Named events from response.created to response.completed.")
    async def responses(request: Request) -> Response:
        """Answer a text or a conversation, in the form of the Responses API. Nothing is stored."""
        body = parse_body(ResponsesRequest, await read_json_body(request))
        return await parts.frontend.respond(body, receipt_of(request))

    @app.get("/v1/responses/{response_id}", response_model=None, tags=["generate"], responses=openapi.answers(None, (404,)))
    @app.delete("/v1/responses/{response_id}", response_model=None, tags=["generate"], responses=openapi.answers(None, (404,)))
    async def stored_response(response_id: str) -> Response:
        """No response is stored, so there is none to give."""
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

    @app.get("/v1/models", response_model=None, tags=["models"], responses=openapi.answers(openapi.ModelList))
    async def models() -> Response:
        """The model that is served."""
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}", response_model=None, tags=["models"], responses=openapi.answers(openapi.ModelCard, (404,)))
    async def one_model(name: str) -> Response:
        """A model by its name."""
        model.check_name(name)
        return _json(card())

    def token_route(path: str, body_type: type[BaseModel], answer: type[BaseModel]) -> Callable[[Route], Route]:
        responses = openapi.answers(answer, openapi.BODY_ERRORS)
        return app.post(path, response_model=None, tags=["tokens"], openapi_extra=openapi.takes(body_type), responses=responses)

    @token_route("/tokenize", TokenizeRequest, openapi.Tokens)
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of a conversation, as a request to generate would make them."""
        token_ids = await parts.frontend.tokenize(parse_body(TokenizeRequest, await read_json_body(request)))
        return _json({"tokens": token_ids, "count": len(token_ids), "max_model_len": parts.frontend.max_model_len})

    @token_route("/detokenize", DetokenizeRequest, openapi.Text)
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = parse_body(DetokenizeRequest, await read_json_body(request))
        model.check_name(body.model)
        model.check_ids(body.tokens, "tokens")
        return _json({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_status_routes(app: FastAPI, parts: RouterParts) -> None:
    def status_route(path: str, responses: dict[int | str, dict[str, Any]]) -> Callable[[Route], Route]:
        return app.get(path, response_class=Response, response_model=None, tags=["status"], responses=responses)

    @status_route("/health", openapi.answers(None))
    async def health() -> Response:
        """200 while the router runs."""
        return Response(status_code=200)

    @status_route("/ping", openapi.answers(None))
    async def ping() -> Response:
        """As /health."""
        return Response(status_code=200)

    @status_route("/version", openapi.answers(openapi.Version))
    async def show_version() -> Response:
        """The version of this server."""
        return _json({"version": package_version()})

    @status_route("/ready", openapi.answers(openapi.Readiness) | {503: {"model": openapi.Readiness, "description": "Workers are missing."}})
    async def ready() -> Response:
        """200 when workers can serve; else what is missing."""
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
                {
                    "worker_id": worker.record.worker_id,
                    "role": worker.record.role,
                    "device": worker.record.device,
                    "num_blocks": worker.record.num_blocks,
                    "connected": worker.client.is_connected,
                }
                for worker in directory.workers
            ],
        }
        return _json(details, 200 if directory.is_ready else 503)

    @status_route("/metrics", openapi.answers(None))
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(parts.metrics.render(), media_type=CONTENT_TYPE)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
