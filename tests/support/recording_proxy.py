"""What a client really sends: a proxy between it and the server that keeps one request of each kind."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

PLACEHOLDER_SECRET = "Bearer PLACEHOLDER"
PLACEHOLDER_ID = "00000000-0000-4000-8000-000000000000"
_SECRET_HEADERS = ("authorization", "api-key", "x-api-key", "cookie", "proxy-authorization")
# They belong to one connection or to the machine that the client runs on.
_VOLATILE_HEADERS = (
    "host", "connection", "content-length", "transfer-encoding", "keep-alive", "date", "user-agent",
    "x-stainless-os", "x-stainless-arch", "x-stainless-runtime", "x-stainless-runtime-version",
)  # fmt: skip
_HOP_BY_HOP = (b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server")
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class RecordingProxy:
    """Serves on a free loopback port in a thread, as a context manager; `url` is where the client must ask."""

    def __init__(self, target: str) -> None:
        self._recorded: dict[str, dict[str, Any]] = {}
        self._client = httpx.AsyncClient(base_url=target, timeout=600, limits=httpx.Limits(max_connections=None))
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=_METHODS)])
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.url = ""

    def __enter__(self) -> RecordingProxy:
        self._thread.start()
        deadline_s = time.monotonic() + 30
        while not self._server.started:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the recording proxy did not start")
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(5)

    @property
    def requests(self) -> list[dict[str, Any]]:
        """One of each kind, in an order that does not depend on which came first."""
        return sorted(
            self._recorded.values(), key=lambda request: (request["path"], request["method"], request["status"], kind_of(request))
        )

    async def _forward(self, request: Request) -> StreamingResponse:
        body = await request.body()
        headers = [(name, value) for name, value in request.headers.raw if name not in _HOP_BY_HOP]
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = await self._client.send(self._client.build_request(request.method, path, headers=headers, content=body), stream=True)
        recorded = normalise(request.method, path, request.headers.items(), body, answer.status_code)
        # Of concurrent requests another comes first each time: a client that is seeded shall leave the same file.
        kind = kind_of(recorded)
        self._recorded[kind] = min(self._recorded.get(kind, recorded), recorded, key=json.dumps)

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        response = StreamingResponse(passed_on(), answer.status_code)
        response.raw_headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _HOP_BY_HOP]
        return response


def normalise(method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes, status: int) -> dict[str, Any]:
    """A request as it is kept: no secrets, nothing of one connection or machine, ids replaced by one that is always the same."""
    kept = {}
    for name, value in headers:
        if name in _SECRET_HEADERS:
            kept[name] = PLACEHOLDER_SECRET
        elif name not in _VOLATILE_HEADERS:
            kept[name] = _UUID.sub(PLACEHOLDER_ID, value)
    parsed = json.loads(_UUID.sub(PLACEHOLDER_ID, body.decode())) if body else None
    return {"method": method, "path": path, "status": status, "headers": dict(sorted(kept.items())), "body": parsed}


def kind_of(request: dict[str, Any]) -> str:
    """Equal for requests that differ only in what their texts and numbers say."""
    return json.dumps([request["path"], request["method"], request["status"], sorted(request["headers"]), _shape(request["body"])])


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return [json.loads(shape) for shape in sorted({json.dumps(_shape(item)) for item in value})]
    return value if isinstance(value, bool) or value is None else "text" if isinstance(value, str) else "number"
