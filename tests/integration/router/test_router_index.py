"""Where requests go by what workers hold, and what happens without Redis."""

from __future__ import annotations

import threading
import time

import pytest
import redis
from lost_time import LostTime
from router_answers import CNT, CNT_IDS, check_error, namespaces
from router_harness import RedisServer, Stack, eventually
from stub_worker import LEASE_S, Script

from services.router.served_model import ServedModel
from shared.block_hash import hash_full_blocks, root_hash
from shared.membership import WorkerStats, blocks_key, worker_key
from shared.messages import DecodeRequest, PrefillRequest, SendPrefix


def prompt_hashes(stack: Stack, token_ids: list[int]) -> list[bytes]:
    return hash_full_blocks(root_hash(stack.model.fingerprint, "float32", 16), token_ids, 16)


@pytest.mark.usefixtures("patient_lookups")
def test_request_goes_to_the_holder_of_its_prefix(bare: Stack) -> None:
    prompt = [504 + number for number in range(100)]
    bare.join("prefill", "p0")
    holder = bare.join("prefill", "p1")
    bare.join("decode", "d")
    bare.publish(holder, prompt_hashes(bare, prompt)[:4])  # the rest is too long for decode to compute
    bare.wait_ready()
    eventually(lambda: bare.client.get("/ready").json()["prefill"] == 2)
    for _ in range(3):
        bare.complete(prompt=prompt)
    eventually(lambda: len(holder.of_kind(PrefillRequest)) == 3)


@pytest.mark.parametrize(("failure", "num_pulls"), [("no data lane could be reached", 2), (None, 6)])
def test_prefixes_are_no_longer_pulled_where_pulls_fail(
    redis_server: RedisServer, model: ServedModel, failure: str | None, num_pulls: int
) -> None:
    prompt = [504 + number for number in range(1000)]
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", aggregated=True)
    try:
        holder, idle = stack.join("decode", "busy", lease_s=LEASE_S), stack.join("decode", "idle", Script(pull_failure=failure))
        holder.stats = WorkerStats(num_running=100)
        holder.index.publish(prompt_hashes(stack, prompt))
        stack.wait_ready()
        # Statistics travel with the lease.
        eventually(lambda: sorted(worker.record.stats.num_running for worker in stack.parts.directory.usable("decode")) == [1, 100])
        for _ in range(6):
            assert stack.complete(prompt=prompt).status_code == 200
        assert [message.prefix_pull is not None for message in idle.of_kind(DecodeRequest)].count(True) == num_pulls
        assert len(holder.of_kind(SendPrefix)) == num_pulls
    finally:
        stack.close()


@pytest.mark.usefixtures("patient_lookups")
def test_short_uncached_tail_stays_on_decode(bare: Stack) -> None:
    prompt = [504 + number for number in range(100)]
    prefill = bare.join("prefill", "p")
    decode = bare.join("decode", "d")
    bare.publish(decode, prompt_hashes(bare, prompt))
    bare.wait_ready()
    assert bare.complete(prompt=prompt).status_code == 200
    assert decode.of_kind(DecodeRequest)[0].transfer_id is None
    assert prefill.received == []
    assert bare.complete(prompt=[*prompt, *range(600, 620)]).status_code == 200
    assert decode.of_kind(DecodeRequest)[1].transfer_id is not None


@pytest.mark.usefixtures("patient_lookups")
def test_cache_salt_separates_prefixes(bare: Stack) -> None:
    prompt = [504 + number for number in range(100)]
    bare.join("prefill", "p")
    decode = bare.join("decode", "d")
    bare.publish(decode, prompt_hashes(bare, prompt))
    bare.wait_ready()
    for salt, is_local in (("a", False), ("", True), (None, True)):
        bare.complete(prompt=prompt, cache_salt=salt)
        assert (decode.of_kind(DecodeRequest)[-1].transfer_id is None) == is_local


