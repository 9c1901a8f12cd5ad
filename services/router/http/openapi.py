"""The OpenAPI description and its page: what goes in, what comes out, and every error. The page loads nothing from elsewhere.

Bodies and answers are parsed and written by hand, so FastAPI cannot know them; the models here describe answers and are used for nothing
else. tests/contract/test_openapi.py holds real answers against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi_swagger import patch_fastapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from services.router.http.api_keys import is_open

_REF = "#/components/schemas/{model}"
_BEARER = {"type": "http", "scheme": "bearer", "description": "One of the keys that this server was started with."}
_MEANINGS: dict[int, str] = {
    400: "The request cannot be served as it is; `param` names the field at fault.",
    401: "No API key, or one that is not accepted.",
    404: "What was named is not here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON by its content-type.",
    429: "Too many requests are in flight; Retry-After says when to come back.",
    500: "A fault of this server.",
    502: "The KV cache of the prompt could not be transferred.",
    503: "No worker can serve this now; Retry-After says when to come back, where that is known.",
    504: "The request's deadline passed.",
}
GENERATION_ERRORS = (400, 404, 408, 413, 415, 429, 500, 502, 503, 504)
BODY_ERRORS = (400, 404, 408, 413, 415, 500)


class _Described(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The field of the request at fault, if one is.")
    code: int | str = Field(description="The HTTP status, or a word such as invalid_api_key.")


class Error(BaseModel):
    error: ErrorBody


class CachedTokens(_Described):
    cached_tokens: int


class Usage(_Described):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(_Described):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Described):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description="null in all events of a stream but the last of a choice.")
    stop_reason: str | int | None = Field(description="The stop string or stop_token_ids entry that was met.")


class Completion(_Described):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(_Described):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Described):
    content: list[ChatTokenLogprob]


class CalledFunction(_Described):
    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(_Described):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Described):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] = Field(default_factory=list)


class ChatChoice(_Described):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatCompletion(_Described):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class OutputText(_Described):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(_Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class ResponsesUsage(_Described):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    total_tokens: int


class IncompleteDetails(_Described):
    reason: Literal["max_output_tokens"]


class ResponseObject(_Described):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage]
    usage: ResponsesUsage


class ModelCard(_Described):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int = Field(description="Tokens of prompt and output together.")


class ModelList(_Described):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Described):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(_Described):
    prompt: str


class Version(_Described):
    version: str


class WorkerState(_Described):
    worker_id: str
    role: Literal["prefill", "decode"]
    device: str = Field(description="What it computes on: cpu, or cuda:N as its host counts GPUs.")
    num_blocks: int = Field(description="Blocks of its KV cache.")
    connected: bool


class Readiness(_Described):
    ready: bool
    model: str
    prefill: int = Field(description="Workers of this kind that can serve.")
    decode: int
    required_roles: list[str]
    redis: Literal["ok", "unreachable"]
    prefix_index: Literal["ok", "degraded"]
    workers: list[WorkerState]


def takes(body_type: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is JSON of this type, one of those given to `describe`."""
    schema = {"$ref": _REF.format(model=body_type.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(answer: type[BaseModel] | None, errors: Sequence[int] = (), stream: str = "") -> dict[int | str, dict[str, Any]]:
    """A route's `responses`. `stream` says what the events of a stream are; empty: it does not stream."""
    described: dict[int | str, dict[str, Any]] = {200: {"description": "As asked."}}
    if answer is not None:
        described[200]["model"] = answer
    if stream:
        described[200]["content"] = {"text/event-stream": {"schema": {"description": stream}}}
    for status in errors:
        described[status] = {"model": Error, "description": _MEANINGS[status]}
    return described


def describe(app: FastAPI, body_types: Sequence[type[BaseModel]], needs_key: bool) -> None:
    """Give `app` its description at /openapi.json and the page that shows it at /docs."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app, body_types, needs_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    assets = {f"swagger_{kind}_url": f"/docs/{file}" for kind, file in (("js", "swagger-ui.js"), ("css", "swagger-ui.css"))}
    patch_fastapi(app, redirect_from_root_to_docs=True, swagger_favicon_url="/docs/icon.png", **assets)


def _description(app: FastAPI, body_types: Sequence[type[BaseModel]], needs_key: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema["components"]
    _, bodies = models_json_schema([(body_type, "validation") for body_type in body_types], ref_template=_REF)
    components["schemas"] |= bodies["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    if needs_key:
        components["securitySchemes"] = {"api_key": _BEARER}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            # FastAPI adds its own form of error to whatever has a parameter; ours is a 400 of the form above.
            operation["responses"].pop("422", None)
            if needs_key and not is_open(path):
                operation["security"] = [{"api_key": []}]
                reference = {"schema": {"$ref": _REF.format(model="Error")}}
                operation["responses"]["401"] = {"description": _MEANINGS[401], "content": {"application/json": reference}}
    return schema
