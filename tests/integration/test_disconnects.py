"""Whatever clients do, blocks come back."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor

from local_stack import CNT, LocalStack, ids


def test_two_hundred_requests_with_random_disconnects_leave_no_block(stack: LocalStack) -> None:
    rng = random.Random(7)
    plans = [(i, rng.choice([1, 20, 60, 100]), rng.random() < 0.5, rng.choice([0.0, 0.02, 0.1, 0.4])) for i in range(200)]

    def run(plan: tuple[int, int, bool, float]) -> None:
        index, length, is_stream, patience_s = plan
        connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=max(patience_s, 0.001))
        body = {"prompt": ids(length, first=100 + index), "max_tokens": 400, "ignore_eos": True, "stream": is_stream}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().read()
        except TimeoutError:
            pass
        finally:
            connection.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, plans))
    stack.wait_until(lambda: stack.metric("pagewire:client_disconnects_total") >= 190)
    stack.wait_until_idle()
    assert stack.tokens(CNT, 24)[:3] == [216, 38, 28]


def test_generation_stops_when_a_client_that_does_not_stream_hangs_up(stack: LocalStack) -> None:
    before = stack.counter("decode-0", "generation_tokens")
    with stack.request_under_way(CNT, 4000, stream=False, ignore_eos=True):
        stack.wait_until(lambda: stack.metric("vllm:num_requests_running", "decode-0") == 1)
    stack.wait_until(lambda: stack.statistics("decode-0")["decode-0"].num_running == 0)
    generated = stack.counter("decode-0", "generation_tokens")
    assert generated - before < 4000
    stack.complete(CNT, 1)
    assert stack.counter("decode-0", "generation_tokens") <= generated + 1