def test_hanging_redis_costs_less_than_half_a_second_and_workers_stay(model: ServedModel) -> None:
    server = RedisServer()
    stack = Stack(server.url, model, "hang")
    stack.join("prefill", "p", lease_s=LEASE_S)
    stack.join("decode", "d", lease_s=LEASE_S)
    stack.wait_ready()
    prompt = CNT_IDS * 5
    server.pause()
    for _ in range(5):
        with LostTime() as lost:
            start_s = time.monotonic()
            assert stack.complete(prompt=prompt).status_code == 200
            assert time.monotonic() - start_s < 0.5 + lost.so_far_s
        time.sleep(0.5)
    eventually(lambda: stack.client.get("/ready").json()["redis"] == "unreachable")
    assert stack.client.get("/ready").status_code == 200
    server.resume()
    eventually(lambda: stack.client.get("/ready").json()["redis"] == "ok")
    eventually(lambda: stack.client.get("/ready").json()["prefix_index"] == "ok")
    assert stack.client.get("/ready").status_code == 200
    stack.close()
    server.stop()


@pytest.mark.parametrize(("setting", "refusing", "serving"), [("maxmemory", 1, 0), ("min-replicas-to-write", 1, 0)])
def test_workers_stay_while_redis_is_full_or_for_other_reasons_takes_no_writes(
    model: ServedModel, setting: str, refusing: int, serving: int
) -> None:
    """It answers all reads, and every lease runs out in it."""
    server = RedisServer()
    stack = Stack(server.url, model, "full")
    stack.join("prefill", "p")
    decode = stack.join("decode", "d")
    stack.wait_ready()
    client = redis.Redis.from_url(server.url)
    client.config_set(setting, refusing)
    eventually(lambda: not client.exists(worker_key("full", "p"), worker_key("full", "d")))
    time.sleep(1.0)
    assert stack.complete().json()["choices"][0]["text"] == CNT
    assert stack.client.get("/ready").status_code == 200
    client.config_set(setting, serving)
    eventually(lambda: stack.client.get("/ready").json()["redis"] == "ok")
    assert stack.complete().status_code == 200
    decode.kill()
    eventually(lambda: stack.client.get("/ready").status_code == 503)
    stack.close()
    server.stop()


def test_a_router_that_may_only_read_redis_still_sees_leases_run_out(model: ServedModel) -> None:
    server = RedisServer()
    redis.Redis.from_url(server.url).acl_setuser(
        "reader", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@read", "+@connection"]
    )
    stack = Stack(server.url.replace("127", "reader:pw@127", 1), model, "reader")
    stack.redis_url = server.url
    stack.join("prefill", "p")
    decode = stack.join("decode", "d")
    stack.wait_ready()
    decode.freeze()
    eventually(lambda: stack.client.get("/ready").status_code == 503)
    stack.close()
    server.stop()


def test_empty_redis_after_a_restart_is_filled_again_and_requests_go_on(model: ServedModel) -> None:
    server = RedisServer()
    stack = Stack(server.url, model, "restart")
    stack.join("prefill", "p", lease_s=LEASE_S)
    decode = stack.join("decode", "d", Script(repeats=True, delay_s=0.02), lease_s=LEASE_S)
    stack.wait_ready()
    hashes = prompt_hashes(stack, list(range(500, 660)))
    decode.index.publish(hashes)
    failures = []

    def long_request() -> None:
        answer = stack.complete(max_tokens=200, ignore_eos=True)
        if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 200:
            failures.append(answer.text)

    thread = threading.Thread(target=long_request)
    thread.start()
    server.stop()
    time.sleep(0.5)
    server.start()
    client = redis.Redis.from_url(server.url)
    eventually(lambda: client.hlen(blocks_key("restart", "d", decode.incarnation)) == len(hashes))
    eventually(lambda: client.exists(worker_key("restart", "p"), worker_key("restart", "d")) == 2)
    thread.join()
    assert failures == []
    stack.wait_ready()
    stack.close()
    server.stop()


def test_everything_becomes_ready_when_redis_comes_last(model: ServedModel) -> None:
    server = RedisServer()
    server.stop()
    stack = Stack(server.url, model, "last")
    stack.join("decode", "d")
    stack.join("prefill", "p")
    check_error(stack.complete(), 503)
    time.sleep(0.5)
    server.start()
    stack.wait_ready()
    assert stack.complete().json()["choices"][0]["text"] == CNT
    stack.close()
    server.stop()
