"""One engine request from route to last token: choose workers, tell both, hand on tokens, try elsewhere while nothing was shown.

Every attempt has a request id of its own, so a late token of an attempt that was given up can never be taken for another's.
Whatever ends an attempt, both workers are told to forget it unless decode reported the end itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Tracer

from services.router.broken_pairs import BrokenPairs
from services.router.mailbox import Mailbox
from services.router.metrics import RouterMetrics
from services.router.openai.prompt_logprobs import PromptLogprobsAssembler
from services.router.policy import Candidate, RequestFacts, Route, select
from services.router.worker_client import WorkerGone
from services.router.workers import Worker, WorkerDirectory
from shared.block_hash import BlockHash, encode_extra_keys, hash_full_blocks
from shared.cache.prefix_index import Holder, Overlap, PrefixIndexReader
from shared.clock import SystemClock
from shared.config import Settings
from shared.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    PagewireError,
    TransferError,
    UnavailableError,
    WorkerFailedError,
)
from shared.ids import new_transfer_id
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    PrefillLost,
    PrefillRequest,
    PrefixPull,
    PrefixPulled,
    PromptLogprobs,
    RequestFailed,
    RequestOutput,
    SendPrefix,
    WorkerMessage,
)
from shared.sampling_params import BeamSearchParams, SamplingParams
from shared.telemetry import SPAN_ROUTE, start_span
from shared.transport.protocol.kv_format import KVFormat

WORKER_WAIT_S = 5.0
"""How long a request whose worker died waits for another one to appear."""
_WAIT_STEP_S = 0.05
PREFIX_HOLD_S = 3.0
"""How long a holder keeps a prefix for a worker that has no room for it yet."""
_RETRY_BACKOFF_S = 0.05
_ERROR_CLASSES: dict[str, type[PagewireError]] = {
    "invalid_request": InvalidRequestError,
    "overloaded": OverloadedError,
    "deadline": DeadlineExceededError,
    "transfer": TransferError,
}


@dataclass(frozen=True)
class Prompt:
    """Token ids and what else the KV depends on; hashed once for all attempts."""

    token_ids: tuple[int, ...]
    cache_salt: str | None
    _hashes: dict[bytes, list[BlockHash]] = field(default_factory=dict)

    def hashes(self, root: BlockHash, block_size: int) -> list[BlockHash]:
        if root not in self._hashes:
            self._hashes[root] = hash_full_blocks(root, self.token_ids, block_size, encode_extra_keys(self.cache_salt))
        return self._hashes[root]


@dataclass(frozen=True)
class EngineRequest:
    """All answers to one prompt. `deadline_s` is on the event loop's clock."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    priority: int
    traceparent: str
    deadline_s: float
    num_sequences: int = 1
    beam_search: BeamSearchParams | None = None
    prompt_logprobs: PromptLogprobsAssembler | None = None
    """Where they are gathered if `sampling.num_prompt_logprobs` asks for them; complete before the first output."""

    @property
    def max_num_sequences(self) -> int:
        """How many decode works on at a time."""
        return self.num_sequences if self.beam_search is None else self.beam_search.width


class _Deadline:
    """Put in the mailbox when time is up."""


@dataclass(frozen=True)
class _PrefillRefused:
    error: PagewireError


@dataclass(frozen=True)
class _PrefillEnded:
    """The prefill worker will say nothing more about this request. `failure`: its KV will not come, and why."""

    failure: str | None = None
    is_gone: bool = False
    """The worker, not this transfer alone."""


Mail = WorkerMessage | WorkerGone | _PrefillRefused | _PrefillEnded | _Deadline


class _RetryableFailure(Exception):
    def __init__(self, error: PagewireError, avoid: Holder) -> None:
        super().__init__(error.message)
        self.error = error
        self.avoid = avoid


@dataclass(frozen=True)
class _Pair:
    route: Route
    decode: Worker
    prefill: Worker | None
    prefix_holder: Worker | None
    """Who has what `route.pull` wants."""

    @property
    def computing(self) -> Worker:
        """Who computes the prompt."""
        return self.prefill or self.decode


