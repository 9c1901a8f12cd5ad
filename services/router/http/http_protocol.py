"""uvicorn's HTTP, with what it answers by itself in the OpenAI error object too."""

from __future__ import annotations

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.http.error_object import error_json


class HttpProtocol(HttpToolsProtocol):
    """For uvicorn's setting `http`."""

    def send_400_response(self, msg: str) -> None:
        """`msg` is uvicorn's own: the bytes that came are not HTTP."""
        body = orjson.dumps(error_json(msg.rstrip("."), "invalid_request_error", None, 400))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
