"""Which workers there are: the records in Redis, read every POLL_INTERVAL_S, joined with the state of each worker's connection.

While Redis does not answer, or takes no writes, so that no worker can renew its lease (it is full, or a replica, or cannot save), the last
known table stays in use. A worker is gone when its connection breaks (milliseconds), when its lease has run out and nothing was heard of it
either, when another incarnation took its name, or when it left. A lease that ran out while this process could not look says nothing: on a
machine that was held up as a whole (suspended, a virtual one not scheduled) nobody could renew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import redis
import redis.asyncio
import zmq
from redis.exceptions import NoPermissionError

from services.router.policy import Candidate
from services.router.worker_client import WorkerClient
from shared.cache.prefix_index import Holder, Overlap
from shared.cache.redis_prefix_index import SOCKET_TIMEOUT_S
from shared.clock import Clock
from shared.membership import WorkerRecord, parse_record, worker_key, workers_key, write_probe_key
from shared.messages import KVPeer, WorkerTiming
from shared.transport.protocol.kv_format import KVFormat

_logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2
_FORGET_ID_AFTER_S = 60.0
_SHUTDOWN = "the router is shutting down"
WorkerRole = Literal["prefill", "decode"]


@dataclass(eq=False)
class Worker:
    """One incarnation of a worker, its connection, and what this router has given it to do."""

    record: WorkerRecord
    client: WorkerClient
    num_assigned: int = 0
    outstanding: dict[str, int] = field(default_factory=dict)
    """Requests sent and not yet done here, with the prompt tokens each still has to compute."""
    missing_since_s: float | None = None

    @property
    def holder(self) -> Holder:
        return Holder(self.record.worker_id, self.record.incarnation)

    def candidate(self, overlap: Overlap) -> Candidate:
        """This worker for the policy. The router's own count covers what was sent since the last snapshot."""
        stats = self.record.stats
        return Candidate(
            worker_id=self.record.worker_id,
            incarnation=self.record.incarnation,
            overlap_blocks=overlap.num_blocks,
            num_host_blocks=overlap.num_host_blocks,
            num_requests=max(stats.num_waiting + stats.num_running, len(self.outstanding)),
            num_waiting_tokens=max(stats.num_waiting_tokens, sum(self.outstanding.values())),
            tokens_per_s=stats.tokens_per_s,
            num_blocks_total=self.record.num_blocks,
            num_blocks_used=stats.num_blocks_used,
            num_assigned=self.num_assigned,
            kv_format=self.kv_format,
            can_pull=self.record.kv_ctrl_endpoint is not None,
        )

    @property
    def kv_format(self) -> KVFormat:
        record = self.record
        return KVFormat(record.dtype, record.block_size, record.kv_wire_dtype, record.is_kv_whole)

    @property
    def kv_peer(self) -> KVPeer:
        """Where it takes KV blocks."""
        record = self.record
        return KVPeer(
            worker_id=record.worker_id,
            ctrl_endpoint=record.kv_ctrl_endpoint or "",
            incarnation=record.incarnation,
            server_key=record.kv_server_key,
        )

    def assign(self, request_id: str, num_tokens: int) -> None:
        self.num_assigned += 1
        self.outstanding[request_id] = num_tokens

    def release(self, request_id: str) -> None:
        self.outstanding.pop(request_id, None)


