"""Clients that hang up and workers that die, seen from the router."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import redis
from lost_time import LostTime
from router_answers import CNT, CNT_IDS, SERVED, check_error, namespaces
from router_harness import RedisServer, Stack, eventually
from stub_worker import LEASE_S, Script

from services.router.served_model import ServedModel
from shared.membership import worker_key
from shared.messages import DecodeRequest, PrefillLost, PrefillRequest, RequestFailed


def send_and_hang_up(stack: Stack, until: Callable[[], object], path: str = "/v1/completions", **body: object) -> None:
    prompt: dict[str, object] = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 2000} if path == "/v1/completions" else {}
    payload = json.dumps({**prompt, "ignore_eos": True, **body}).encode()
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        eventually(until)


@pytest.mark.parametrize(
    "body",
    [
        {"stream": False}, {"stream": True}, {"stream": False, "n": 4}, {"stream": True, "prompt": CNT_IDS * 3, "n": 2},
        {"prompt": ["a", "b"]}, {"best_of": 3}, {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "a"}], "n": 2},
        {"path": "/v1/responses", "input": "a"}, {"path": "/v1/responses", "input": "a", "stream": True},
    ],
)  # fmt: skip
@pytest.mark.parametrize("first_delay_s", [0.0, 5.0])
def test_hanging_up_aborts_at_both_workers(bare: Stack, body: dict[str, object], first_delay_s: float) -> None:
    prefill = bare.join("prefill", "p")
    decode = bare.join("decode", "d", Script(repeats=True, delay_s=0.01, first_delay_s=first_delay_s))
    bare.wait_ready()
    send_and_hang_up(bare, lambda: decode.of_kind(DecodeRequest), **body)
    eventually(lambda: decode.num_active == 0)
    started = {message.request_id for message in decode.of_kind(DecodeRequest)}
    assert started
    eventually(lambda: decode.aborted() == started == prefill.aborted())
    eventually(lambda: f'pagewire:client_disconnects_total{{model_name="{SERVED}"}} 1.0' in bare.client.get("/metrics").text)
    eventually(lambda: f'pagewire:requests_in_flight{{model_name="{SERVED}"}} 0.0' in bare.client.get("/metrics").text)


def test_decode_is_told_of_the_death_of_prefill(bare: Stack) -> None:
    prefill = bare.join("prefill", "p")
    decode = bare.join("decode", "d", Script(stop_after=0))
    bare.wait_ready()
    with ThreadPoolExecutor(1) as pool, LostTime() as lost:
        answer = pool.submit(bare.complete)
        eventually(lambda: decode.of_kind(DecodeRequest) and prefill.of_kind(PrefillRequest))
        prefill.kill()
        start_s = time.monotonic()
        eventually(lambda: decode.of_kind(PrefillLost))
        assert time.monotonic() - start_s < 2.0 + lost.so_far_s
        decode.script = Script()
        request = decode.of_kind(DecodeRequest)[0]
        assert [message.request_id for message in decode.of_kind(PrefillLost)] == [request.request_id]
        assert answer.result().status_code == 200


def test_death_before_the_first_token_is_retried_elsewhere(bare: Stack) -> None:
    bare.join("prefill", "p")
    first = bare.join("decode", "d0", Script(first_delay_s=30))
    bare.wait_ready()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(bare.complete)
        eventually(lambda: first.num_active == 1)
        second = bare.join("decode", "d1")
        eventually(lambda: bare.client.get("/ready").json()["decode"] == 2)
        first.kill()
        assert answer.result(timeout=60).json()["choices"][0]["text"] == CNT
    assert second.of_kind(DecodeRequest)[0].attempt == 1


def test_request_waits_for_a_dead_worker_to_come_back(bare: Stack) -> None:
    bare.join("prefill", "p")
    first = bare.join("decode", "d", Script(first_delay_s=30))
    bare.wait_ready()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(bare.complete)
        eventually(lambda: first.num_active == 1)
        first.kill()
        eventually(lambda: bare.client.get("/ready").json()["decode"] == 0)
        bare.join("decode", "d")
        assert answer.result(timeout=60).json()["choices"][0]["text"] == CNT


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": "a"}), ("completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream_options": {"include_usage": True}}),
    ],
)  # fmt: skip
def test_death_in_mid_stream_ends_with_an_error_event(bare: Stack, path: str, asked: dict[str, object]) -> None:
    bare.join("prefill", "p")
    decode = bare.join("decode", "d", Script(repeats=True, delay_s=0.01))
    bare.wait_ready()
    body = {**asked, "max_tokens": 500, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    start_s = 0.0
    with LostTime() as lost, bare.client.stream("POST", f"/v1/{path}", json=body) as response:
        for line in response.iter_lines():
            lines += [line] if line else []
            if len(lines) == 5:
                decode.kill()
                start_s = time.monotonic()
        assert time.monotonic() - start_s < 1.0 + lost.so_far_s
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"] == 503
    assert set(error) == {"message", "type", "param", "code"}
    assert not any('"finish_reason":"' in line for line in lines)
    assert "data: [DONE]" not in lines


def test_retryable_failures_go_to_another_worker_and_others_do_not(bare: Stack) -> None:
    def refuse(error_type: str, retryable: bool) -> Script:
        return Script(
            failure=lambda request: RequestFailed(request_id=request.request_id, message="no", error_type=error_type, retryable=retryable)
        )

    bare.join("prefill", "p")
    bad = bare.join("decode", "a-bad", refuse("internal", True))
    bare.join("decode", "good")
    bare.wait_ready()
    eventually(lambda: bare.client.get("/ready").json()["decode"] == 2)
    assert [bare.complete().status_code for _ in range(6)] == [200] * 6
    assert bad.of_kind(DecodeRequest)
    bad.script = refuse("overloaded", True)
    assert [bare.complete().status_code for _ in range(6)] == [200] * 6
    bad.script = refuse("invalid_request", False)
    assert 400 in [bare.complete().status_code for _ in range(4)]
    decode_good = bare.workers[-1]
    decode_good.script = bad.script = refuse("overloaded", True)
    response = bare.complete()
    check_error(response, 429)
    assert "retry-after" in response.headers


def test_prefill_that_is_full_does_not_leave_decode_waiting(bare: Stack) -> None:
    full = Script(
        failure=lambda request: RequestFailed(request_id=request.request_id, message="full", error_type="overloaded", retryable=True)
    )
    bare.join("prefill", "a-full", full)
    decode = bare.join("decode", "d", Script(stop_after=0))
    bare.wait_ready()
    check_error(bare.complete(), 429)
    eventually(lambda: decode.num_active == 0 and decode.aborted())
    decode.script = Script()
    bare.join("prefill", "free")
    eventually(lambda: bare.client.get("/ready").json()["prefill"] == 2)
    assert [bare.complete().status_code for _ in range(4)] == [200] * 4


def test_deadline_gives_504_and_aborts(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", request_timeout_s=0.4)
    prefill = stack.join("prefill", "p")
    decode = stack.join("decode", "d", Script(stop_after=0))
    stack.wait_ready()
    while not (decode.of_kind(DecodeRequest) and prefill.of_kind(PrefillRequest)):  # its time may be up before it is sent
        check_error(stack.complete(), 504)
    eventually(lambda: decode.aborted() and prefill.aborted())
    stack.close()


def test_hung_worker_is_gone_when_its_lease_ran_out(bare: Stack) -> None:
    bare.join("prefill", "p")
    decode = bare.join("decode", "d", lease_s=LEASE_S)
    bare.wait_ready()
    with LostTime() as lost:
        decode.freeze()
        start_s = time.monotonic()
        eventually(lambda: bare.client.get("/ready").status_code == 503)
        assert time.monotonic() - start_s < 2.0 + lost.so_far_s


def test_restarted_worker_replaces_its_predecessor(bare: Stack) -> None:
    bare.join("prefill", "p")
    old = bare.join("decode", "d")
    bare.wait_ready()
    old.kill()
    new = bare.join("decode", "d")
    eventually(lambda: bare.complete().status_code == 200)
    assert new.of_kind(DecodeRequest)


def test_incompatible_worker_is_refused(bare: Stack) -> None:
    bare.join("prefill", "p")
    other = bare.join("decode", "d", model_fingerprint="another")
    with redis.Redis.from_url(bare.redis_url) as client:
        eventually(lambda: client.exists(worker_key(bare.namespace, "d")))
    bare.join("decode", "later")
    bare.wait_ready()  # so the router has seen the first one too
    assert bare.client.get("/ready").json()["decode"] == 1
    assert [bare.complete().status_code for _ in range(2)] == [200, 200]
    assert not other.received


def test_workers_that_cannot_exchange_kv_are_not_paired(bare: Stack) -> None:
    bare.join("prefill", "p")
    other = bare.join("decode", "d-24", block_size=24)
    eventually(lambda: (bare.client.get("/ready").json()["prefill"], bare.client.get("/ready").json()["decode"]) == (1, 1))
    assert bare.client.get("/ready").status_code == 503
    assert bare.complete().status_code == 503
    double = bare.join("decode", "d-32", block_size=32)
    bare.wait_ready()
    assert bare.complete().status_code == 200
    assert double.of_kind(DecodeRequest)
    assert not other.of_kind(DecodeRequest)


def test_a_pair_whose_transfers_fail_is_avoided_and_decode_is_told_that_its_kv_will_not_come(bare: Stack) -> None:
    """As when a firewall stands between the two: prefill cannot tell decode."""
    cannot = RequestFailed(request_id="", message="the decode worker did not answer HELLO", error_type="transfer", retryable=True)
    lonely = bare.join("prefill", "a", Script(failure=lambda request: msgspec.structs.replace(cannot, request_id=request.request_id)))
    other = bare.join("prefill", "b")
    decode = bare.join("decode", "d", Script(first_delay_s=0.2))
    bare.wait_ready()
    eventually(lambda: len(bare.parts.directory.usable("prefill")) == 2)
    for _ in range(10):
        assert bare.complete().json()["choices"][0]["text"] == CNT
    assert len(lonely.of_kind(PrefillRequest)) == 2 and len(other.of_kind(PrefillRequest)) == 8
    assert [message.reason for message in decode.of_kind(PrefillLost)] == [cannot.message] * 2


def test_a_worker_that_speaks_is_not_given_up_because_its_lease_ran_out(bare: Stack) -> None:
    """As when Redis is slow: answers must not break off. What a worker with nothing to do has to say, the lease alone says."""
    bare.join("prefill", "p")
    decode = bare.join("decode", "d", Script(repeats=True, delay_s=0.1), lease_s=LEASE_S)
    bare.wait_ready()
    decode.lose_redis()
    assert len(bare.complete(max_tokens=40, ignore_eos=True, return_token_ids=True).json()["choices"][0]["token_ids"]) == 40
    eventually(lambda: bare.client.get("/ready").status_code == 503, 3.0)
