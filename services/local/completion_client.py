"""`pagewire complete`: a streaming client of the HTTP API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import orjson

from shared.errors import PagewireError

TIMEOUT = httpx.Timeout(600.0, connect=5.0)


def stream_completion(url: str, text: str, is_chat: bool, options: dict[str, Any], api_key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yields {"text": ...} for each token and {"usage": ..., "finish_reason": ...} at the end. PagewireError in the server's words."""
    body = {**options, "stream": True, "stream_options": {"include_usage": True}}
    if is_chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    finish_reason = None
    try:
        with httpx.stream("POST", url.rstrip("/") + path, json=body, headers=headers, timeout=TIMEOUT) as response:
            if response.status_code != 200:
                response.read()
                raise PagewireError(_error_message(response.content) or f"{url} answered {response.status_code}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise PagewireError(event["error"]["message"])
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") if is_chat else choice["text"]
                    finish_reason = choice["finish_reason"] or finish_reason
                    if piece:
                        yield {"text": piece}
                if event.get("usage"):
                    yield {"usage": event["usage"], "finish_reason": finish_reason}
    except httpx.HTTPError as error:
        raise PagewireError(f"no answer from {url} ({error}); is the server up? Start it with `pagewire up`") from error


def _error_message(content: bytes) -> str | None:
    try:
        return str(orjson.loads(content)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
