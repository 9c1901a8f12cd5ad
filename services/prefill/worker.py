"""The prefill worker: computes the KV of prompts chunk by chunk and streams finished blocks to decode while the next chunk runs.

A request is offered to its decode worker at once and admitted here only when decode has granted it room: nothing is computed that
nobody can take, and no block is held by someone who waits for another holder. Its blocks go back when decode has confirmed them,
or when the transfer failed; they stay in the prefix cache either way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from opentelemetry.trace import Tracer

from services.prefill.job import PrefillJob
from shared import telemetry
from shared.batch import ScheduledRequest, SchedulerOutput
from shared.config import Settings
from shared.engine.device import select_device
from shared.engine.engine_core import StepResult
from shared.engine.kv_cache import hidden_state_dtype
from shared.engine.layer_groups import OnLayers
from shared.engine.tensor_parallel.sharding import Shard
from shared.engine.worker_loop import WorkerLoop, deadline_at, milliseconds
from shared.errors import ConfigurationError, TransferError, reason_of
from shared.messages import AbortRequest, DecodeRequest, PrefillRequest, PrefixPulled, RequestFailed, WorkerTiming
from shared.model_files.model_source import ModelSource
from shared.model_files.weight_reader import PendingWeights
from shared.request import Request, RequestStatus
from shared.transport.connector import SenderEvents


class PrefillWorker(WorkerLoop):
    role = "prefill"

    def __init__(
        self,
        source: ModelSource,
        settings: Settings,
        tracer: Tracer,
        progress: Callable[[float], None] | None = None,
        pending: PendingWeights | None = None,
    ) -> None:
        num_ranks = settings.tensor_parallel_size
        if num_ranks > 1 and select_device(settings, Shard(0, num_ranks).config(source.config)).type == "cuda":
            raise ConfigurationError(
                f"tensor_parallel_size = {num_ranks}: KV of ranks on several GPUs cannot go from one worker to another yet; set it for an "
                "aggregated system (--aggregated), or PAGEWIRE_DEVICE=cpu"
            )
        super().__init__(source, settings, tracer, progress, pending)
        self._jobs: dict[str, PrefillJob] = {}  # by transfer id
        self._lock = threading.Lock()
        self._num_prompt_tokens_computed = 0
        self._sender = self.prefixes.sender
        self._hidden_dtype = hidden_state_dtype(self.layout.dtype)

    def sender_events(self) -> SenderEvents:
        return self

    # ---- rpc thread ---------------------------------------------------------------------------------------------------
    def accept(self, router: bytes, message: PrefillRequest | DecodeRequest) -> None:
        assert isinstance(message, PrefillRequest)
        with self._lock:
            is_full = len(self._jobs) >= self.settings.max_num_waiting
        if is_full:
            refusal = RequestFailed(
                request_id=message.request_id,
                message="the prefill queue is full",
                error_type="overloaded",
                retryable=True,
                retry_after_s=1.0,
            )
            self.refuse(router, message, refusal)
            return
        request = Request(
            message.request_id,
            list(message.token_ids),
            arrival_s=self.clock.now_s(),
            deadline_at_s=deadline_at(message.deadline_s),
            cache_salt=message.cache_salt,
            priority=message.priority,
            transfer_id=message.transfer_id,
            num_prompt_logprobs=message.num_prompt_logprobs,
        )
        request.update_block_hashes(self.engine.root, self.settings.block_size)
        span = telemetry.start_span(self.tracer, telemetry.SPAN_PREFILL, message.traceparent)
        span.set_attributes({"request.id": message.request_id, "worker.id": self.worker_id, "kv.transfer_id": message.transfer_id})
        job = PrefillJob(request, router, message.transfer_id, span, message.prefix_pull)
        with self._lock:
            self._jobs[message.transfer_id] = job
        try:
            self._sender.offer(
                message.transfer_id,
                message.attempt,
                [message.decode],
                num_prompt_tokens=request.num_prompt_tokens,
                block_hashes=request.block_hashes,
                deadline_s=message.deadline_s,
                traceparent=job.traceparent,
            )
        except TransferError as error:
            self.on_failed(message.transfer_id, error.message)

    def abort(self, message: AbortRequest) -> None:
        with self._lock:
            transfer_ids = [job.transfer_id for job in self._jobs.values() if job.request.request_id == message.request_id]
        for transfer_id in transfer_ids:
            self._sender.abort(transfer_id, message.reason, is_cancelled=True)
            self.post(partial(self._stop_computing, transfer_id))

    def routers_in_use(self) -> set[bytes]:
        with self._lock:
            return {job.router for job in self._jobs.values()}

    def forget_router(self, router: bytes) -> None:
        with self._lock:
            transfer_ids = [job.transfer_id for job in self._jobs.values() if job.router == router]
        for transfer_id in transfer_ids:
            self._sender.abort(transfer_id, "the router is gone")
            self._stop_computing(transfer_id)

    # ---- transport's thread (SenderEvents) ----------------------------------------------------------------------------
    def on_granted(self, transfer_id: str) -> None:
        self.post(lambda: self._admit(transfer_id))

    def on_committed(self, transfer_id: str) -> None:
        self.post(lambda: self._finish(transfer_id, None))

    def on_failed(self, transfer_id: str, reason: str) -> None:
        self.post(lambda: self._finish(transfer_id, reason))

    # ---- engine thread ------------------------------------------------------------------------------------------------
    def _admit(self, transfer_id: str) -> None:
        job = self._jobs.get(transfer_id)
        if job is not None and not self._pull_prefix(job):
            self.engine.scheduler.add(job.request)

    def _pull_prefix(self, job: PrefillJob) -> bool:
        """True: the request goes on when another worker's blocks are here, or will not come."""
        request, pull = job.request, job.prefix_pull
        if pull is None:
            return False
        if self.prefixes.join(pull, request, partial(self._admit, job.transfer_id)):
            job.prefix_pull = None
            return True
        # Blocks that are waited for are not waited on: who finds no room for them computes, when there is some.
        reservation = self.engine.manager.reserve(request) if self.engine.scheduler.has_place else None
        if reservation is None:
            self._drop_pull(job, "there is no room for it now")
            return False
        if not self.prefixes.pull(pull, request, reservation, job.span, partial(self._go_on_after_pull, job)):
            self._compute_rest(job)
        return True

    def _go_on_after_pull(self, job: PrefillJob, failure: str | None) -> None:
        self.rpc.send(job.router, PrefixPulled(request_id=job.request.request_id, failure=failure))
        self._compute_rest(job)

    def _compute_rest(self, job: PrefillJob) -> None:
        if self._jobs.get(job.transfer_id) is job:
            self.engine.scheduler.add_running(job.request)

    def _drop_pull(self, job: PrefillJob, reason: str) -> None:
        if job.prefix_pull is not None:
            self.prefixes.drop(job.prefix_pull, reason)
            job.prefix_pull = None

    def _stop_computing(self, transfer_id: str) -> None:
        """After an abort: no more steps for it. Its blocks belong to the transfer until the transfer has ended (`_finish`)."""
        job = self._jobs.get(transfer_id)
        if job is not None:
            self._drop_pull(job, "the request was aborted")
            self.engine.scheduler.remove(job.request.request_id, free_blocks=False)

    def before_schedule(self) -> None:
        now_s = self.clock.now_s()
        with self._lock:
            expired = [job.transfer_id for job in self._jobs.values() if job.request.deadline_at_s <= now_s]
        for transfer_id in expired:
            self._sender.abort(transfer_id, "the request's deadline passed")
            self._stop_computing(transfer_id)

    def on_scheduled(self, output: SchedulerOutput) -> None:
        for row in output.scheduled:
            job = self._job(row.request)
            self.note_host_load(row.request, job.span)
            if not job.first_scheduled_ns:
                job.first_scheduled_ns = time.time_ns()
                telemetry.record_span(self.tracer, telemetry.SPAN_PREFILL_QUEUE, job.traceparent, job.received_ns, job.first_scheduled_ns)
                self._send_blocks(job, row.start // self.settings.block_size)  # prefix hits leave while the rest is computed

    def layer_listener(self, output: SchedulerOutput) -> OnLayers:
        return partial(self._send_layers, output)

    def _send_layers(self, output: SchedulerOutput, layer_start: int, layer_count: int) -> None:
        """A block leaves in the step that fills it, or ends the prompt within it: its earlier tokens were computed in earlier steps."""
        for row in output.scheduled:
            num_blocks = self.layout.num_blocks(row.end) if row.completes else row.end // self.settings.block_size
            self._send_blocks(self._job(row.request), num_blocks, (layer_start, layer_count))

    def on_computed(self, result: StepResult) -> None:
        routers = {row.request.request_id: self._job(row.request).router for row in result.output.scheduled}
        for part in result.prompt_logprobs:
            self.rpc.send(routers[part.request_id], part)
        hidden_rows = iter(result.hidden)
        for row in result.output.scheduled:
            job = self._job(row.request)
            self._note_chunk(job, row, result)
            if row.completes:
                job.computed_ns = result.end_ns
                self._sender.commit(
                    job.transfer_id, hidden_state_bytes(next(hidden_rows), self._hidden_dtype), row.request.num_cached_tokens or 0
                )
                self.engine.scheduler.remove(row.request.request_id, free_blocks=False)
                row.request.status = RequestStatus.SENDING

    def _job(self, request: Request) -> PrefillJob:
        assert request.transfer_id is not None
        return self._jobs[request.transfer_id]

    def _note_chunk(self, job: PrefillJob, row: ScheduledRequest, result: StepResult) -> None:
        job.num_chunks += 1
        job.compute_ms += milliseconds(result.start_ns, result.end_ns)
        self._num_prompt_tokens_computed += row.num_new_tokens
        attributes = {"chunk.start": row.start, "chunk.num_tokens": row.num_new_tokens, "step.num_tokens": result.output.num_tokens}
        telemetry.record_span(self.tracer, telemetry.SPAN_PREFILL_CHUNK, job.traceparent, result.start_ns, result.end_ns, attributes)

    def _send_blocks(self, job: PrefillJob, num_blocks: int, layers: tuple[int, int] | None = None) -> None:
        """Queue blocks up to `num_blocks` that were not queued before. `layers`: (start, count); with the last they count as queued."""
        if num_blocks <= job.num_sent_blocks:
            return
        job.first_sent_ns = job.first_sent_ns or time.time_ns()
        # They leave before they are published, which may exchange the request's block for an equal one: what lanes read must stay.
        kept = job.kept_block_ids
        kept += self.engine.manager.keep(job.transfer_name, job.request.request_id, len(kept), num_blocks)
        blocks = list(enumerate(kept[job.num_sent_blocks : num_blocks], start=job.num_sent_blocks))
        is_whole = layers is None or layers == (0, self.layout.num_layers)
        self._sender.send_blocks(job.transfer_id, blocks, layers=None if is_whole else layers)
        if layers is None or sum(layers) == self.layout.num_layers:
            job.num_sent_blocks = num_blocks

    def _finish(self, transfer_id: str, failure: str | None) -> None:
        """The transfer is over, well or not: give the blocks back. Safe to call again."""
        with self._lock:
            job = self._jobs.pop(transfer_id, None)
        if job is None:
            return
        request = job.request
        self._drop_pull(job, failure or "finished")
        self.engine.scheduler.remove(request.request_id)
        self.engine.manager.free(request.request_id)
        self.engine.manager.free(job.transfer_name)
        request.status = RequestStatus.FINISHED
        now_ns = time.time_ns()
        if job.num_sent_blocks:
            telemetry.record_span(
                self.tracer, telemetry.SPAN_KV_TRANSFER, job.traceparent, job.first_sent_ns, now_ns,
                {"kv.num_blocks": job.num_sent_blocks, "kv.exposed_ms": milliseconds(job.computed_ns or now_ns, now_ns)},
            )  # fmt: skip
        job.span.set_attributes(
            {"prefill.num_cached_tokens": request.num_cached_tokens or 0, "prefill.num_chunks": job.num_chunks, "kv.failure": failure or ""}
        )
        job.span.end(now_ns)
        if failure is not None:
            self.rpc.send(job.router, RequestFailed(
                request_id=request.request_id, message=failure, error_type="transfer", retryable=True
            ))  # fmt: skip
            return
        self.rpc.send(job.router, WorkerTiming(
            request_id=request.request_id,
            phase="prefill",
            queue_ms=milliseconds(job.received_ns, job.first_scheduled_ns),
            compute_ms=job.compute_ms,
            num_computed_tokens=request.num_prompt_tokens - (request.num_cached_tokens or 0),
            num_cached_tokens=request.num_cached_tokens or 0,
            num_steps=job.num_chunks,
        ))  # fmt: skip

    def on_step_failed(self, output: SchedulerOutput, error: Exception) -> None:
        for row in output.scheduled:
            transfer_id = self._job(row.request).transfer_id
            self._sender.abort(transfer_id, f"prefill failed: {reason_of(error)}")
            self._stop_computing(transfer_id)

    def fail_all(self, reason: str) -> None:
        for transfer_id in list(self._jobs):
            self._sender.abort(transfer_id, reason)
            self._finish(transfer_id, reason)

    def load(self) -> tuple[int, int, int]:
        with self._lock:
            requests = [job.request for job in self._jobs.values()]
        num_running = len(self.engine.scheduler.running)
        return len(requests) - num_running, num_running, sum(request.num_uncomputed_tokens for request in requests)

    def service_counters(self) -> dict[str, float]:
        return {"prompt_tokens_computed": self._num_prompt_tokens_computed}


def hidden_state_bytes(hidden: torch.Tensor, dtype: torch.dtype) -> bytes:
    """[hidden_size] as raw bytes of `dtype`; by way of uint8, since numpy has no bf16."""
    return hidden.to("cpu", dtype).contiguous().view(torch.uint8).numpy().tobytes()
