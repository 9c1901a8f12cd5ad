"""The global prefix index in Redis: for each worker incarnation one HASH, from 16-byte block hash to tier, expiring with the
worker's lease.

The reader asks for all holders in one pipelined round trip. A Redis that is down or hangs costs a request at most one time-out;
after that a breaker answers zeros at once, while a task of its own finds out when Redis is back.
The writer is one thread's business (see lease_keeper.py): what a worker holds is written over one connection only, so no add can overtake
a remove, and where writes may have been lost all of it is announced again from scratch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff

from shared.block_hash import BlockHash
from shared.cache.prefix_index import Holder, Overlap, Tier, leading_overlap
from shared.membership import blocks_key

SOCKET_TIMEOUT_S = 0.25
BLOCKS_TTL_S = 10.0
"""How long what a worker holds outlives its last renewal. Much longer than a lease: a dead worker's is found by nobody, since the
incarnation is in the key, and a live worker's must survive a pause of its process."""
_RETRY_INTERVAL_S = 0.5
_BLOCKS_PER_COMMAND = 4096
_Item = TypeVar("_Item")
_TIERS = {tier.value: tier for tier in Tier}


def make_async_client(redis_url: str) -> redis.asyncio.Redis:
    """A client that never retries by itself and gives up on a silent server after SOCKET_TIMEOUT_S."""
    return redis.asyncio.Redis.from_url(
        redis_url, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=SOCKET_TIMEOUT_S, retry=AsyncRetry(NoBackoff(), 0)
    )


class RedisPrefixIndexReader:
    """The router's side of the index."""

    def __init__(self, client: redis.asyncio.Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._is_open = True
        self._is_closing = False
        self._probe: asyncio.Task[None] | None = None
        self._lookups: set[asyncio.Task[dict[Holder, Overlap]]] = set()

    @property
    def healthy(self) -> bool:
        """False while the breaker answers zeros for Redis."""
        return self._is_open

    async def match(self, holders: Sequence[Holder], hashes: Sequence[BlockHash]) -> dict[Holder, Overlap]:
        """Overlap for each holder, in one round trip; none when Redis does not answer."""
        if not hashes or not holders or not self._is_open:
            return dict.fromkeys(holders, Overlap())
        # A task of its own: a caller that is cancelled must not leave half an answer in a pooled connection.
        lookup = asyncio.create_task(self._look_up(holders, hashes))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)
        return await asyncio.shield(lookup)

    async def close(self) -> None:
        """Stop probing. The client belongs to the caller."""
        self._is_closing = True
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe}, timeout=1.0)

    async def _look_up(self, holders: Sequence[Holder], hashes: Sequence[BlockHash]) -> dict[Holder, Overlap]:
        try:
            async with asyncio.timeout(SOCKET_TIMEOUT_S), self._client.pipeline(transaction=False) as pipe:
                for holder in holders:
                    pipe.hmget(blocks_key(self._namespace, *holder), list(hashes))
                replies = await pipe.execute()
        except (redis.RedisError, OSError, TimeoutError):
            self._trip()
            return dict.fromkeys(holders, Overlap())
        return {holder: leading_overlap(map(_TIERS.get, reply)) for holder, reply in zip(holders, replies, strict=True)}

    def _trip(self) -> None:
        self._is_open = False
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._wait_for_redis())

    async def _wait_for_redis(self) -> None:
        while not self._is_open and not self._is_closing:
            await asyncio.sleep(_RETRY_INTERVAL_S)
            with contextlib.suppress(redis.RedisError, OSError, TimeoutError):
                async with asyncio.timeout(SOCKET_TIMEOUT_S):
                    await self._client.ping()
                self._is_open = True


class RedisPrefixIndexWriter:
    """A worker's side of the index: a queue that a LeaseKeeper's thread writes out. Safe from any thread, never blocks on Redis.

    Between two writes only the last word on each hash is kept, so the queue is bounded by the number of blocks ever touched.
    """

    def __init__(self, namespace: str, worker_id: str, incarnation: int) -> None:
        self._key = blocks_key(namespace, worker_id, incarnation)
        self._lock = threading.Lock()
        self._expected: dict[BlockHash, Tier] = {}
        self._pending: dict[BlockHash, Tier | None] = {}
        self._needs_announcement = True
        self._changed = threading.Event()

    @property
    def changed(self) -> threading.Event:
        """Set when there is something to write."""
        return self._changed

    def publish(self, hashes: Iterable[BlockHash], tier: Tier = Tier.DEVICE) -> None:
        with self._lock:
            for block_hash in hashes:
                self._expected[block_hash] = tier
                self._pending[block_hash] = tier
        self._changed.set()

    def withdraw(self, hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            for block_hash in hashes:
                self._expected.pop(block_hash, None)
                self._pending[block_hash] = None
        self._changed.set()

    def flush(self, client: redis.Redis) -> None:
        """Write what has changed since the last call, or everything if writes may have been lost. Raises RedisError."""
        self._changed.clear()
        with self._lock:
            announce = self._needs_announcement
            pending, self._pending = self._pending, {}
            added = list(self._expected.items()) if announce else [(item, tier) for item, tier in pending.items() if tier is not None]
            removed = [] if announce else [item for item, tier in pending.items() if tier is None]
            self._needs_announcement = True
        if announce or added or removed:
            # One transaction: no reader sees what is half announced.
            with client.pipeline(transaction=True) as pipe:
                if announce:
                    pipe.delete(self._key)
                for hashes in _batches(removed):
                    pipe.hdel(self._key, *hashes)
                for entries in _batches(added):
                    pipe.hset(self._key, items=[part for block_hash, tier in entries for part in (block_hash, tier.value)])
                pipe.pexpire(self._key, int(BLOCKS_TTL_S * 1000))
                pipe.execute()
        with self._lock:
            self._needs_announcement = False

    def renew(self, client: redis.Redis) -> None:
        """Keep the entries alive, and announce them again if Redis holds another number than we wrote. Raises RedisError."""
        self.flush(client)
        with client.pipeline(transaction=False) as pipe:
            pipe.pexpire(self._key, int(BLOCKS_TTL_S * 1000))
            pipe.hlen(self._key)
            _, num_held = pipe.execute()
        with self._lock:
            # What was published since the flush is not in Redis yet: then the next renewal compares.
            differs = not self._pending and num_held != len(self._expected)
            self._needs_announcement = self._needs_announcement or differs
        if differs:
            self.flush(client)

    def announce_again(self) -> None:
        """The next flush writes everything: for when a connection died with writes on the way."""
        with self._lock:
            self._needs_announcement = True
        self._changed.set()

    def clear(self, client: redis.Redis) -> None:
        """Remove all of it from Redis. Raises RedisError."""
        client.delete(self._key)


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BLOCKS_PER_COMMAND)):
        yield batch
