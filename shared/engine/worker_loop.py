"""What a prefill and a decode worker have in common: the engine loop, the inbox other threads post into, Redis, routers, spans.

Threads of a worker: the engine (main) thread runs this loop and owns the scheduler; the rpc thread takes router messages; the
transport's threads move KV blocks; the lease keeper talks to Redis. They meet in `post` and in the manager's lock.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from opentelemetry.trace import Span, Tracer

from shared.batch import SchedulerOutput
from shared.cache.redis_prefix_index import RedisPrefixIndexWriter
from shared.clock import SystemClock
from shared.config import Settings
from shared.engine.engine_core import EngineCore, StepResult
from shared.engine.layer_groups import OnLayers
from shared.engine.overlapped_decode import DecodedStep, LaunchedStep
from shared.engine.sampler import SamplingRow
from shared.ids import new_incarnation
from shared.lease_keeper import LeaseKeeper
from shared.membership import WorkerRecord, WorkerStats
from shared.messages import AbortRequest, DecodeRequest, PrefillLost, PrefillRequest, RequestFailed, RouterMessage, SendPrefix
from shared.model_files.model_source import ModelSource
from shared.model_files.weight_reader import PendingWeights
from shared.request import Request
from shared.transport.connector import ReceiverEvents, SenderEvents
from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.kv_layout import KVLayout
from shared.worker.prefix_exchange import PrefixExchange
from shared.worker.rpc_server import RpcServer

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1
BLOCKED_WAIT_S = 0.02
MAX_CONSECUTIVE_FAILURES = 3


class WorkerLoop(ABC):
    """Subclasses answer router messages and decide what a computed step means."""

    role: Literal["prefill", "decode"]

    def __init__(
        self,
        source: ModelSource,
        settings: Settings,
        tracer: Tracer,
        progress: Callable[[float], None] | None = None,
        pending: PendingWeights | None = None,
    ) -> None:
        self.settings = settings
        self.tracer = tracer
        self.clock = SystemClock()
        self.incarnation = new_incarnation()
        self.worker_id = settings.worker_id or f"{self.role}-{socket.gethostname()}"
        self.advertise_host = settings.advertise_host or settings.bind_host
        self._source = source
        self._writer = RedisPrefixIndexWriter(settings.redis_namespace, self.worker_id, self.incarnation)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.engine = EngineCore(
            source,
            settings,
            self._writer.publish,
            self._writer.withdraw,
            progress,
            pending,
            is_cache_shared=settings.kv_transport in ("auto", "shm"),
            on_loaded=self._wake,
        )
        self.layout = KVLayout(
            model_fingerprint=source.fingerprint,
            dtype=KVDtype[self.engine.kv_dtype_name.upper()],
            block_size=settings.block_size,
            num_layers=source.config.num_layers,
            num_kv_heads=source.config.num_kv_heads,
            head_dim=source.config.head_dim,
        )
        self.prefixes = PrefixExchange(
            self.layout,
            self.engine.cache.blocks(self.layout, settings),
            self.engine.manager,
            self.incarnation,
            self.clock,
            settings,
            self.worker_id,
            self.advertise_host,
            self.post,
            self.sender_events(),
            self.receiver_events(),
        )
        self._stopping = threading.Event()
        self._drained_by_s: float | None = None
        """Set once the worker is told to leave: when it goes at the latest."""
        self._launched: LaunchedStep | None = None
        """The step that runs, where steps are queued ahead."""
        self._num_failures = 0
        self._stats = WorkerStats()
        self._stats_at_s = 0.0
        self.rpc = RpcServer(settings.bind_host, self.advertise_host, self._on_message, self._on_router_gone, self.routers_in_use)
        self._lease = LeaseKeeper(settings.redis_url, settings.redis_namespace, self.record, settings.lease_s, self._writer)

    # ---- what a service fills in --------------------------------------------------------------------------------------
    @abstractmethod
    def accept(self, router: bytes, message: PrefillRequest | DecodeRequest) -> None:
        """rpc thread: a valid request of this role."""

    @abstractmethod
    def abort(self, message: AbortRequest) -> None:
        """rpc thread: forget the request and give its blocks back; unknown ids are ignored."""

    def forget_prefill(self, message: PrefillLost) -> None:
        """rpc thread: no KV will come from there. Only decode is told so."""
        logger.warning("a router takes this %s worker for one that decodes", self.role)

    @abstractmethod
    def routers_in_use(self) -> set[bytes]:
        """rpc thread: the routers that wait for something from here."""

    @abstractmethod
    def forget_router(self, router: bytes) -> None:
        """Engine thread: a router died; nobody waits for its requests any more."""

    @abstractmethod
    def before_schedule(self) -> None:
        """Engine thread, once a turn."""

    @abstractmethod
    def on_scheduled(self, output: SchedulerOutput) -> None:
        """Engine thread: `output` is about to run."""

    def layer_listener(self, output: SchedulerOutput) -> OnLayers | None:
        """Engine thread: who is told, while `output` runs, of each group of layers whose KV is complete."""
        return None

    def rows_to_draw(self, output: SchedulerOutput) -> list[SamplingRow] | None:
        """Engine thread, of requests that generate one token each: how to draw them, if that and what follows can be queued before the
        tokens are known."""
        return None

    @abstractmethod
    def on_computed(self, result: StepResult) -> None:
        """Engine thread: `result` was computed and booked."""

    def on_decoded(self, result: DecodedStep) -> None:
        """Engine thread: the same of a step whose tokens are drawn already."""
        raise AssertionError("only a worker with `rows_to_draw` has steps that draw")

    @abstractmethod
    def on_step_failed(self, output: SchedulerOutput, error: Exception) -> None:
        """Engine thread: the step raised; its requests cannot go on."""

    @abstractmethod
    def load(self) -> tuple[int, int, int]:
        """Engine thread: (requests waiting, requests running, prompt tokens not yet computed)."""

    @abstractmethod
    def service_counters(self) -> dict[str, float]:
        """Totals since start of this kind of worker."""

    def sender_events(self) -> SenderEvents | None:
        """Who is told of the transfers that this kind of worker sends, if it does."""
        return None

    def receiver_events(self) -> ReceiverEvents | None:
        """Who is told of the transfers that this kind of worker takes, if it does."""
        return None

    def close_transport(self) -> None:
        """Engine thread, at shutdown, when no request is left."""
        self.prefixes.close()

    @abstractmethod
    def fail_all(self, reason: str) -> None:
        """Engine thread, at shutdown: answer every request still here and give its blocks back."""

    # ---- life ---------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Serve until `stop`. Blocks; call from the thread that owns the engine."""
        self._refresh_stats(force=True)
        self.rpc.start()
        self._lease.start()
        try:
            while not self._stopping.is_set() and not self._is_drained():
                self._turn()
        finally:
            self._lease.close()
            if self.engine.overlapped is not None:
                self.engine.overlapped.abandon()
            self.fail_all("the worker is shutting down")
            self.close_transport()
            self.rpc.close()
            self.engine.close()

    def stop(self) -> None:
        """From any thread or a signal handler."""
        self._stopping.set()
        self._wake()

    def drain(self) -> None:
        """From a signal handler: take nothing new, and stop when what is here has ended or `drain_s` are over. Again: stop at once."""
        if self.is_draining:
            self.stop()
        else:
            self._drained_by_s = self.clock.now_s() + self.settings.drain_s
            self._wake()

    @property
    def is_draining(self) -> bool:
        return self._drained_by_s is not None

    def _is_drained(self) -> bool:
        return self._drained_by_s is not None and (not self.routers_in_use() or self.clock.now_s() >= self._drained_by_s)

    def _wake(self) -> None:
        """From any thread: something may be possible that was not."""
        self._inbox.put(lambda: None)

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` on the engine thread before its next step."""
        self._inbox.put(command)

    def _turn(self) -> None:
        self._drain_inbox()
        if not self.prefixes.is_alive:
            raise RuntimeError("the KV transfer has stopped; a fresh process can serve, this one cannot")
        self.engine.check_ranks()
        has_computed = self.step()
        self._refresh_stats(force=not has_computed)
        if not has_computed:
            self._wait_for_work()

    def step(self) -> bool:
        """What can be computed now, or False. Where steps are queued ahead, the next one before the results of the last are looked at."""
        self.before_schedule()
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._go_on(launched)
            return True
        output = self.engine.schedule()
        if output is None:
            return False
        self.on_scheduled(output)
        rows = self.rows_to_draw(output) if self.engine.can_run_ahead(output) else None
        try:
            if rows is not None and self.engine.overlapped is not None:
                self._launched = self.engine.overlapped.launch(output, rows)
                return True
            result = self.engine.run(output, self.layer_listener(output))
        except Exception as error:
            self._handle_failed_step(output, error)
            return True
        self._num_failures = 0
        self.on_computed(result)
        return True

    def _go_on(self, launched: LaunchedStep) -> None:
        assert self.engine.overlapped is not None
        following = None
        try:
            following = self.engine.overlapped.launch_next(launched)
            result = self.engine.collect(launched)
        except Exception as error:
            self._handle_failed_step(self.engine.overlapped.alive(launched), error)
            return
        self._num_failures = 0
        self._launched = following
        self.on_decoded(result)

    def _handle_failed_step(self, output: SchedulerOutput, error: Exception) -> None:
        logger.exception("step of %d tokens failed", output.num_tokens)
        is_broken = self.engine.overlapped is not None and not self.engine.overlapped.abandon()
        self.on_step_failed(output, error)
        self._num_failures += 1
        if is_broken or self.engine.is_broken or self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            # The engine itself is broken (a sticky device error, say): a fresh process is better than one that refuses all.
            raise error

    def _drain_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._execute(command)

    def _wait_for_work(self) -> None:
        timeout_s = BLOCKED_WAIT_S if len(self.engine.scheduler) else STATS_INTERVAL_S
        try:
            self._execute(self._inbox.get(timeout=timeout_s))
        except queue.Empty:
            return

    @staticmethod
    def _execute(command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            logger.exception("command failed")

    def note_host_load(self, request: Request, span: Span) -> None:
        """Once it runs: what was copied for it from host memory."""
        load = self.engine.manager.take_load(request.request_id)
        if load is not None:
            num_blocks = len(load.blocks)
            attributes = {
                "kv.num_blocks": num_blocks,
                "kv.bytes": num_blocks * self.engine.cache.block_nbytes,
                "kv.wait_ms": 1000 * (load.wait_s or 0.0),
            }
            span.add_event("kv.host_loaded", attributes)

    # ---- router messages ----------------------------------------------------------------------------------------------
    def _on_message(self, router: bytes, message: RouterMessage) -> None:
        if isinstance(message, AbortRequest):
            self.abort(message)
            return
        if isinstance(message, PrefillLost):
            self.forget_prefill(message)
            return
        if isinstance(message, SendPrefix):
            if not self.is_draining:
                self.prefixes.send(message)
            return
        problem = self._refusal(message)
        if problem is not None:
            self.refuse(router, message, problem)
            return
        self.accept(router, message)

    def refuse(self, router: bytes, message: PrefillRequest | DecodeRequest, problem: RequestFailed) -> None:
        """Any thread: nothing of this request is here, and nothing is to come."""
        if message.prefix_pull is not None:
            self.prefixes.drop(message.prefix_pull, problem.message)
        self.rpc.send(router, problem)

    def _on_router_gone(self, router: bytes) -> None:
        self.post(lambda: self.forget_router(router))

    def _refusal(self, message: PrefillRequest | DecodeRequest) -> RequestFailed | None:
        """The boundary check: everything past it may rely on a prompt that is in range and fits."""

        def invalid(text: str) -> RequestFailed:
            return RequestFailed(request_id=message.request_id, message=text, error_type="invalid_request", retryable=False)

        if message.kind != self.role:
            return invalid(f"this is a {self.role} worker")
        if self.is_draining or self._stopping.is_set():
            return RequestFailed(
                request_id=message.request_id, message="the worker is shutting down", error_type="unavailable", retryable=True
            )
        if not 0 < len(message.token_ids) <= self.engine.max_model_len:
            return invalid(f"a prompt has 1 to {self.engine.max_model_len} tokens here, this one {len(message.token_ids)}")
        if not 0 <= min(message.token_ids) <= max(message.token_ids) < self.engine.config.tokenizer_vocab_size:
            return invalid(f"token ids are 0 to {self.engine.config.tokenizer_vocab_size - 1}")
        if isinstance(message, DecodeRequest):
            sampling = message.sampling
            for token_id in (*sampling.logit_bias, *(sampling.allowed_token_ids or ()), *sampling.stop_token_ids):
                if not 0 <= token_id < self.engine.config.tokenizer_vocab_size:
                    return invalid(f"token id {token_id} is outside the vocabulary")
        return None

    # ---- how it stands ------------------------------------------------------------------------------------------------
    def record(self) -> WorkerRecord:
        """Any thread."""
        host_tier = self.engine.manager.host_tier
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self.incarnation,
            rpc_endpoint=self.rpc.endpoint,
            kv_ctrl_endpoint=self.prefixes.receiver.ctrl_endpoint if self.engine.is_kv_whole else None,
            kv_server_key=self.prefixes.receiver.server_key,
            model_name=self._source.name,
            model_fingerprint=self._source.fingerprint,
            dtype=self.engine.kv_dtype_name,
            kv_wire_dtype=self.settings.kv_wire_dtype,
            device=str(self.engine.device),
            block_size=self.settings.block_size,
            is_kv_whole=self.engine.is_kv_whole,
            num_blocks=len(self.engine.manager.pool.blocks),
            num_host_blocks=host_tier.num_slots if host_tier is not None else 0,
            max_model_len=self.engine.max_model_len,
            vocab_size=self.engine.config.tokenizer_vocab_size,
            is_draining=self.is_draining,
            stats=self._stats,
        )

    def _refresh_stats(self, force: bool = False) -> None:
        now_s = self.clock.now_s()
        if not force and now_s - self._stats_at_s < STATS_INTERVAL_S:
            return
        self._stats_at_s = now_s
        num_waiting, num_running, num_waiting_tokens = self.load()
        manager, scheduler = self.engine.manager, self.engine.scheduler
        self._stats = WorkerStats(
            num_waiting=num_waiting,
            num_running=num_running,
            num_waiting_tokens=num_waiting_tokens,
            num_blocks_used=manager.pool.num_used,
            num_blocks_cached=manager.pool.num_cached,
            num_host_blocks_cached=manager.host_tier.num_cached if manager.host_tier is not None else 0,
            tokens_per_s=scheduler.step_time.tokens_per_s,
            counters={
                "steps": self.engine.num_steps,
                "prefix_cache_queries": manager.num_queried_tokens,
                "prefix_cache_hits": manager.num_hit_tokens,
                **self._host_tier_counters(),
                "preemptions": scheduler.num_preemptions,
                "recomputed_tokens": scheduler.num_recomputed_tokens,
                "rejected_messages": self.rpc.num_rejected,
                **self.prefixes.counters(),
                **self.service_counters(),
            },
        )

    def _host_tier_counters(self) -> dict[str, float]:
        manager = self.engine.manager
        if manager.host_tier is None:
            return {}
        return {"kv_host_hit_tokens": manager.num_host_hit_tokens, **manager.host_tier.counters}


def milliseconds(start_ns: int, end_ns: int) -> float:
    return max(0, end_ns - start_ns) / 1e6


def deadline_at(deadline_s: float) -> float:
    """Monotonic time at which a message's remaining `deadline_s` runs out."""
    return time.monotonic() + deadline_s
