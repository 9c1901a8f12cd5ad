"""One suite for the prefix index on both its stores: the in-memory twin and the Redis commands (served by fakeredis)."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

import pytest
import redis
from fakeredis import TcpFakeServer
from lost_time import LostTime

from shared.block_hash import BlockHash, hash_full_blocks, root_hash
from shared.cache.memory_prefix_index import MemoryPrefixIndex
from shared.cache.prefix_index import Holder, Overlap, PrefixIndexReader, PrefixIndexWriter, Tier
from shared.cache.redis_prefix_index import RedisPrefixIndexReader, RedisPrefixIndexWriter, make_async_client
from shared.lease_keeper import LeaseKeeper
from shared.membership import WorkerRecord, blocks_key, worker_key, workers_key

NAMESPACE = "test"
HASHES = hash_full_blocks(root_hash("model", "float32", 4), list(range(40)), 4)


class Index(Protocol):
    reader: PrefixIndexReader

    def writer(self, holder: Holder) -> PrefixIndexWriter: ...

    async def settle(self) -> None: ...


class MemoryIndex:
    def __init__(self) -> None:
        self._index = MemoryPrefixIndex()
        self.reader: PrefixIndexReader = self._index

    def writer(self, holder: Holder) -> PrefixIndexWriter:
        return self._index.writer(holder)

    async def settle(self) -> None:
        return None


class RedisIndex:
    def __init__(self, url: str) -> None:
        self.client = make_async_client(url)
        self.reader: PrefixIndexReader = RedisPrefixIndexReader(self.client, NAMESPACE)
        self._sync = redis.Redis.from_url(url)
        self._writers: list[RedisPrefixIndexWriter] = []

    def writer(self, holder: Holder) -> PrefixIndexWriter:
        self._writers.append(RedisPrefixIndexWriter(NAMESPACE, *holder))
        return self._writers[-1]

    async def settle(self) -> None:
        for writer in self._writers:
            await asyncio.to_thread(writer.flush, self._sync)


@pytest.fixture(scope="module")
def fake_redis_url() -> Iterator[str]:
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()


@pytest.fixture
def redis_url(fake_redis_url: str) -> str:
    redis.Redis.from_url(fake_redis_url).flushall()
    return fake_redis_url


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    redis_index = RedisIndex(request.getfixturevalue("redis_url"))
    yield redis_index
    await redis_index.client.aclose()


A, A_RESTARTED, B = Holder("a", 1), Holder("a", 2), Holder("b", 7)


async def test_overlap_is_the_leading_run_of_hits(index: Index) -> None:
    index.writer(A).publish(HASHES[:3])
    index.writer(B).publish([HASHES[0], HASHES[2]])
    await index.settle()
    assert await index.reader.match([A, B, Holder("nobody", 1)], HASHES) == {A: Overlap(3), B: Overlap(1), Holder("nobody", 1): Overlap()}


async def test_withdrawn_block_ends_the_match(index: Index) -> None:
    writer = index.writer(A)
    writer.publish(HASHES)
    await index.settle()
    writer.withdraw([HASHES[5]])
    await index.settle()
    assert (await index.reader.match([A], HASHES))[A].num_blocks == 5


async def test_publish_and_withdraw_apply_in_order(index: Index) -> None:
    writer = index.writer(A)
    writer.publish([HASHES[0]])
    writer.withdraw([HASHES[0]])
    writer.withdraw([HASHES[1]])
    writer.publish([HASHES[1]])
    await index.settle()
    assert (await index.reader.match([A], [HASHES[0]]))[A].num_blocks == 0
    assert (await index.reader.match([A], [HASHES[1]]))[A].num_blocks == 1


async def test_a_block_in_host_memory_is_part_of_the_overlap_and_told_apart(index: Index) -> None:
    writer = index.writer(A)
    writer.publish(HASHES[:4])
    writer.publish(HASHES[2:6], Tier.HOST)
    await index.settle()
    assert await index.reader.match([A], HASHES) == {A: Overlap(6, num_host_blocks=4)}
    writer.publish([HASHES[2]])
    writer.withdraw([HASHES[5]])
    await index.settle()
    assert await index.reader.match([A], HASHES) == {A: Overlap(5, num_host_blocks=2)}


async def test_a_restarted_worker_is_not_credited_with_its_predecessors_blocks(index: Index) -> None:
    index.writer(A).publish(HASHES)
    await index.settle()
    assert await index.reader.match([A_RESTARTED], HASHES) == {A_RESTARTED: Overlap()}


async def test_no_hashes_or_no_holders_match_nothing(index: Index) -> None:
    assert await index.reader.match([A], []) == {A: Overlap()}
    assert await index.reader.match([], HASHES) == {}


async def test_lost_redis_costs_one_timeout_then_nothing() -> None:
    silent = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
    client = make_async_client(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}/0")
    reader = RedisPrefixIndexReader(client, NAMESPACE)
    durations_s = []
    with LostTime() as lost:
        for _ in range(5):
            start_s = time.monotonic()
            assert await reader.match([A], HASHES) == {A: Overlap()}
            durations_s.append(time.monotonic() - start_s)
    assert durations_s[0] < 0.45 + lost.so_far_s
    assert statistics.median(durations_s[1:]) < 0.05
    assert not reader.healthy
    await reader.close()
    await client.aclose()
    silent.close()


def record(incarnation: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id="a", role="prefill", incarnation=incarnation, rpc_endpoint="tcp://127.0.0.1:1", model_name="m", model_fingerprint="f",
        dtype="float32", block_size=4, num_blocks=8, max_model_len=32, vocab_size=64,
    )  # fmt: skip


def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come true in time"
        time.sleep(0.01)


def test_keeper_registers_writes_and_deregisters(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    writer = RedisPrefixIndexWriter(NAMESPACE, "a", 1)
    keeper = LeaseKeeper(redis_url, NAMESPACE, lambda: record(1), 0.4, writer)
    keeper.start()
    eventually(lambda: client.exists(worker_key(NAMESPACE, "a")))
    assert client.smembers(workers_key(NAMESPACE)) == {b"a"}
    writer.publish(HASHES[:4])
    eventually(lambda: client.hlen(blocks_key(NAMESPACE, "a", 1)) == 4)
    time.sleep(0.6)
    eventually(lambda: 0 < client.pttl(worker_key(NAMESPACE, "a")) <= 400)
    eventually(lambda: keeper.healthy)
    keeper.close()
    eventually(lambda: client.keys("*") == [])


def test_keeper_announces_the_whole_set_again_after_redis_came_back_empty(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    writer = RedisPrefixIndexWriter(NAMESPACE, "a", 1)
    keeper = LeaseKeeper(redis_url, NAMESPACE, lambda: record(1), 0.4, writer)
    keeper.start()
    writer.publish(HASHES)
    eventually(lambda: client.hlen(blocks_key(NAMESPACE, "a", 1)) == len(HASHES))
    client.flushall()
    eventually(lambda: client.hlen(blocks_key(NAMESPACE, "a", 1)) == len(HASHES))
    eventually(lambda: client.exists(worker_key(NAMESPACE, "a")))
    keeper.close()


def test_keeper_leaves_the_record_of_its_successor_alone(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    keeper = LeaseKeeper(redis_url, NAMESPACE, lambda: record(1), 30.0, RedisPrefixIndexWriter(NAMESPACE, "a", 1))
    keeper.start()
    eventually(lambda: client.exists(worker_key(NAMESPACE, "a")))
    client.set(worker_key(NAMESPACE, "a"), record(2).model_dump_json())
    keeper.close()
    assert client.exists(worker_key(NAMESPACE, "a"))


def test_keeper_survives_a_redis_that_is_not_there() -> None:
    writer = RedisPrefixIndexWriter(NAMESPACE, "a", 1)
    keeper = LeaseKeeper("redis://127.0.0.1:1/0", NAMESPACE, lambda: record(1), 0.4, writer)
    keeper.start()
    writer.publish([BlockHash(b"x" * 16)])
    time.sleep(0.2)
    assert not keeper.healthy
    start_s = time.monotonic()
    keeper.close()
    assert time.monotonic() - start_s < 10
