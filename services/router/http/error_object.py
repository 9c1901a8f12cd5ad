"""Every error as the OpenAI error object, whatever it was: ours, the framework's, or a bug."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from shared.errors import PagewireError

_TYPE_OF_STATUS = {404: "not_found_error", 429: "overloaded_error", 500: "internal_error", 503: "service_unavailable_error"}


def error_json(message: str, error_type: str, param: str | None, code: int | str) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def error_object(error: PagewireError) -> dict[str, Any]:
    return error_json(error.message, error.error_type, error.param, error.code or error.http_status)


def error_response(error: PagewireError, headers: dict[str, str] | None = None) -> Response:
    body = error_object(error)
    headers = dict(headers or {})
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.http_status in (408, 413):
        # The rest of the body may go on coming for ever, and while it does the server would keep the connection.
        headers["Connection"] = "close"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(orjson.dumps(body), error.http_status, headers, media_type="application/json")


def status_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    error_type = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return Response(orjson.dumps(error_json(message, error_type, None, status)), status, headers, media_type="application/json")
