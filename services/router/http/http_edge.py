"""What every request meets first: its time of arrival and id, and what every response leaves with: the id and a count.

Plain ASGI, outermost, so that the arrival is stamped before any other code of ours runs. Errors that reach this edge are bugs, which
the application has answered: they are logged.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.http.api_keys import ApiKeys
from services.router.http.error_object import error_response
from services.router.observation import Receipt
from shared.errors import AuthenticationError, InvalidRequestError
from shared.ids import new_request_id

_logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 10 << 20
BODY_TIMEOUT_S = 60.0
REQUEST_ID_HEADER = "x-request-id"
_RECEIPT_KEY = "pagewire.receipt"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class BodyTooLargeError(InvalidRequestError):
    http_status = 413


class UnsupportedMediaTypeError(InvalidRequestError):
    http_status = 415


class BodyTimeoutError(InvalidRequestError):
    http_status = 408


class HttpEdge:
    """`count(route, status)` gets the route's template, never the path a client made up."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._api_keys = api_keys
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given_id = headers.get(REQUEST_ID_HEADER, "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else new_request_id("req")
        scope[_RECEIPT_KEY] = Receipt.now(headers.get("traceparent", ""), request_id)
        status = 0

        async def send_stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        # HEAD is GET without the body, which the server leaves out; it looks at its own scope for that, not at this copy.
        scope = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        try:
            self._api_keys.check(scope["path"], _raw_header(scope, b"authorization"))
            await self._app(scope, receive, send_stamped)
        except AuthenticationError as error:
            await error_response(error)(scope, receive, send_stamped)
        except Exception:
            _logger.exception("request failed")
        finally:
            route = scope.get("route")
            self._count(getattr(route, "path", "unknown"), status)


def _raw_header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def receipt_of(request: Request) -> Receipt:
    receipt: Receipt = request.scope[_RECEIPT_KEY]
    return receipt


async def read_json_body(request: Request) -> bytes:
    """The body, at most MAX_BODY_BYTES. Raises BodyTooLargeError, BodyTimeoutError, UnsupportedMediaTypeError."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError(f"content-type {media_type[:100]!r} is not supported; send application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaTypeError(f"content-encoding {encoding[:100]!r} is not supported; send the body as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise BodyTooLargeError(f"the body has {declared} bytes; at most {MAX_BODY_BYTES} are taken")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise BodyTooLargeError(f"the body has more than {MAX_BODY_BYTES} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s; {size} bytes of it came") from error
    return b"".join(parts)
