"""A worker's standing in Redis: one thread renews its record under the lease and writes out its share of the prefix index.

Redis may be down at the start, hang, die or come back empty: the thread retries and announces everything again. Nothing is
raised into the engine; `healthy` says how it stands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.cache.redis_prefix_index import RedisPrefixIndexWriter
from shared.membership import WorkerRecord, parse_record, worker_key, workers_key

_logger = logging.getLogger(__name__)
_MAX_BACKOFF_S = 0.5


class LeaseKeeper:
    """`record_factory` is called in the keeper's thread for each renewal and must be quick and thread-safe."""

    def __init__(
        self, redis_url: str, namespace: str, record_factory: Callable[[], WorkerRecord], lease_s: float, writer: RedisPrefixIndexWriter
    ) -> None:
        timeout_s = min(0.5, lease_s / 3)
        self._client = redis.Redis.from_url(
            redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
        self._namespace = namespace
        self._record_factory = record_factory
        self._lease_s = lease_s
        self._writer = writer
        self._is_closing = threading.Event()
        self._healthy = False
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    @property
    def healthy(self) -> bool:
        """True when the last renewal reached Redis."""
        return self._healthy

    def start(self) -> None:
        """Register as soon as Redis answers, and go on renewing; returns at once."""
        self._thread.start()

    def close(self, deadline_s: float = 1.0) -> None:
        """Deregister: the record first, so that no request is routed here, then what it holds. Waits at most `deadline_s`."""
        self._is_closing.set()
        self._writer.changed.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        renew_at_s = 0.0
        num_failures = 0
        while not self._is_closing.is_set():
            try:
                if time.monotonic() >= renew_at_s:
                    renew_at_s = time.monotonic() + self._lease_s / 4
                    self._renew()
                self._writer.flush(self._client)
                self._note_health(True)
                num_failures = 0
            except Exception as error:
                # Whatever it was, the lease must go on: a keeper that stops takes a healthy worker out of service.
                self._note_health(False, error)
                self._writer.announce_again()
                # A command on the lost connection may still be executed after one on the next: begin again from a clean one.
                self._client.connection_pool.disconnect()
                num_failures += 1
                renew_at_s = 0.0
                self._is_closing.wait(min(_MAX_BACKOFF_S, 0.05 * 2**num_failures))
                continue
            # The flush may have cleared the wake-up of a close.
            if not self._is_closing.is_set():
                self._writer.changed.wait(max(0.0, renew_at_s - time.monotonic()))
        self._deregister()

    def _renew(self) -> None:
        record = self._record_factory()
        with self._client.pipeline(transaction=False) as pipe:
            pipe.set(worker_key(self._namespace, record.worker_id), record.model_dump_json(), px=int(self._lease_s * 1000))
            pipe.sadd(workers_key(self._namespace), record.worker_id)
            pipe.execute()
        self._writer.renew(self._client)

    def _deregister(self) -> None:
        try:
            record = self._record_factory()
            key = worker_key(self._namespace, record.worker_id)
            held = self._client.get(key)
            current = parse_record(held) if isinstance(held, (bytes, str)) else None
            # A successor under the same name may have registered already: its record is not ours to remove.
            if current is None or current.incarnation == record.incarnation:
                with self._client.pipeline(transaction=False) as pipe:
                    pipe.delete(key)
                    pipe.srem(workers_key(self._namespace), record.worker_id)
                    pipe.execute()
            self._writer.clear(self._client)
        except Exception as error:
            _logger.info("could not deregister from Redis (%s); the lease will run out by itself", error)
        finally:
            self._client.close()

    def _note_health(self, healthy: bool, error: Exception | None = None) -> None:
        if healthy and not self._healthy:
            _logger.info("registered in Redis")
        elif not healthy and (self._healthy or (error is not None and not self._has_warned)):
            _logger.warning("Redis does not answer (%s); serving goes on, registration is retried", error)
            self._has_warned = True
        self._healthy = healthy
