"""CPU time of the router per streamed token: the real router process, stub workers in a second process, clients in a third.

    python bench/router_cpu.py [--streams 16] [--tokens 500] [--step-ms 5 0] [--repeat 3] [--json]

One step of the stub decode worker is what one step of a real one is: a token for every running request. `--step-ms 0`: as fast as it
goes. CPU is user and system time of all threads of the router, as getrusage counts it: the difference of the process's CPU clock over
a run, requests' own cost (HTTP, template, tokenization, routing) and idle work (Redis polls, heartbeats) included. At the end the
total of that clock stands beside getrusage's own, which wait4 returns for the ended process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import random
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.local.ports import free_port
from services.local.redis_server import server_command
from shared.cache.redis_prefix_index import RedisPrefixIndexWriter
from shared.config import load_settings
from shared.ids import new_incarnation
from shared.lease_keeper import LeaseKeeper
from shared.membership import WorkerRecord
from shared.messages import DecodeRequest, RequestOutput, RouterMessage, TokenLogprobs
from shared.model_files.model_source import resolve_model
from shared.worker.rpc_server import RpcServer

NAMESPACE = "bench"
TIMEOUT_S = 120.0
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "A list of things:"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A list of things, please."}]}),
    "completions, 5 logprobs": ("/v1/completions", {"prompt": "A list of things:", "logprobs": 5}),
    "chat, 5 logprobs": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "A list of things, please."}], "logprobs": True, "top_logprobs": 5},
    ),
}


# ---- the workers' process ----------------------------------------------------------------------------------------------------------


class StubDecode:
    """Random tokens of the real vocabulary, one for each running request a step; steps begin when `num_streams` requests run."""

    def __init__(self, num_streams: int, token_ids: list[int], max_model_len: int) -> None:
        self._num_streams = num_streams
        self._token_ids = token_ids
        self._arrived: queue.SimpleQueue[tuple[bytes, DecodeRequest]] = queue.SimpleQueue()
        self.step_s = 0.0
        self.rpc = RpcServer("127.0.0.1", "127.0.0.1", self._take)
        threading.Thread(target=self._generate, daemon=True).start()

    def _take(self, router: bytes, message: RouterMessage) -> None:
        if isinstance(message, DecodeRequest):
            self._arrived.put((router, message))

    def _generate(self) -> None:
        while True:
            running = [self._arrived.get() for _ in range(self._num_streams)]
            next_s = time.monotonic()
            for index in range(running[0][1].sampling.max_tokens):
                time.sleep(max(0.0, next_s - time.monotonic()))
                next_s += self.step_s
                with self.rpc.batch():
                    for number, (router, request) in enumerate(running):
                        self.rpc.send(router, self._output(request, number, index))

    def _output(self, request: DecodeRequest, number: int, index: int) -> RequestOutput:
        token_id = self._token_ids[(index + 37 * number) % len(self._token_ids)]
        logprobs = None
        if request.sampling.num_logprobs is not None:
            top_ids = tuple(self._token_ids[(index + other) % len(self._token_ids)] for other in range(request.sampling.num_logprobs))
            top_logprobs = tuple(-0.123456789 - rank for rank in range(len(top_ids)))
            logprobs = TokenLogprobs(logprob=-2.3456789, rank=7, top_token_ids=top_ids, top_logprobs=top_logprobs)
        is_last = index + 1 == request.sampling.max_tokens
        return RequestOutput(
            request_id=request.request_id, token_id=token_id, index=index, logprobs=logprobs, finish_reason="length" if is_last else None
        )


def run_workers(redis_url: str, num_streams: int, orders: Connection) -> None:
    source = resolve_model(load_settings("router", {}).model)
    tokenizer = source.load_tokenizer()
    ordinary = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_ids]
    decode = StubDecode(num_streams, random.Random(0).sample(ordinary, 1000), source.config.max_model_len)
    prefill = RpcServer("127.0.0.1", "127.0.0.1", lambda _router, _message: None)
    keepers = []
    for role, rpc in (("decode", decode.rpc), ("prefill", prefill)):
        record = WorkerRecord(
            worker_id=role, role=role, incarnation=new_incarnation(), rpc_endpoint=rpc.endpoint, kv_ctrl_endpoint="tcp://127.0.0.1:1",
            model_name=source.name, model_fingerprint=source.fingerprint, dtype="float32", block_size=16, num_blocks=4096,
            max_model_len=source.config.max_model_len, vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        rpc.start()
        index = RedisPrefixIndexWriter(NAMESPACE, role, record.incarnation)
        keepers.append(LeaseKeeper(redis_url, NAMESPACE, lambda record=record: record, 1.5, index))
        keepers[-1].start()
    with contextlib.suppress(EOFError):
        while True:
            decode.step_s = orders.recv()
            orders.send("set")


# ---- the clients' process ----------------------------------------------------------------------------------------------------------


def run_clients(port: int, orders: Connection) -> None:
    """For each (path, body, number of streams): all at once on raw sockets, which costs the machine least; back comes the number of
    events of each."""
    with contextlib.suppress(EOFError):
        while True:
            path, body, num_streams = orders.recv()
            payload = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
            selector = selectors.DefaultSelector()
            received: dict[socket.socket, bytearray] = {}
            for _ in range(num_streams):
                client = socket.create_connection(("127.0.0.1", port))
                client.sendall(head.encode() + payload)
                selector.register(client, selectors.EVENT_READ)
                received[client] = bytearray()
            open_clients = set(received)
            while open_clients:
                for key, _ in selector.select(TIMEOUT_S):
                    client = key.fileobj
                    assert isinstance(client, socket.socket)
                    part = client.recv(1 << 16)
                    received[client] += part
                    if not part or received[client].endswith(b"\r\n0\r\n\r\n"):
                        selector.unregister(client)
                        open_clients.remove(client)
                        client.close()
            for answer in received.values():
                if b"data: [DONE]" not in answer:
                    sys.exit(f"an answer broke off: {bytes(answer[-500:])!r}")
            orders.send([answer.count(b"data: {") for answer in received.values()])


# ---- the router's process and the measurement --------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process, in ns steps: Linux's clock of that process (see clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass
class Bench:
    router: subprocess.Popen[bytes]
    workers: Connection
    clients: Connection
    num_streams: int

    def measure(self, case: str, step_ms: float, num_tokens: int) -> float:
        """Microseconds of the router's CPU per streamed token."""
        self.workers.send(step_ms / 1000)
        self.workers.recv()
        path, body = CASES[case]
        body = {**body, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        before_s = cpu_s(self.router.pid)
        self.clients.send((path, body, self.num_streams))
        counts = self.clients.recv()
        used_s = cpu_s(self.router.pid) - before_s
        if counts != [num_tokens] * self.num_streams:
            sys.exit(f"{case}: expected {num_tokens} events in each stream, got {counts}")
        return used_s / self.num_streams / num_tokens * 1e6


def wait_ready(port: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
            return
        time.sleep(0.1)
    sys.exit("the router did not become ready")


@contextlib.contextmanager
def running(num_streams: int) -> Iterator[Bench]:
    redis_port, port = free_port(), free_port()
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    environ = {**os.environ, "PAGEWIRE_REDIS_URL": redis_url, "PAGEWIRE_REDIS_NAMESPACE": NAMESPACE, "PAGEWIRE_PORT": str(port)}
    context = multiprocessing.get_context("spawn")
    (workers, worker_end), (clients, client_end) = context.Pipe(), context.Pipe()
    helpers = [
        context.Process(target=run_workers, args=(redis_url, num_streams, worker_end), daemon=True),
        context.Process(target=run_clients, args=(port, client_end), daemon=True),
    ]
    redis_server = subprocess.Popen(server_command(redis_port), stdout=subprocess.DEVNULL)
    router = subprocess.Popen([sys.executable, "-m", "services.router"], env=environ, cwd=Path(__file__).parents[1])
    try:
        for helper in helpers:
            helper.start()
        # Ends held here too would keep a helper's death from being seen.
        worker_end.close()
        client_end.close()
        wait_ready(port)
        yield Bench(router, workers, clients, num_streams)
    finally:
        for helper in helpers:
            helper.kill()
        if router.returncode is None:
            router.kill()
        redis_server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 0.0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with running(arguments.streams) as bench:
        for case in arguments.cases:
            bench.measure(case, 0.0, 50)  # connections, caches, imports
            for step_ms in arguments.step_ms:
                runs = [bench.measure(case, step_ms, arguments.tokens) for _ in range(arguments.repeat)]
                rows.append({"case": case, "step_ms": step_ms, "median_us": statistics.median(runs), "runs_us": runs})
        before_s = cpu_s(bench.router.pid)
        time.sleep(2.0)
        idle = (cpu_s(bench.router.pid) - before_s) / 2.0
        by_clock_s = cpu_s(bench.router.pid)
        bench.router.terminate()
        _, status, usage = os.wait4(bench.router.pid, 0)
        bench.router.returncode = os.waitstatus_to_exitcode(status)
    by_getrusage_s = usage.ru_utime + usage.ru_stime
    if arguments.json:
        total = {"by_clock_s": by_clock_s, "by_getrusage_s": by_getrusage_s}
        print(json.dumps({"streams": arguments.streams, "tokens": arguments.tokens, "idle_share": idle, "total": total, "rows": rows}))
        return
    print("| request | a step each, ms | CPU of the router a token, us (median) | runs |\n|---|---|---|---|")
    for row in rows:
        pace = f"{row['step_ms']:g}" if row["step_ms"] else "as fast as it goes"
        print(f"| {row['case']} | {pace} | {row['median_us']:.1f} | {' '.join(f'{run:.1f}' for run in row['runs_us'])} |")
    print(f"\n{arguments.streams} streams of {arguments.tokens} tokens. Idle router: {idle * 100:.1f} % of a core.", end=" ")
    print(f"Its whole life: {by_clock_s:.2f} s by its clock before it was ended, {by_getrusage_s:.2f} s by getrusage after.")


if __name__ == "__main__":
    main()
