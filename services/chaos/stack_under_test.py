"""A stack of its own for `pagewire chaos`: `pagewire up` in a process, with a fault proxy in front of every KV port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.chaos.fault_proxy import FaultProxy, Link
from services.local.ports import free_port, free_ports
from shared.config import Settings
from shared.errors import ConfigurationError

_READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0
_USED = "pagewire:kv_blocks_used"
_FALLBACKS = "pagewire:kv_recompute_fallbacks_total"
_KEPT = ("PAGEWIRE_ASYNC_SCHEDULING", "PAGEWIRE_TENSOR_PARALLEL_SIZE")
"""Settings of the caller that the stack takes over: what else a run is to show depends on the others."""
_NUM_BLOCKS = 32
"""So few that prompts go to host memory and come back."""


class StackUnderTest:
    """Usable between `__enter__` and `__exit__`. Process ids are those of now: the launcher restarts what dies."""

    def __init__(self, num_prefill: int, num_decode: int, seed: int) -> None:
        num_ports = 1 + Settings().kv_lanes
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.workers = [f"decode-{index}" for index in range(num_decode)] + [f"prefill-{index}" for index in range(num_prefill)]
        """In the order in which they take their ports."""
        first, shown = free_ports(len(self.workers) * num_ports), free_ports(len(self.workers) * num_ports)
        self.proxy = FaultProxy([(shown + index, first + index) for index in range(len(self.workers) * num_ports)], seed=seed)
        self.lanes = [link for index, link in enumerate(self.proxy.links) if index % num_ports]
        self.log_path = Path(tempfile.mkdtemp(prefix="pagewire-chaos-")) / "stack.log"
        self._arguments = ["--prefill", str(num_prefill), "--decode", str(num_decode), "--port", str(self.port)]
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PAGEWIRE_", "REDIS_", "OTEL_")) or name in _KEPT},
            "PAGEWIRE_KV_TRANSPORT": "tcp",
            "PAGEWIRE_KV_PORT": str(first),
            "PAGEWIRE_KV_ADVERTISE_PORT": str(shown),
            "PAGEWIRE_NUM_BLOCKS": str(_NUM_BLOCKS),
            "PAGEWIRE_KV_HOST_CACHE_GIB": "0.1",
            "PAGEWIRE_NUM_THREADS": "1",
            "PAGEWIRE_REQUEST_TIMEOUT_S": "60",
            "PAGEWIRE_DEBUG": "true",  # block invariants are checked after every step
        }
        self._pids: dict[str, int] = {}
        self._is_ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> StackUnderTest:
        """Raises ConfigurationError when the stack does not come up."""
        self.proxy.start()
        try:
            with self.log_path.open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "services.cli", "up", "--json", *self._arguments],
                    env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                )  # fmt: skip
            threading.Thread(target=self._read_events, args=(self._process,), name="stack-events", daemon=True).start()
            deadline_s = time.monotonic() + _READY_TIMEOUT_S
            while not self._is_ready.wait(0.1):
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise ConfigurationError(f"the stack for the chaos run did not come up:\n{self.log_tail()}")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            for pid in list(self._pids.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.proxy.close()

    def _read_events(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "ready":
                self._pids = event["pids"]
                self._is_ready.set()
            elif event["event"] == "restarted":
                self._pids.pop(event["child"], None)
            elif event["event"] == "started":
                self._pids[event["child"]] = event["pid"]

    def name_of(self, link: Link) -> str:
        """For reports: which connection to which worker."""
        worker, index = divmod(self.proxy.links.index(link), len(self.proxy.links) // len(self.workers))
        return f"{self.workers[worker]} {f'lane {index - 1}' if index else 'control'}"

    def log_tail(self, num_lines: int = 20) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def signal(self, worker: str, number: signal.Signals) -> int | None:
        """Send it to the worker's process; its id, None when the worker has none now."""
        pid = self._pids.get(worker)
        if pid is None:
            return None
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return pid

    async def read_metrics(self, client: httpx.AsyncClient) -> StackMetrics:
        response = await client.get(f"{self.url}/metrics", timeout=10.0)
        used: dict[str, float] = {}
        num_fallbacks = 0.0
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name == _USED:
                    used[sample.labels["worker"]] = sample.value
                elif sample.name == _FALLBACKS:
                    num_fallbacks += sample.value
        return StackMetrics(used, num_fallbacks)


class StackMetrics:
    """What the router says of the workers at one moment."""

    def __init__(self, used_blocks: dict[str, float], num_fallbacks: float) -> None:
        self.used_blocks = used_blocks
        """By worker; those that are gone for the router are not in it."""
        self.num_fallbacks = num_fallbacks
        """Prompts that decode computed itself because a transfer failed."""

    @property
    def num_used(self) -> int:
        return int(sum(self.used_blocks.values()))
