"""The decode worker: reserves blocks before prefill may send, samples the first token from the hidden state that comes with the
commit, then generates in continuous batches over its own paged cache.

Several answers to one prompt (n, beam search) are sequences that fork from the first one at its first token.

When a transfer fails it computes the prompt itself (policy "recompute", counted and traced) or reports the failure ("fail").
A short uncached tail behind a cached prefix never leaves this worker: the router sends it without a transfer.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

import torch
from opentelemetry.trace import Tracer

from services.decode import beam_group
from services.decode.awaited_blocks import AwaitedBlocks
from services.decode.beam_search import BeamSearch, Hypothesis
from services.decode.job import DecodeJob, DecodeSequence
from services.decode.sequence_table import SequenceTable
from shared import telemetry
from shared.batch import SchedulerOutput
from shared.cache.kv_cache_manager import Reservation
from shared.config import Settings
from shared.engine.engine_core import StepResult
from shared.engine.kv_cache import hidden_state_dtype
from shared.engine.overlapped_decode import DecodedStep
from shared.engine.sampler import SampledToken, SamplingRow, sample
from shared.engine.structured_output import MASK_GRACE_S, Grammars, wait_until_ready
from shared.engine.worker_loop import WorkerLoop, deadline_at, milliseconds
from shared.errors import InvalidRequestError, reason_of
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    FailureType,
    FinishReason,
    PrefillLost,
    PrefillRequest,
    PrefixPulled,
    RequestFailed,
    RequestOutput,
    WorkerTiming,
)
from shared.model_files.model_source import ModelSource
from shared.model_files.weight_reader import PendingWeights
from shared.request import Request, RequestStatus
from shared.sampling_params import SamplingParams
from shared.transport.connector import CommitInfo, ReceiverEvents

logger = logging.getLogger(__name__)

GRAMMAR_TIMEOUT_S = 20.0
"""A request whose grammar keeps it waiting for longer ends. The router lets no grammar pass that took longer than a few seconds."""

MAX_LOOK_AHEAD = 64
"""Requests in the queue that are looked at when those before them wait for blocks of others."""


class DecodeWorker(WorkerLoop):
    role = "decode"

    def __init__(
        self,
        source: ModelSource,
        settings: Settings,
        tracer: Tracer,
        progress: Callable[[float], None] | None = None,
        pending: PendingWeights | None = None,
    ) -> None:
        super().__init__(source, settings, tracer, progress, pending)
        self._jobs: dict[str, DecodeJob] = {}  # by request id
        self._sequences = SequenceTable(self.engine.manager, self.engine.scheduler, settings.max_num_seqs)
        self._by_transfer: dict[str, str] = {}
        self._reserve_queue: deque[DecodeJob] = deque()
        self._awaited = AwaitedBlocks()
        self._committed: list[tuple[DecodeSequence, torch.Tensor]] = []
        self._late: dict[str, tuple[DecodeSequence, torch.Tensor, float]] = {}
        """By the scheduler's request id: the hidden state of those that wait for their grammar, and until when."""
        self._grammars = Grammars(source.load_tokenizer, source.config.tokenizer_vocab_size, source.config.eos_token_ids)
        self._mask_grace_s = MASK_GRACE_S
        self._lock = threading.RLock()
        self._hidden_size = source.config.hidden_size
        self._counters = {"generation_tokens": 0, "local_prompt_tokens": 0, "kv_recompute_fallbacks": 0, "kv_transfer_failures": 0}
        self._receiver = self.prefixes.receiver

    def receiver_events(self) -> ReceiverEvents:
        return self

    # ---- rpc thread ---------------------------------------------------------------------------------------------------
    def accept(self, router: bytes, message: PrefillRequest | DecodeRequest) -> None:
        assert isinstance(message, DecodeRequest)
        if message.request_id in self._jobs or message.transfer_id in self._by_transfer:
            # Not `refuse`: what it is to pull may be what the one that is served is pulling.
            problem = self._problem(message, "this request or transfer id is already being served here", "invalid_request")
            self.rpc.send(router, problem)
            return
        if not self.engine.is_kv_whole and (message.transfer_id is not None or message.prefix_pull is not None):
            problem = self._problem(message, "this worker's ranks are on several GPUs, which take no KV from others", "invalid_request")
            self.refuse(router, message, problem)
            return
        request = Request(
            message.request_id,
            list(message.token_ids),
            arrival_s=self.clock.now_s(),
            deadline_at_s=deadline_at(message.deadline_s),
            sampling=message.sampling,
            cache_salt=message.cache_salt,
            priority=message.priority,
            transfer_id=message.transfer_id,
            num_prompt_logprobs=message.sampling.num_prompt_logprobs if message.transfer_id is None else None,
        )
        request.update_block_hashes(self.engine.root, self.settings.block_size)
        span = telemetry.start_span(self.tracer, telemetry.SPAN_DECODE, message.traceparent)
        span.set_attributes({"request.id": message.request_id, "worker.id": self.worker_id, "kv.transfer_id": message.transfer_id or ""})
        params = message.sampling
        job = DecodeJob(
            request,
            router,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            eos_token_ids=self._eos_token_ids(params),
            attempt=message.attempt,
            span=span,
            prefix_pull=message.prefix_pull if message.transfer_id is None else None,
            num_sequences=message.num_sequences,
            beam_search=self._beam_search(message),
        )
        with self._lock:
            if len(self._jobs) >= self.settings.max_num_waiting:
                self.refuse(router, message, self._problem(message, "the decode queue is full", "overloaded"))
                return
            self._jobs[message.request_id] = job
            self._sequences.add(job, self._grammars.guide(params))
            if message.transfer_id is not None:
                self._by_transfer[message.transfer_id] = message.request_id
                # The wait for room may be long; an offer that comes meanwhile waits as long as the request does.
                self._receiver.announce(message.transfer_id, message.deadline_s)
            self._reserve_queue.append(job)
            # Reserving here, not in the engine's next turn, lets the grant overlap the running step.
            self._reserve_from_queue()

    def _eos_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """The model's own ids that end an answer. A grammar lets them through only where the answer is complete, to one that ignores
        EOS only where nothing else is left."""
        is_ignored = params.ignore_eos and params.structured_output is None
        return frozenset() if is_ignored else frozenset(self.engine.config.eos_token_ids)

    def _beam_search(self, message: DecodeRequest) -> BeamSearch | None:
        if message.beam_search is None:
            return None
        sampling = message.sampling
        eos_token_ids = self._eos_token_ids(sampling)
        max_tokens = max(1, min(sampling.max_tokens, self.engine.max_model_len - len(message.token_ids)))
        return BeamSearch(message.beam_search, max_tokens, eos_token_ids, frozenset(sampling.stop_token_ids))

    @staticmethod
    def _problem(message: DecodeRequest, text: str, error_type: FailureType) -> RequestFailed:
        is_retryable = error_type != "invalid_request"
        return RequestFailed(request_id=message.request_id, message=text, error_type=error_type, retryable=is_retryable)

    def _reserve_from_queue(self) -> None:
        """First come, first served: room for the next newcomer while there is some, and never before those that lost theirs. Whose next
        blocks are most of what is on the way for another stands aside until they are here, or will not come."""
        scheduler = self.engine.scheduler
        with self._lock:
            while not scheduler.has_waiting_for_blocks and self._num_placed < self.settings.max_num_seqs:
                job = next((job for job in islice(self._reserve_queue, MAX_LOOK_AHEAD) if not self._is_awaiting(job.request)), None)
                if job is None:
                    return
                if job.prefix_pull is not None and self.prefixes.join(job.prefix_pull, job.request, partial(self._queue_again, job)):
                    job.prefix_pull = None
                    self._reserve_queue.remove(job)
                    continue
                # Each row may need a block at its next token. Where nothing is placed nothing will come back: then it starts with what
                # there is, and those of its sequences that find no room wait.
                headroom = len(scheduler.running) + job.max_num_sequences - 1 if self._num_placed else 0
                reservation = self.engine.manager.reserve(job.request, num_headroom_blocks=headroom)
                if reservation is None:
                    return
                self._reserve_queue.remove(job)
                job.reserved_ns = time.time_ns()
                if job.request.transfer_id is not None:
                    self._expect_transfer(job, job.request.transfer_id, reservation)
                elif not self._pull_prefix(job, reservation):
                    self.post(partial(self._compute_locally, job))

    def _is_awaiting(self, request: Request) -> bool:
        return bool(self._awaited) and self._awaited.are_worth_waiting_for(self.engine.manager.missing_hashes(request))

    @property
    def _num_placed(self) -> int:
        """Sequences that hold their blocks."""
        return self._sequences.num_placed - len(self._reserve_queue)

    def _pull_prefix(self, job: DecodeJob, reservation: Reservation) -> bool:
        """True: the request goes on when another worker's blocks are here, or will not come."""
        pull, then = job.prefix_pull, partial(self._go_on_after_pull, job)
        return pull is not None and self.prefixes.pull(pull, job.request, reservation, job.span, then)

    def _queue_again(self, job: DecodeJob) -> None:
        """Engine thread: the blocks that another request fetched are here, or will not come. It waits at its old place."""
        with self._lock:
            if self._jobs.get(job.request.request_id) is job:
                arrivals = (other.request.arrival_s for other in self._reserve_queue)
                place = next((index for index, arrival_s in enumerate(arrivals) if arrival_s > job.request.arrival_s), None)
                self._reserve_queue.insert(len(self._reserve_queue) if place is None else place, job)

    def _expect_transfer(self, job: DecodeJob, transfer_id: str, reservation: Reservation) -> None:
        job.request.status = RequestStatus.WAITING_FOR_KV
        self._awaited.add(job.request.request_id, job.request.block_hashes[reservation.num_cached_blocks :])
        self._receiver.expect(
            transfer_id,
            job.attempt,
            block_ids=reservation.block_ids,
            missing=list(range(reservation.num_cached_blocks, len(reservation.block_ids))),
            num_prompt_tokens=job.request.num_prompt_tokens,
            deadline_s=job.request.deadline_at_s - self.clock.now_s(),
            traceparent=job.traceparent,
        )

    def forget_prefill(self, message: PrefillLost) -> None:
        job = self._jobs.get(message.request_id)
        transfer_id = job.request.transfer_id if job is not None else None
        # False: it had ended before, or its end is on the way as an event.
        if transfer_id is not None and self._receiver.abort(transfer_id, message.reason):
            self.on_failed(transfer_id, message.reason, is_cancelled=False)

    def abort(self, message: AbortRequest) -> None:
        if message.sequence_index is None:
            self.post(lambda: self._end(message.request_id, f"aborted: {message.reason}"))
        else:
            self.post(partial(self._abort_sequence, message.request_id, message.sequence_index))

    def routers_in_use(self) -> set[bytes]:
        return {job.router for job in list(self._jobs.values())}

    def forget_router(self, router: bytes) -> None:
        for request_id in [i for i, job in list(self._jobs.items()) if job.router == router]:
            self._end(request_id, "aborted: the router is gone")

    # ---- transport's thread (ReceiverEvents) --------------------------------------------------------------------------
    def on_committed(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None:
        self.post(lambda: self._take_commit(transfer_id, hidden_state, info))

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool) -> None:
        self.post(lambda: self._transfer_failed(transfer_id, reason, is_cancelled))

    # ---- engine thread: how a request starts --------------------------------------------------------------------------
    def _go_on_after_pull(self, job: DecodeJob, failure: str | None) -> None:
        self.rpc.send(job.router, PrefixPulled(request_id=job.request.request_id, failure=failure))
        self._compute_locally(job)

    def _compute_locally(self, job: DecodeJob) -> None:
        if self._jobs.get(job.request.request_id) is job:
            self.engine.scheduler.add_running(job.request)

    def _take_commit(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None:
        job = self._jobs.get(self._by_transfer.pop(transfer_id, ""))
        if job is None:
            return
        dtype = hidden_state_dtype(info.src_dtype)
        if len(hidden_state) != self._hidden_size * dtype.itemsize:
            self._recover(job, f"hidden state of {len(hidden_state)} bytes, expected {self._hidden_size} of {dtype}")
            return
        transfer = {"kv.transport": info.transport, "kv.bytes": info.num_bytes, "kv.wire_ms": 1000 * info.wire_s}
        job.span.add_event("kv.committed", {**transfer, "kv.chunks_resent": info.num_chunks_failed})
        request = job.request
        job.started_ns = time.time_ns()
        request.num_computed_tokens = request.num_prompt_tokens
        request.num_cached_tokens = info.num_cached_tokens
        self.engine.manager.publish_full_blocks(request)
        self._forget_awaited(request)
        self.engine.scheduler.add_running(request)
        hidden = torch.frombuffer(bytearray(hidden_state), dtype=dtype)
        self._committed.append((job.sequences[0], hidden.to(self.engine.device, self.engine.dtype)))

    def _transfer_failed(self, transfer_id: str, reason: str, is_cancelled: bool) -> None:
        job = self._jobs.get(self._by_transfer.pop(transfer_id, ""))
        if job is not None and is_cancelled:
            # The router says so to both workers, and prefill has heard it first. Should it wait all the same, it tries again.
            self._end(job.request.request_id, f"KV transfer cancelled: {reason}")
        elif job is not None:
            self._recover(job, reason)

    def _forget_awaited(self, request: Request) -> None:
        """Its transfer has ended: others need not wait for it any longer."""
        with self._lock:
            self._awaited.remove(request.request_id)

    def _recover(self, job: DecodeJob, reason: str) -> None:
        """The prompt's KV will not come from prefill. Blocks taken for it hold nothing trustworthy and go back uncached."""
        request = job.request
        self._counters["kv_transfer_failures"] += 1
        logger.warning("KV transfer of request %s failed (policy: %s): %s", request.request_id, self.settings.kv_failure_policy, reason)
        job.span.add_event("kv.transfer_failed", {"reason": reason, "policy": self.settings.kv_failure_policy})
        with self._lock:
            if job in self._reserve_queue:
                self._reserve_queue.remove(job)
        self._forget_awaited(request)
        self.engine.manager.free(request.request_id)
        if self.settings.kv_failure_policy == "fail":
            self._end(request.request_id, f"KV transfer failed: {reason}", "transfer")
            return
        self._counters["kv_recompute_fallbacks"] += 1
        job.is_recomputed = True
        request.num_computed_tokens = 0
        request.num_cached_tokens = None
        request.num_prompt_logprobs = job.params.num_prompt_logprobs  # prefill may have sent some of them; all come again
        self.engine.scheduler.add(request)

    def before_schedule(self) -> None:
        now_s = self.clock.now_s()
        for request_id in [i for i, job in list(self._jobs.items()) if job.request.deadline_at_s <= now_s]:
            self._end(request_id, "the request's deadline passed", "deadline")
        for sequence in [sequence for sequence, _, give_up_s in self._late.values() if give_up_s <= now_s]:
            self._refuse_grammar(sequence.job, f"its grammar took longer than {GRAMMAR_TIMEOUT_S:g} s")
        self._reserve_from_queue()
        committed, self._committed = self._committed, []
        committed = [(sequence, hidden) for sequence, hidden in committed if sequence.request.request_id in self._sequences]
        if committed:
            self._generate([sequence for sequence, _ in committed], torch.stack([hidden for _, hidden in committed]))
        for job in list(self._jobs.values()):
            if job.beam_search is not None:
                beam_group.release_idle(job, job.beam_search, self._sequences)

    # ---- engine thread: steps -----------------------------------------------------------------------------------------
    def on_scheduled(self, output: SchedulerOutput) -> None:
        for row in output.scheduled:
            self.note_host_load(row.request, self._sequences[row.request.request_id].job.span)
        for job in {self._sequences[row.request.request_id].job for row in output.scheduled}:
            job.reserved_ns = job.reserved_ns or time.time_ns()

    def on_computed(self, result: StepResult) -> None:
        self._count_step(row.request for row in result.output.scheduled)
        for row in result.output.scheduled:
            num_prompt_tokens = min(row.end, row.request.num_prompt_tokens) - row.start
            if num_prompt_tokens > 0:
                self._sequences[row.request.request_id].job.num_local_prompt_tokens += num_prompt_tokens
                self._counters["local_prompt_tokens"] += num_prompt_tokens
        for part in result.prompt_logprobs:
            self.rpc.send(self._sequences[part.request_id].job.router, part)
        # A sequence left out of this step's sampling costs a step of its own: on a machine of slow steps, waiting costs less.
        self._mask_grace_s = max(MASK_GRACE_S, (result.end_ns - result.start_ns) / 4e9)
        completed = [self._sequences[request.request_id] for request in result.completed()]
        for sequence in completed:
            sequence.job.started_ns = sequence.job.started_ns or result.end_ns
        if completed:
            self._generate(completed, result.hidden)

    def _count_step(self, requests: Iterable[Request]) -> None:
        for job in {self._sequences[request.request_id].job for request in requests}:
            job.num_steps += 1

    def rows_to_draw(self, output: SchedulerOutput) -> list[SamplingRow] | None:
        sequences = [self._sequences[row.request.request_id] for row in output.scheduled]
        if any(sequence.guide is not None or sequence.job.beam_search is not None for sequence in sequences):
            return None
        rows = [sequence.sampling_row() for sequence in sequences]
        return rows if all(row.can_run_ahead for row in rows) else None

    def on_decoded(self, result: DecodedStep) -> None:
        self._count_step(request for request, _ in result.tokens)
        with self.rpc.batch():
            for request, token in result.tokens:
                # One of the tokens before may have ended the request of several sequences.
                if request.request_id in self._sequences:
                    self._take_token(self._sequences[request.request_id], token)

    def _generate(self, sequences: list[DecodeSequence], hidden: torch.Tensor) -> None:
        """hidden: [len(sequences), hidden_size], the last hidden state of each; samples and sends one token each, and at the first
        token of a request one for each of its sequences. A beam search takes its row and goes on when all its beams have theirs.
        Those whose grammar is not ready are sampled when it is."""
        for sequence in sequences:
            if sequence.job.params.max_tokens == 0:
                self._end_without_token(sequence.job)
        self._settle_late(sequences, hidden)
        wanted = [
            index
            for index, sequence in enumerate(sequences)
            if sequence.request.request_id in self._sequences and sequence.request.request_id not in self._late
        ]
        if not wanted:
            return
        sequences, hidden = [sequences[index] for index in wanted], hidden[wanted]
        logits = self.engine.runner.compute_logits(hidden)
        drawn: list[DecodeSequence] = []
        rows: list[int] = []
        searching: dict[DecodeJob, BeamSearch] = {}
        for row, sequence in enumerate(sequences):
            job = sequence.job
            if job.beam_search is not None:
                job.beam_search.take_logits(sequence.index, logits[row])
                searching[job] = job.beam_search
                continue
            is_first = sequence.request.num_output_tokens == 0
            forks = [self._sequences.fork(sequence, index) for index in range(1, job.num_sequences)] if is_first else []
            drawn += [sequence, *forks]
            rows += [row] * (1 + len(forks))
        if drawn:
            self._draw(drawn, logits if rows == list(range(len(sequences))) else logits[rows])
        for job, search in searching.items():
            if search.is_ready:
                self._advance_beams(job, search)

    def _draw(self, sequences: list[DecodeSequence], logits: torch.Tensor) -> None:
        rows = [sequence.sampling_row() for sequence in sequences]
        try:
            tokens: list[SampledToken | Exception] = [*sample(logits, rows)]
        except Exception as error:  # one bad row must not take the others with it
            if not isinstance(error, InvalidRequestError):
                logger.exception("sampling a batch failed")
            tokens = [self._sample_alone(logits[index : index + 1], row) for index, row in enumerate(rows)]
        with self.rpc.batch():
            for sequence, token in zip(sequences, tokens, strict=True):
                if sequence.request.request_id in self._sequences:  # a failed sibling takes it along
                    self._take_token(sequence, token)

    def _take_token(self, sequence: DecodeSequence, token: SampledToken | Exception) -> None:
        if isinstance(token, InvalidRequestError):
            self._refuse_grammar(sequence.job, token.message)
        elif isinstance(token, Exception):
            logger.error("sampling a token failed: %s", token)
            self._end(sequence.job.request.request_id, f"sampling failed: {token}", "internal")
        else:
            self._emit(sequence, token)

    def _settle_late(self, sequences: list[DecodeSequence], hidden: torch.Tensor) -> None:
        """Those whose grammar is not ready wait beside the loop, with their hidden state; a request whose grammar cannot be used ends."""
        guided = [(index, sequence, sequence.guide) for index, sequence in enumerate(sequences) if sequence.guide is not None]
        wait_until_ready((guide for _, _, guide in guided), self._mask_grace_s)
        for index, sequence, guide in guided:
            if sequence.request.request_id not in self._sequences:
                continue
            if not guide.is_ready:
                self._late[sequence.request.request_id] = (sequence, hidden[index].clone(), self.clock.now_s() + GRAMMAR_TIMEOUT_S)
                guide.when_ready(partial(self.post, partial(self._take_late, sequence)))
                continue
            # It may have been late and then, preempted, come here again: one token for each mask.
            self._late.pop(sequence.request.request_id, None)
            try:
                _ = guide.mask
            except InvalidRequestError as error:
                self._refuse_grammar(sequence.job, error.message)
            except Exception as error:
                logger.exception("a grammar failed")
                self._end(sequence.job.request.request_id, f"its grammar failed: {reason_of(error)}", "internal")

    def _take_late(self, sequence: DecodeSequence) -> None:
        request = sequence.request
        held = self._late.pop(request.request_id, None)
        # Preempted since, and part of it computed again: its blocks have no room for one token more. It is sampled at the end of that.
        is_recomputing = request.request_id in self.engine.scheduler.running and request.num_uncomputed_tokens > 0
        if held is not None and not is_recomputing:
            self._committed.append((sequence, held[1]))

    def _refuse_grammar(self, job: DecodeJob, reason: str) -> None:
        param = "bad_words" if job.params.structured_output is None else job.params.structured_output.param
        self._end(job.request.request_id, f"the answer cannot go on: {reason}", "invalid_request", param)

    def _sample_alone(self, logits: torch.Tensor, row: SamplingRow) -> SampledToken | Exception:
        try:
            return sample(logits, [row])[0]
        except Exception as error:
            return error

    def _emit(self, sequence: DecodeSequence, token: SampledToken) -> None:
        job, request = sequence.job, sequence.request
        index = request.num_output_tokens
        request.token_ids.append(token.token_id)
        finish_reason, stop_token_id = self._finish_reason(sequence, token.token_id)
        self._send_token(job, RequestOutput(
            request_id=job.request.request_id,
            sequence_index=sequence.index,
            token_id=token.token_id,
            index=index,
            logprobs=token.logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=job.request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
        ))  # fmt: skip
        if finish_reason is not None:
            self._end_sequence(sequence)
        elif sequence.guide is not None:
            sequence.guide.push(token.token_id)

    def _send_token(self, job: DecodeJob, output: RequestOutput) -> None:
        self._counters["generation_tokens"] += 1
        if job.num_sent_tokens == 0:
            self._note_first_token(job)
        job.num_sent_tokens += 1
        self.rpc.send(job.router, output)

    def _end_without_token(self, job: DecodeJob) -> None:
        """Nothing was asked for but the prompt: one output for each of its answers, and the end."""
        self._note_first_token(job)
        request = job.request
        for sequence_index in range(job.num_sequences):
            self.rpc.send(job.router, RequestOutput(
                request_id=request.request_id,
                sequence_index=sequence_index,
                token_id=None,
                index=0,
                finish_reason="length",
                num_cached_tokens=request.num_cached_tokens or 0,
                num_preemptions=request.num_preemptions if sequence_index == 0 else 0,
            ))  # fmt: skip
        self._end(request.request_id, None)

    def _finish_reason(self, sequence: DecodeSequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        request, params = sequence.request, sequence.job.params
        if token_id in params.stop_token_ids:
            return "stop", token_id
        if token_id in sequence.job.eos_token_ids:
            return "stop", None
        if request.num_output_tokens >= params.max_tokens or request.num_tokens >= self.engine.max_model_len:
            return "length", None
        return None, None

    def _advance_beams(self, job: DecodeJob, search: BeamSearch) -> None:
        try:
            hypotheses = beam_group.advance(job, search, self._sequences)
        except InvalidRequestError as error:
            self._refuse_grammar(job, error.message)
            return
        except Exception as error:
            logger.exception("a step of a beam search failed")
            self._end(job.request.request_id, f"beam search failed: {reason_of(error)}", "internal")
            return
        if hypotheses is not None:
            with self.rpc.batch():
                for rank, hypothesis in enumerate(hypotheses):
                    self._send_hypothesis(job, rank, hypothesis)
            self._end(job.request.request_id, None)

    def _send_hypothesis(self, job: DecodeJob, rank: int, hypothesis: Hypothesis) -> None:
        last = len(hypothesis.token_ids) - 1
        for index, (token_id, logprobs) in enumerate(zip(hypothesis.token_ids, hypothesis.logprobs, strict=True)):
            self._send_token(job, RequestOutput(
                request_id=job.request.request_id,
                sequence_index=rank,
                token_id=token_id,
                index=index,
                logprobs=logprobs,
                finish_reason=hypothesis.finish_reason if index == last else None,
                stop_token_id=hypothesis.stop_token_id if index == last else None,
                num_cached_tokens=job.request.num_cached_tokens or 0,
                num_preemptions=job.num_all_preemptions if rank == 0 else 0,
            ))  # fmt: skip

    def _note_first_token(self, job: DecodeJob) -> None:
        job.first_token_ns = time.time_ns()
        reserved_ns = job.reserved_ns or job.received_ns
        telemetry.record_span(self.tracer, telemetry.SPAN_DECODE_QUEUE, job.traceparent, job.received_ns, reserved_ns)
        attributes = {"decode.num_local_prompt_tokens": job.num_local_prompt_tokens, "kv.recomputed": job.is_recomputed}
        telemetry.record_span(
            self.tracer, telemetry.SPAN_DECODE_FIRST_STEP, job.traceparent, job.started_ns, job.first_token_ns, attributes
        )

    # ---- engine thread: how a request ends ----------------------------------------------------------------------------
    def _end_sequence(self, sequence: DecodeSequence) -> None:
        """It gives its own blocks back at once; the request ends with its last sequence."""
        self._forget(sequence)
        if not sequence.job.sequences:
            self._end(sequence.job.request.request_id, None)

    def _forget(self, sequence: DecodeSequence) -> None:
        self._late.pop(sequence.request.request_id, None)
        self._sequences.end(sequence)

    def _abort_sequence(self, request_id: str, index: int) -> None:
        job = self._jobs.get(request_id)
        # The sequences of a beam search are not those that its client knows.
        if job is not None and job.beam_search is None and index in job.sequences and job.num_sent_tokens:
            self._end_sequence(job.sequences[index])

    def _end(self, request_id: str, failure: str | None, error_type: FailureType = "unavailable", param: str | None = None) -> None:
        """Forget a request, wherever it stands, and give its blocks back. `failure` None: it finished. Safe to call again."""
        with self._lock:
            job = self._jobs.pop(request_id, None)
            if job is None:
                return
            if job in self._reserve_queue:
                self._reserve_queue.remove(job)
        request = job.request
        if request.transfer_id is not None and self._by_transfer.pop(request.transfer_id, None) is not None:
            self._receiver.abort(request.transfer_id, failure or "finished")  # returns when no lane writes into our blocks
        self._forget_awaited(request)
        if job.prefix_pull is not None:
            self.prefixes.drop(job.prefix_pull, failure or "finished")
        for sequence in list(job.sequences.values()):
            self._forget(sequence)
        now_ns = time.time_ns()
        job.span.set_attributes(
            {
                "gen_ai.usage.output_tokens": job.num_sent_tokens,
                "decode.num_preemptions": job.num_all_preemptions,
                "decode.num_local_prompt_tokens": job.num_local_prompt_tokens,
                "decode.failure": failure or "",
            }
        )
        job.span.end(now_ns)
        if failure is not None:
            if not failure.startswith("aborted"):
                retryable = error_type == "unavailable" or (error_type == "internal" and job.num_sent_tokens == 0)
                self.rpc.send(job.router, RequestFailed(
                    request_id=request_id, message=failure, error_type=error_type, retryable=retryable, param=param
                ))  # fmt: skip
            return
        self.rpc.send(job.router, WorkerTiming(
            request_id=request_id,
            phase="decode",
            queue_ms=milliseconds(job.received_ns, job.reserved_ns or job.received_ns),
            compute_ms=milliseconds(job.started_ns, now_ns),
            num_computed_tokens=job.num_local_prompt_tokens + job.num_sent_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_steps=job.num_steps,
        ))  # fmt: skip

    def on_step_failed(self, output: SchedulerOutput, error: Exception) -> None:
        for job in {self._sequences[row.request.request_id].job for row in output.scheduled}:
            self._end(job.request.request_id, f"decode step failed: {reason_of(error)}", "internal")

    def fail_all(self, reason: str) -> None:
        for request_id in list(self._jobs):
            self._end(request_id, reason)

    def load(self) -> tuple[int, int, int]:
        num_running = len(self.engine.scheduler.running)
        return len(self._sequences) - num_running, num_running, self._sequences.num_uncomputed_tokens

    def service_counters(self) -> dict[str, float]:
        return {**self._counters}

    def close_transport(self) -> None:
        super().close_transport()
        self._grammars.close()
