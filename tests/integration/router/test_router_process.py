"""The router as a process: its port, its end, its edge."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from lost_time import LostTime
from router_answers import check_error
from router_harness import RedisServer, Stack, eventually
from stub_worker import Script, StubWorker

from services.local.ports import free_port
from services.router.http import http_edge
from services.router.served_model import ServedModel


def start_process(port: int, redis_url: str = "redis://127.0.0.1:1/0") -> subprocess.Popen[str]:
    environ = {**os.environ, "PAGEWIRE_PORT": str(port), "REDIS_URL": redis_url}
    return subprocess.Popen([sys.executable, "-m", "services.router"], env=environ, stderr=subprocess.PIPE, text=True)


def test_taken_port_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start_process(taken.getsockname()[1])
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert len(stderr.strip().split("\n")) == 1
    assert "PAGEWIRE_PORT" in stderr


def test_sigterm_ends_the_process_within_three_seconds_even_with_a_request_running(redis_server: RedisServer, model: ServedModel) -> None:
    port = free_port()
    process = start_process(port, redis_server.url)
    workers = [
        StubWorker(role, f"{role}-term", redis_server.url, model.fingerprint, "pagewire", Script(first_delay_s=30))
        for role in ("prefill", "decode")
    ]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready").status_code == 200
        return False

    eventually(is_ready, 120)
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=120))
        except httpx.TransportError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: workers[1].num_active == 1)
    with LostTime() as lost:
        start_s = time.monotonic()
        process.terminate()
        assert process.wait(60) == 0
        assert time.monotonic() - start_s < 3.0 + lost.so_far_s
    eventually(lambda: workers[1].num_active == 0)
    thread.join()
    assert isinstance(outcome[0], httpx.Response)
    check_error(outcome[0], 503)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    for worker in workers:
        worker.close()


def test_a_body_that_does_not_come_is_given_up_and_its_connection_with_it(bare: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "BODY_TIMEOUT_S", 0.3)
    with socket.create_connection(bare.listener.getsockname(), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408


def test_a_bug_is_answered_with_the_error_object(bare: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(bare.parts.frontend), "complete", lambda *_: 1 / 0)
    response = bare.complete()
    check_error(response, 500)
    assert response.headers["x-request-id"]
    assert bare.client.get("/health").status_code == 200


def test_a_long_text_holds_nobody_up(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        gaps = [0.0]
        asked_s = time.monotonic()
        refused = pool.submit(stack.complete, prompt="x" * 3_000_000)
        while not refused.done():
            start_s = time.monotonic()
            assert httpx.get(f"{stack.url}/health", timeout=60).status_code == 200
            gaps.append(time.monotonic() - start_s)
        took_s = time.monotonic() - asked_s
        check_error(refused.result(), 400, "prompt")
    assert len(gaps) > 3
    assert max(gaps) < max(0.7, took_s / 3)


def test_after_a_body_that_is_too_large_the_connection_ends(stack: Stack) -> None:
    response = stack.client.post("/v1/completions", content=b"x" * (10 << 20 | 1), headers={"content-type": "application/json"})
    check_error(response, 413)
    assert response.headers["connection"] == "close"