class WorkerDirectory:
    """Lives on one event loop, from `start` to `close`."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        namespace: str,
        lease_s: float,
        model_fingerprint: str,
        required_roles: tuple[WorkerRole, ...],
    ) -> None:
        self._client = client
        self._context = context
        self._clock = clock
        self._namespace = namespace
        self._lease_s = lease_s
        self._model_fingerprint = model_fingerprint
        self.required_roles = required_roles
        self._workers: dict[str, Worker] = {}
        self._barred_until_s: dict[Holder, float] = {}
        self._outage_until_s = 0.0
        self._applied_at_s = clock.now_s()
        self._refused: set[Holder] = set()
        self._unused_since_s: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.redis_ok = False
        self.on_timing: Callable[[WorkerTiming], None] = lambda timing: None
        """Told what each phase of each request took; set before `start`."""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._poll_forever())

    async def close(self) -> None:
        self._is_closing = True
        if self._task is not None:
            # A cancellation that meets a time-out in the Redis client can get lost there: the flag ends the loop all the same.
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)
        for worker in list(self._workers.values()):
            self._remove(worker, _SHUTDOWN)

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def usable(self, role: WorkerRole) -> list[Worker]:
        """Connected workers of `role`, none that is about to leave. One whose record is missing but whose lease may still run is taken only
        if no other is left."""
        workers = [worker for worker in self._workers.values() if worker.record.role == role and not worker.record.is_draining]
        connected = [worker for worker in workers if worker.client.is_connected]
        return [worker for worker in connected if worker.missing_since_s is None] or connected

    @property
    def is_ready(self) -> bool:
        """There is a worker of each kind, and where it takes two, two that can exchange KV."""
        if self.required_roles == ("decode",):
            return bool(self.usable("decode"))
        return any(self._matches(worker, "decode") for worker in self.usable("prefill"))

    def max_model_len(self, limit: int) -> int:
        """The longest sequence that every worker and `limit` allow."""
        return min([limit, *(worker.record.max_model_len for worker in self._workers.values())])

    async def _poll_forever(self) -> None:
        while not self._is_closing:
            try:
                async with asyncio.timeout(2 * SOCKET_TIMEOUT_S):
                    listed_ids, records = await self._read()
            except (redis.RedisError, OSError, TimeoutError) as error:
                if self.redis_ok:
                    _logger.warning("Redis does not serve (%s: %s); routing goes on with the workers known", type(error).__name__, error)
                self.redis_ok = False
                self._excuse_missing_records(self._clock.now_s() + self._lease_s + 0.5)
            else:
                self.redis_ok = True
                try:
                    self._apply(listed_ids, records)
                    await self._drop_unused_ids(listed_ids, records)
                except (redis.RedisError, OSError):
                    self.redis_ok = False
                except Exception:
                    _logger.exception("worker table not updated")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _read(self) -> tuple[set[str], dict[str, WorkerRecord]]:
        """The listed ids and the records that exist: one round trip, two when there is a new id. Raises RedisError, also where Redis
        answers and would refuse a worker's record."""
        known_ids = list(self._workers)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(write_probe_key(self._namespace), 1, px=int(self._lease_s * 1000))
            pipe.smembers(workers_key(self._namespace))
            if known_ids:
                pipe.mget([worker_key(self._namespace, worker_id) for worker_id in known_ids])
            probe, *replies = await pipe.execute(raise_on_error=False)
        # A router that is not permitted to write says nothing about the workers.
        refusals = replies if isinstance(probe, NoPermissionError) else [probe, *replies]
        if refusal := next((reply for reply in refusals if isinstance(reply, redis.RedisError)), None):
            raise refusal
        listed_ids = {member.decode(errors="replace") for member in replies[0]}
        found = dict(zip(known_ids, replies[1], strict=True)) if known_ids else {}
        new_ids = sorted(listed_ids.difference(known_ids))
        if new_ids:
            values = await self._client.mget([worker_key(self._namespace, worker_id) for worker_id in new_ids])
            found.update(zip(new_ids, values, strict=True))
        records = {worker_id: parse_record(value) for worker_id, value in found.items() if value is not None}
        return listed_ids, {worker_id: record for worker_id, record in records.items() if record is not None}

    def _apply(self, listed_ids: set[str], records: dict[str, WorkerRecord]) -> None:
        now_s = self._clock.now_s()
        if now_s - self._applied_at_s > self._lease_s / 2:  # who had renewed in time had more than this left
            self._excuse_missing_records(now_s + self._lease_s / 2)  # in which each renews twice
        self._applied_at_s = now_s
        for worker_id, worker in list(self._workers.items()):
            record = records.get(worker_id)
            if record is not None and record.incarnation != worker.record.incarnation:
                self._remove(worker, "it was restarted")
            elif record is not None:
                worker.record = record
                worker.missing_since_s = None
            elif worker_id in listed_ids and now_s > self._outage_until_s:
                # Who speaks is not dead, but Redis too slow for it; whoever has nothing to do may be taken for either.
                if now_s - worker.client.heard_s > self._lease_s:
                    self._remove(worker, "its lease ran out")
                else:
                    worker.missing_since_s = now_s
            else:
                # It left in order, or Redis was away or came back empty: then the worker will register again within its lease.
                worker.missing_since_s = now_s if worker.missing_since_s is None else worker.missing_since_s
                if now_s - worker.missing_since_s > self._lease_s + 0.5:
                    self._remove(worker, "it left")
        self._barred_until_s = {holder: until_s for holder, until_s in self._barred_until_s.items() if until_s > now_s}
        for worker_id, record in records.items():
            holder = Holder(worker_id, record.incarnation)
            if worker_id not in self._workers and holder not in self._barred_until_s and self._is_compatible(holder, record):
                self._add(record)

    def _excuse_missing_records(self, until_s: float) -> None:
        """Workers could not renew: a lease that ran out meanwhile says nothing about its worker, which has until then to do so."""
        self._outage_until_s = max(self._outage_until_s, until_s)

    def _is_compatible(self, holder: Holder, record: WorkerRecord) -> bool:
        ours, theirs = self._model_fingerprint, record.model_fingerprint
        if ours != theirs and holder not in self._refused:
            _logger.warning("worker %s is refused: its model_fingerprint is %r, this router's is %r", holder.worker_id, theirs, ours)
            self._refused.add(holder)
        return ours == theirs

    def _matches(self, worker: Worker, role: WorkerRole) -> list[Worker]:
        """Usable workers of the other role with which it can exchange KV."""
        others = self.usable(role)
        if worker.record.role == "prefill":
            return [other for other in others if worker.kv_format.can_send_to(other.kv_format)]
        return [other for other in others if other.kv_format.can_send_to(worker.kv_format)]

    def _add(self, record: WorkerRecord) -> None:
        client = WorkerClient(
            self._context, record.worker_id, record.rpc_endpoint, lambda: self._disconnected(worker), lambda timing: self.on_timing(timing)
        )
        worker = Worker(record, client)
        self._workers[record.worker_id] = worker
        client.start()
        _logger.info("worker %s (%s) joined at %s", record.worker_id, record.role, record.rpc_endpoint)
        role: WorkerRole = "decode" if record.role == "prefill" else "prefill"
        if role in self.required_roles and self.usable(role) and not self._matches(worker, role):
            _logger.warning(
                "worker %s (%s) can exchange KV with no %s worker here: it has %s, they have %s",
                record.worker_id, record.role, role, worker.kv_format, [other.kv_format for other in self.usable(role)],
            )  # fmt: skip

    def _disconnected(self, worker: Worker) -> None:
        # Its record lives on for up to a lease. If it is still there after that, only the connection broke: then it may come back.
        self._barred_until_s[worker.holder] = self._clock.now_s() + self._lease_s + 2 * POLL_INTERVAL_S
        self._remove(worker, "its connection broke")

    def _remove(self, worker: Worker, reason: str) -> None:
        if self._workers.get(worker.record.worker_id) is worker:
            del self._workers[worker.record.worker_id]
            level = logging.INFO if reason == _SHUTDOWN else logging.WARNING
            _logger.log(level, "worker %s (%s) is gone: %s", worker.record.worker_id, worker.record.role, reason)
        worker.client.close(f"worker {worker.record.worker_id} is gone: {reason}")

    async def _drop_unused_ids(self, listed_ids: Iterable[str], records: dict[str, WorkerRecord]) -> None:
        """Ids of workers that died long ago leave the list; a live worker adds its own again with each renewal."""
        now_s = self._clock.now_s()
        unused = {worker_id for worker_id in listed_ids if worker_id not in records and worker_id not in self._workers}
        self._unused_since_s = {worker_id: self._unused_since_s.get(worker_id, now_s) for worker_id in unused}
        old = [worker_id for worker_id, since_s in self._unused_since_s.items() if now_s - since_s > _FORGET_ID_AFTER_S]
        if old:
            await self._client.srem(workers_key(self._namespace), *old)