class Dispatcher:
    def __init__(
        self,
        directory: WorkerDirectory,
        index: PrefixIndexReader,
        metrics: RouterMetrics,
        tracer: Tracer,
        settings: Settings,
        model_fingerprint: str,
    ) -> None:
        self._directory = directory
        self._index = index
        self._metrics = metrics
        self._tracer = tracer
        self._settings = settings
        self._model_fingerprint = model_fingerprint
        self._broken_pairs = BrokenPairs(SystemClock())

    async def generate(self, request: EngineRequest, has_ended: Callable[[int], bool]) -> AsyncGenerator[RequestOutput, None]:
        """Tokens of all sequences, each sequence in order, its last with a finish_reason. `has_ended(sequence_index)` is asked after each
        token: True ends that sequence here and at decode, as a stop string does. Closing the generator aborts the request everywhere.

        Raises InvalidRequestError, OverloadedError, UnavailableError, DeadlineExceededError; WorkerFailedError also in mid-stream.
        """
        avoid: set[Holder] = set()
        attempt = 0
        last_error: PagewireError | None = None
        while True:
            pair = await self._route(request, avoid, last_error)
            has_started = False
            attempt_id = request.request_id if attempt == 0 else f"{request.request_id}-r{attempt}"
            outputs = self._attempt(request, attempt_id, attempt, pair, has_ended)
            try:
                async for output in outputs:
                    has_started = True
                    yield output
                return
            except _RetryableFailure as failure:
                if has_started:
                    raise WorkerFailedError(f"the answer broke off: {failure.error.message}") from failure
                if attempt >= self._settings.max_retries:
                    raise failure.error from failure
                avoid.add(failure.avoid)
                last_error = failure.error
            finally:
                await outputs.aclose()
            attempt += 1
            self._metrics.retries.inc()
            await asyncio.sleep(_RETRY_BACKOFF_S * attempt)

    async def _route(self, request: EngineRequest, avoid: set[Holder], last_error: PagewireError | None) -> _Pair:
        """The pair for the next attempt. After a failure, waits up to WORKER_WAIT_S for a worker when none is left."""
        loop = asyncio.get_running_loop()
        give_up_s = min(request.deadline_s, loop.time() + (WORKER_WAIT_S if last_error is not None else 0.0))
        while True:
            pair = await self._choose(request, avoid, last_error)
            if pair is not None:
                return pair
            if isinstance(last_error, OverloadedError):
                raise last_error
            if loop.time() >= give_up_s:
                raise self._no_workers() from last_error
            await asyncio.sleep(_WAIT_STEP_S)

    def _no_workers(self) -> UnavailableError:
        missing = [role for role in self._directory.required_roles if not self._directory.usable(role)]
        what = " and no ".join(missing) if missing else "suitable"
        return UnavailableError(f"no {what} worker is ready; try again shortly", retry_after_s=1.0)

    async def _choose(self, request: EngineRequest, avoid: set[Holder], last_error: PagewireError | None) -> _Pair | None:
        is_aggregated = self._settings.aggregated
        prefill, decode = [] if is_aggregated else self._directory.usable("prefill"), self._directory.usable("decode")
        if not decode:
            return None
        span = start_span(self._tracer, SPAN_ROUTE, request.traceparent)
        try:
            facts = RequestFacts(
                len(request.prompt.token_ids),
                self._settings.local_prefill_max_tokens,
                is_aggregated,
                is_scored=request.sampling.num_prompt_logprobs is not None,
            )
            overlap = await self._overlap([*prefill, *decode], request.prompt)
            # Those that failed this request are a second choice, except a full one: there it would only wait in the wrong place.
            is_strict = isinstance(last_error, OverloadedError)
            by_id: dict[Holder, Worker] = {worker.holder: worker for worker in (*prefill, *decode)}
            route = select(
                facts,
                _candidates(prefill, overlap, avoid, is_strict),
                _candidates(decode, overlap, avoid, is_strict),
                self._broken_pairs.avoided(),
            )
            if route is None:
                return None
            self._metrics.count_route("local" if route.is_local else "remote")
            span.set_attributes(
                {
                    "pagewire.route.prefill": route.prefill.worker_id if route.prefill else "",
                    "pagewire.route.decode": route.decode.worker_id,
                    "pagewire.route.is_local": route.is_local,
                    "pagewire.route.prefill_overlap_blocks": route.prefill_overlap_blocks,
                    "pagewire.route.decode_overlap_blocks": route.decode_overlap_blocks,
                    "pagewire.route.predicted_ms": route.predicted_ms,
                    "pagewire.route.num_prompt_blocks": facts.num_blocks(route.decode),
                    "pagewire.route.prefix_holder": route.pull.holder.worker_id if route.pull else "",
                    "pagewire.route.pull_blocks": route.pull.num_blocks if route.pull else 0,
                }
            )
            decode_worker = by_id[route.decode.identity]
            prefill_worker = by_id[route.prefill.identity] if route.prefill else None
            return _Pair(route, decode_worker, prefill_worker, by_id[route.pull.holder.identity] if route.pull else None)
        finally:
            span.end()

    async def _overlap(self, workers: Sequence[Worker], prompt: Prompt) -> dict[Holder, Overlap]:
        """What each worker has of the prompt, in blocks of its own size. One round trip for each format there is, all at once."""
        by_format: dict[KVFormat, list[Holder]] = {}
        for worker in workers:
            by_format.setdefault(worker.kv_format, []).append(worker.holder)
        lookups = [self._index.match(holders, self._hashes(prompt, kv_format)) for kv_format, holders in by_format.items()]
        return {holder: overlap for found in await asyncio.gather(*lookups) for holder, overlap in found.items()}

    def _hashes(self, prompt: Prompt, kv_format: KVFormat) -> list[BlockHash]:
        """Of the blocks that can be of use: without one that holds the last token."""
        num_blocks = (len(prompt.token_ids) - 1) // kv_format.block_size
        return prompt.hashes(kv_format.root(self._model_fingerprint), kv_format.block_size)[:num_blocks]

    async def _attempt(
        self, request: EngineRequest, request_id: str, attempt: int, pair: _Pair, has_ended: Callable[[int], bool]
    ) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        mailbox: Mailbox[Mail] = Mailbox()
        timer = loop.call_at(request.deadline_s, mailbox.put, _Deadline())
        decode, prefill = pair.decode, pair.prefill
        decode.client.register(request_id, mailbox.put)
        if prefill is not None:
            prefill_worker = prefill
            prefill.client.register(request_id, lambda mail: self._note_prefill(prefill_worker, request_id, mail, mailbox))
        self._count_load(request, request_id, pair)
        num_tokens = [0] * request.num_sequences
        has_first_token = False
        max_mails = _max_mails(request)
        live = set(range(request.num_sequences))
        is_finished = False
        held: list[RequestOutput] = []  # until the prompt's log-probabilities are complete
        has_prefill_ended = prefill is None
        has_transfer_failed = False
        try:
            self._send(request, request_id, attempt, pair)
            while held or live:
                mail = await mailbox.get()
                if isinstance(mail, RequestOutput):
                    index = mail.sequence_index
                    if index not in live and index < request.num_sequences:
                        continue  # its end here and this token crossed
                    if index not in live or mail.index != num_tokens[index] or len(mailbox) > max_mails:
                        message = f"decode worker sent token {mail.index} of sequence {index}, which was not due"
                        raise _RetryableFailure(WorkerFailedError(message), decode.holder)
                    if prefill is not None and not has_first_token:
                        prefill.release(request_id)
                        if not has_transfer_failed:
                            self._broken_pairs.note_success((prefill.holder, decode.holder))
                    has_first_token = True
                    num_tokens[index] += 1
                    if mail.finish_reason is not None:
                        live.remove(index)
                        is_finished = not live
                        self._metrics.preemptions.inc(mail.num_preemptions)
                    held.append(mail)
                elif isinstance(mail, PromptLogprobs):
                    if request.prompt_logprobs is not None:
                        request.prompt_logprobs.add(mail)
                elif isinstance(mail, PrefixPulled):
                    self._note_pull(pair, mail)
                elif isinstance(mail, _PrefillEnded):
                    has_prefill_ended = True
                    if mail.failure is not None and prefill is not None:
                        has_transfer_failed = True
                        if not mail.is_gone:
                            self._broken_pairs.note_failure((prefill.holder, decode.holder), mail.failure)
                        if not has_first_token:
                            decode.client.send(PrefillLost(request_id=request_id, reason=mail.failure))
                elif isinstance(mail, RequestFailed):
                    error = _as_error(mail)
                    if mail.retryable:
                        raise _RetryableFailure(error, decode.holder)
                    raise error
                elif isinstance(mail, WorkerGone):
                    raise _RetryableFailure(WorkerFailedError(mail.reason, retry_after_s=1.0), decode.holder)
                elif isinstance(mail, _PrefillRefused):
                    if not has_first_token:
                        raise _RetryableFailure(mail.error, pair.computing.holder)
                elif isinstance(mail, _Deadline):
                    raise DeadlineExceededError(f"the request did not finish within {self._settings.request_timeout_s:g} s")
                if request.prompt_logprobs is None or request.prompt_logprobs.is_complete:
                    while held:
                        output = held.pop(0)
                        yield output
                        index = output.sequence_index
                        if not has_ended(index):
                            continue
                        # Of those held, some may lie behind the stop string, the sequence's own last one among them.
                        held = [other for other in held if other.sequence_index != index]
                        if index in live:
                            live.remove(index)
                            if live:
                                abort = AbortRequest(request_id=request_id, sequence_index=index, reason="a stop string was found")
                                decode.client.send(abort)
                elif held and has_prefill_ended:
                    raise _RetryableFailure(
                        WorkerFailedError("the prompt's log-probabilities were lost with a worker"), pair.computing.holder
                    )
        finally:
            timer.cancel()
            for worker in (decode, prefill):
                if worker is None:
                    continue
                worker.release(request_id)
                worker.client.unregister(request_id)
                if not is_finished:
                    worker.client.send(AbortRequest(request_id=request_id, reason="the router no longer waits for it"))

    def _note_pull(self, pair: _Pair, mail: PrefixPulled) -> None:
        if pair.prefix_holder is None:
            return
        between = pair.prefix_holder.holder, pair.computing.holder
        if mail.failure is None:
            self._broken_pairs.note_success(between)
        else:
            self._broken_pairs.note_failure(between, mail.failure)

    def _count_load(self, request: EngineRequest, request_id: str, pair: _Pair) -> None:
        if pair.prefill is not None:
            pair.decode.assign(request_id, 0)
        num_tokens = len(request.prompt.token_ids) - pair.route.num_saved_tokens
        pair.computing.assign(request_id, num_tokens)

    def _send(self, request: EngineRequest, request_id: str, attempt: int, pair: _Pair) -> None:
        """Decode first: it reserves while the other message is still on its way. Neither waits for the other."""
        transfer_id = new_transfer_id() if pair.prefill is not None else None
        left_s = max(0.0, request.deadline_s - asyncio.get_running_loop().time())
        prefix_pull = self._ask_for_prefix(request, pair, left_s)
        decode_request = DecodeRequest(
            request_id=request_id,
            transfer_id=transfer_id,
            attempt=attempt,
            token_ids=request.prompt.token_ids,
            sampling=request.sampling,
            num_sequences=request.num_sequences,
            beam_search=request.beam_search,
            cache_salt=request.prompt.cache_salt,
            prefix_pull=prefix_pull if pair.prefill is None else None,
            deadline_s=left_s,
            priority=request.priority,
            traceparent=request.traceparent,
        )
        if not pair.decode.client.send(decode_request):
            raise _RetryableFailure(WorkerFailedError("the decode worker takes no messages"), pair.decode.holder)
        if pair.prefill is None or transfer_id is None:
            return
        prefill_request = PrefillRequest(
            request_id=request_id,
            transfer_id=transfer_id,
            attempt=attempt,
            token_ids=request.prompt.token_ids,
            cache_salt=request.prompt.cache_salt,
            decode=pair.decode.kv_peer,
            deadline_s=left_s,
            num_prompt_logprobs=request.sampling.num_prompt_logprobs,
            prefix_pull=prefix_pull,
            priority=request.priority,
            traceparent=request.traceparent,
        )
        if not pair.prefill.client.send(prefill_request):
            raise _RetryableFailure(WorkerFailedError("the prefill worker takes no messages"), pair.prefill.holder)

    def _ask_for_prefix(self, request: EngineRequest, pair: _Pair, left_s: float) -> PrefixPull | None:
        """Before anyone waits for it; None also when the holder takes no messages."""
        pull = pair.route.pull
        if pull is None or pair.prefix_holder is None:
            return None
        wanted = PrefixPull(transfer_id=new_transfer_id(), num_blocks=pull.num_blocks, timeout_s=pull.timeout_s)
        hashes = self._hashes(request.prompt, pair.computing.kv_format)
        message = SendPrefix(
            transfer_id=wanted.transfer_id,
            block_hashes=tuple(block_hash.hex() for block_hash in hashes[: pull.num_blocks]),
            peer=pair.computing.kv_peer,
            deadline_s=min(left_s, PREFIX_HOLD_S + pull.timeout_s),
            traceparent=request.traceparent,
        )
        return wanted if pair.prefix_holder.client.send(message) else None

    def _note_prefill(self, worker: Worker, request_id: str, mail: WorkerMessage | WorkerGone, mailbox: Mailbox[Mail]) -> None:
        """News from prefill. Decode is told what it may not know: a prefill worker that cannot reach it cannot say so. What decode says
        counts; but of a request that prefill did not take in at all, decode would hear nothing."""
        if isinstance(mail, PromptLogprobs | PrefixPulled):
            mailbox.put(mail)
            return
        worker.release(request_id)
        if isinstance(mail, RequestFailed) and mail.error_type in ("overloaded", "unavailable", "invalid_request"):
            mailbox.put(_PrefillRefused(_as_error(mail)))
        elif isinstance(mail, RequestFailed):
            mailbox.put(_PrefillEnded(mail.message))
        else:
            mailbox.put(_PrefillEnded(mail.reason, is_gone=True) if isinstance(mail, WorkerGone) else _PrefillEnded())


def _max_mails(request: EngineRequest) -> int:
    """More than this in the mailbox is not what was asked for. Parts of the prompt's log-probabilities may come twice."""
    num_parts = 0 if request.prompt_logprobs is None else 2 * len(request.prompt.token_ids)
    return request.num_sequences * (request.sampling.max_tokens + 2) + num_parts + 4


def _candidates(workers: Sequence[Worker], overlap: dict[Holder, Overlap], avoid: set[Holder], is_strict: bool) -> list[Candidate]:
    preferred = [worker for worker in workers if worker.holder not in avoid]
    chosen = preferred if preferred or is_strict else workers
    return [worker.candidate(overlap.get(worker.holder, Overlap())) for worker in chosen]


def _as_error(failure: RequestFailed) -> PagewireError:
    error_class = _ERROR_CLASSES.get(failure.error_type, WorkerFailedError)
    retry_after_s = failure.retry_after_s
    if retry_after_s is None and error_class is OverloadedError:
        retry_after_s = 1.0
    return error_class(failure.message, param=failure.param, retry_after_s=retry_after_s)
