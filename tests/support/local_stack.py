"""The whole system as a user starts it: `pagewire up` in a process of its own, and a small client."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from services.local.ports import free_port
from shared.membership import WorkerStats, parse_record, worker_key

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
"""For what has to come and makes no claim about when."""
CNT = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
_CYCLE = [504, 3575, 282, 4649, 314, 7042, 30, 198]


def ids(num_tokens: int, first: int | None = None) -> list[int]:
    """A token-id prompt of exactly `num_tokens`; another `first` token makes it share no block with the rest."""
    tokens = (_CYCLE * (num_tokens // 8 + 1))[:num_tokens]
    return tokens if first is None else [first, *tokens[1:]]


@dataclass
class Streamed:
    """A streamed completion as its client saw it; times in seconds since it was sent."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk["choices"][0]["token_ids"]]

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]


class LocalStack:
    """Settings are PAGEWIRE_* variables without the prefix: LocalStack(decode_num_blocks=40)."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None, **settings: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PAGEWIRE_", "OTEL_", "REDIS_"))}
        variables = {f"PAGEWIRE_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", "--json", "--port", str(self.port), *arguments],
            cwd=ROOT,
            env={**inherited, **variables, **(environ or {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids: dict[str, int] = {}
        self.devices: dict[str, str] = {}
        self.model = ""

    def __enter__(self) -> LocalStack:
        try:
            event = self.next_event("ready")
        except BaseException:
            self.stop()
            raise
        self.pids, self.devices, self.model = event["pids"], event["devices"], event["model"]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def next_event(self, name: str) -> dict[str, Any]:
        """The next line of --json output with this event."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"`pagewire up` ended with code {self.process.wait()} before it was {name}")

    def stop(self) -> float:
        """Ctrl-C; returns the seconds until everything had ended."""
        start_s = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
        return time.monotonic() - start_s

    # ---- requests -----------------------------------------------------------------------------------------------------
    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout_s: float = 250) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def complete(self, prompt: object, max_tokens: int = 16, **options: Any) -> dict[str, Any]:
        """Greedy by default, with token ids."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **options}
        return self.post("/v1/completions", body)

    def tokens(self, prompt: object, max_tokens: int = 16, **options: Any) -> list[int]:
        token_ids: list[int] = self.complete(prompt, max_tokens, **options)["choices"][0]["token_ids"]
        return token_ids

    def stream(
        self, prompt: object, max_tokens: int = 16, headers: dict[str, str] | None = None, into: Streamed | None = None, **options: Any
    ) -> Streamed:
        """`into`: filled while the answer comes, for whom watches it from another thread."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        )
        result = into if into is not None else Streamed()
        start_s = time.monotonic()
        with urllib.request.urlopen(request, timeout=250) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    result.error = chunk["error"]
                elif chunk["choices"]:
                    result.chunks.append(chunk)
                    result.times_s.append(time.monotonic() - start_s)
                else:
                    result.usage = chunk["usage"]
        return result

    @contextlib.contextmanager
    def request_under_way(self, prompt: object, max_tokens: int, **options: Any) -> Iterator[None]:
        """A streamed request; its client hangs up when the block ends, whatever is still to come.

        Nothing waits for the response's head: that comes with the first token.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=250)
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **options}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            yield
        finally:
            connection.close()

    def pid(self, name: str) -> int:
        """The process that now is router, redis, prefill-0, ...; another one after a restart."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                command = " ".join(child.cmdline())
                is_it = (name == "router" and "services.router" in command) or (name == "redis" and "redis-server" in command)
                if is_it or child.environ().get("PAGEWIRE_WORKER_ID") == name:
                    return child.pid
        raise AssertionError(f"{name} is not running")

    # ---- what the services say ----------------------------------------------------------------------------------------
    def metric(self, name: str, worker: str | None = None) -> float:
        """The sum over all label sets of a metric at the router, or over those of one worker."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as response:
            text = response.read().decode()
        total = 0.0
        for line in text.splitlines():
            match = re.match(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$", line)
            if match and match[1] == name and (worker is None or f'worker="{worker}"' in (match[2] or "")):
                total += float(match[3])
        return total

    @functools.cached_property
    def _redis(self) -> redis.Redis:
        return redis.Redis.from_url(psutil.Process(self.pid("router")).environ()["REDIS_URL"])

    def statistics(self, *workers: str) -> dict[str, WorkerStats]:
        """What these workers say of themselves, all unless named, and nothing older than this call.

        It travels with their leases: the first renewal from now on may be of what was written down before.
        """
        names = workers or tuple(worker for worker in self.pids if worker.startswith(("prefill", "decode")))
        keys = [worker_key("pagewire", name) for name in names]
        left_ms, num_renewals = [self._redis.pttl(key) for key in keys], [0] * len(keys)

        def have_renewed_twice() -> bool:
            for index, key in enumerate(keys):
                last_ms, left_ms[index] = left_ms[index], self._redis.pttl(key)
                num_renewals[index] += left_ms[index] > last_ms
            return min(num_renewals) >= 2

        self.wait_until(have_renewed_twice, describe=lambda: f"renewals of {names}: {num_renewals}", every_s=0.02)
        records = [parse_record(self._redis.get(key)) for key in keys]
        return {name: record.stats for name, record in zip(names, records, strict=True)}

    def counter(self, worker: str, name: str) -> float:
        """A total since the worker's start, no older than this call."""
        return self.statistics(worker)[worker].counters[name]

    def num_used_blocks(self) -> dict[str, float]:
        return {worker: self.metric("pagewire:kv_blocks_used", worker) for worker in self.pids if worker.startswith(("prefill", "decode"))}

    def wait_until_idle(self) -> None:
        """Until no worker holds a block for a request."""
        self.wait_until(lambda: not any(self.num_used_blocks().values()), describe=lambda: f"blocks still used: {self.num_used_blocks()}")

    def wait_until(
        self, condition: Any, timeout_s: float = PATIENCE_S, describe: Any = lambda: "it did not come true", every_s: float = 0.05
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, describe()
            time.sleep(every_s)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
