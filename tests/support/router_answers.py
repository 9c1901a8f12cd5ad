"""What tests of the router ask and read: known prompts, and answers taken apart."""

from __future__ import annotations

import json
from itertools import count

import httpx
from router_harness import Stack
from stub_worker import StubWorker

CNT = " 6, 7, 8, 9, 10, 11, 12,"
CNT_IDS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
LETTERS = (33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71)  # DEF GH I J K LM N OP QR ST UV W
LLAMA = (10813, 116, 243)
namespaces = count()
"""Each stack has its own in Redis."""
SERVED = "SmolLM2-135M-Instruct"


def decode_of(stack: Stack) -> StubWorker:
    return next(worker for worker in stack.workers if worker.role == "decode")


def events(text: str) -> list[dict[str, object]]:
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed_text(chunks: list[dict]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, object]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    if param is not None:
        assert body["error"]["param"] == param
    return body["error"]
