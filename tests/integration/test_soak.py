"""Thousands of requests of all kinds, with the block invariants checked after every step: answers stay the same, and memory too."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import psutil
import pytest
from family_models import CASES, make_model, write_model
from local_stack import LocalStack
from tiny_models import TINY_TOKENS

NUM_REQUESTS = int(os.environ.get("PAGEWIRE_SOAK_REQUESTS", "5000"))
NUM_CLIENTS = 12
SETTLED = 0.3
"""By this share of them every cache is full and every thread has started: memory may grow no more."""
MAX_GROWTH_BYTES = 24 << 20
SERVICES = ("router", "prefill-0", "decode-0")
TIGHT = {"debug": "true", "max_num_batched_tokens": 96, "max_num_seqs": 10, "prefill_num_blocks": 60, "decode_num_blocks": 44}
"""Pools of a few prompts: requests wait, are preempted, and lose their blocks to others all the time."""
PATIENT = {"lease_s": 15, "kv_peer_timeout_s": 15}
"""Nobody dies here; a machine that is busy for minutes may well keep a process from running for two seconds."""


def prompts() -> list[list[int]]:
    """Some begin alike, so that blocks are shared."""
    draw = random.Random(7)
    beginnings = [[draw.randrange(len(TINY_TOKENS)) for _ in range(draw.randrange(16, 150))] for _ in range(5)]
    own = [[draw.randrange(len(TINY_TOKENS)) for _ in range(draw.randrange(1, 60))] for _ in range(40)]
    return [[*draw.choice([[], *beginnings]), *tokens] for tokens in own]


class Clients:
    """What they were told, compared."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._prompts = prompts()
        self._answers: dict[str, Any] = {}
        self._lock = Lock()
        self.num_compared = 0
        self.num_left = 0

    def request(self, number: int) -> None:
        draw = random.Random(number)
        body = {
            "prompt": draw.choice(self._prompts),
            "max_tokens": draw.choice([1, 2, 7, 20, 50]),
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= draw.choice(
            [
                {"temperature": 0},
                {"temperature": 0, "logprobs": 2},
                {"temperature": 1.0, "seed": 3},
                {"temperature": 0.8, "seed": 4, "n": 3, "top_p": 0.9},
                {"use_beam_search": True, "n": 2},
                {"temperature": 0, "prompt_logprobs": 1},
            ]
        )
        if draw.random() < 0.15:
            self._leave(body, draw.choice([0.0, 0.01, 0.05, 0.2]))
            return
        try:
            choices = self._stack.post("/v1/completions", body)["choices"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"request {number}, {body}: {error.code} {error.read()!r}") from None
        found = [choice["token_ids"] for choice in choices]
        with self._lock:
            expected = self._answers.setdefault(json.dumps(body), found)
            self.num_compared += expected is not found
        assert found == expected, f"request {number} was answered otherwise before: {body}"

    def _leave(self, body: dict[str, Any], after_s: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._stack.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        time.sleep(after_s)
        connection.close()
        self.num_left += 1


def memory_of(stack: LocalStack) -> dict[str, int]:
    return {name: psutil.Process(stack.pids[name]).memory_full_info().uss for name in SERVICES}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [{}, {"kv_host_cache_gib": 0.002}], ids=["", "host tier"])
def test_thousands_of_requests_leave_answers_blocks_and_memory_as_they_were(tmp_path: Path, options: dict[str, float]) -> None:
    write_model(make_model(CASES["llama"]), tmp_path)
    with LocalStack("--model", str(tmp_path), **TIGHT, **PATIENT, **options) as stack:
        clients = Clients(stack)
        num_settled = int(SETTLED * NUM_REQUESTS)
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(clients.request, range(num_settled)))
            stack.wait_until_idle()
            before = memory_of(stack)
            list(pool.map(clients.request, range(num_settled, NUM_REQUESTS)))
        stack.wait_until_idle()
        growth = {name: size - before[name] for name, size in memory_of(stack).items()}
        print(f"{clients.num_compared} answers compared, {clients.num_left} clients left early, growth in bytes:", growth)
        assert clients.num_compared > NUM_REQUESTS // 10
        assert stack.metric("vllm:num_preemptions_total") > 0
        assert max(growth.values()) < MAX_GROWTH_BYTES
