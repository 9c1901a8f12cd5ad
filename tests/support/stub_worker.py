"""A worker without an engine: real ZeroMQ, real lease in a real Redis, scripted tokens. For tests of the router."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from shared.cache.redis_prefix_index import RedisPrefixIndexWriter
from shared.ids import new_incarnation
from shared.lease_keeper import LeaseKeeper
from shared.membership import WorkerRecord, WorkerStats
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    PrefillLost,
    PrefillRequest,
    PrefixPulled,
    PromptLogprobs,
    RequestFailed,
    RequestOutput,
    RouterMessage,
    SendPrefix,
    TokenLogprobs,
    WorkerMessage,
    decode_router_message,
    encode_batch,
)

EOS = 2
LEASE_S = 1.5
"""Of real workers, where nothing else is set."""


@dataclass
class _Job:
    identity: bytes
    request: DecodeRequest
    sequence_index: int
    due_s: float
    index: int = 0


@dataclass
class Script:
    """What a stub decode worker does with a request."""

    token_ids: Sequence[int] = (216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216, 33, 34, 28)
    repeats: bool = False
    """After the last token start again; otherwise end with EOS (or with "length" at max_tokens)."""
    first_delay_s: float = 0.0
    delay_s: float = 0.0
    stop_after: int | None = None
    """Say nothing more after this many tokens."""
    failure: Callable[[DecodeRequest | PrefillRequest], RequestFailed | None] = lambda request: None
    num_cached_tokens: int = 0
    variants: Sequence[Sequence[int]] = ()
    """Tokens of each sequence of a request; without them all say `token_ids`."""
    logprob_of: Mapping[int, float] = field(default_factory=dict)
    """Log-probabilities other than -0.5."""
    about_prompt: Callable[[DecodeRequest | PrefillRequest], list[WorkerMessage]] = lambda request: prompt_parts(request)
    """Sent when the request asks for the log-probabilities of a prompt that this worker computes."""
    about_prompt_delay_s: float = 0.0
    recomputes: bool = False
    """A decode worker whose transfers all fail."""
    pull_failure: str | None = None
    """Why prefixes from other workers do not come; None: they do."""


def prompt_parts(request: DecodeRequest | PrefillRequest, size: int = 4) -> list[WorkerMessage]:
    """All of them, `size` positions a message: -position, and as many alternatives as were asked for."""
    num_top = num_prompt_logprobs(request) or 0
    top_ids = tuple(range(100, 100 + num_top))
    entries = [
        TokenLogprobs(logprob=-position, rank=50, top_token_ids=top_ids, top_logprobs=tuple(-0.5 - rank for rank in range(num_top)))
        for position in range(1, len(request.token_ids))
    ]
    return [
        PromptLogprobs(request_id=request.request_id, first_position=start + 1, entries=tuple(entries[start : start + size]))
        for start in range(0, len(entries), size)
    ]


def num_prompt_logprobs(request: DecodeRequest | PrefillRequest) -> int | None:
    """None: not asked for, or another worker's business."""
    if isinstance(request, PrefillRequest):
        return request.num_prompt_logprobs
    return request.sampling.num_prompt_logprobs if request.transfer_id is None else None


class StubWorker:
    def __init__(
        self,
        role: str,
        name: str,
        redis_url: str,
        fingerprint: str,
        namespace: str,
        script: Script | None = None,
        lease_s: float = 10.0,
        **record: object,
    ) -> None:
        """A real lease is LEASE_S; one that nobody asks about is longer, for here the router and all workers share one process."""
        self.role, self.name = role, name
        self.script = script or Script()
        self.incarnation = new_incarnation()
        self.received: list[RouterMessage] = []
        self.stats = WorkerStats(num_running=1, counters={"chunks_sent": 7})
        self._jobs: dict[tuple[str, int], _Job] = {}  # one for each sequence
        self._later: list[tuple[float, bytes, WorkerMessage]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._record = {
            "worker_id": name, "role": role, "incarnation": self.incarnation, "rpc_endpoint": f"tcp://127.0.0.1:{port}",
            "kv_ctrl_endpoint": "tcp://127.0.0.1:1" if role == "decode" else None, "model_name": "stub", "model_fingerprint": fingerprint,
            "dtype": "float32", "block_size": 16, "num_blocks": 1024, "max_model_len": 8192, "vocab_size": 49152, **record,
        }  # fmt: skip
        self.index = RedisPrefixIndexWriter(namespace, name, self.incarnation)
        self._keeper = LeaseKeeper(redis_url, namespace, self._make_record, lease_s, self.index)
        self._stopping = threading.Event()
        self._frozen = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._keeper.start()

    def _make_record(self) -> WorkerRecord:
        while self._frozen and not self._stopping.is_set():
            time.sleep(0.01)
        return WorkerRecord(**self._record, stats=self.stats)

    def freeze(self) -> None:
        """As SIGSTOP: the connection stays, nothing is answered, the lease is not renewed."""
        self._frozen = True

    def lose_redis(self) -> None:
        """It can renew its lease no longer; all else goes on."""
        self._keeper._is_closing.set()
        self._keeper._deregister = lambda: None

    def kill(self) -> None:
        """As SIGKILL: the connection breaks, the record stays until its lease runs out."""
        self._frozen = True
        self._stopping.set()
        self._keeper._is_closing.set()
        self._keeper._deregister = lambda: None
        self._thread.join(2)

    def close(self) -> None:
        self._stopping.set()
        self._keeper.close()
        self._thread.join(2)

    def of_kind(self, kind: type[RouterMessage]) -> list[RouterMessage]:
        return [message for message in self.received if isinstance(message, kind)]

    def aborted(self) -> set[str]:
        return {message.request_id for message in self.received if isinstance(message, AbortRequest) and message.sequence_index is None}

    @property
    def num_active(self) -> int:
        return len(self._jobs)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(2 if self._jobs or self._later else 20):
                identity, frame = self._socket.recv_multipart()
                if not self._frozen:
                    self._take(identity, decode_router_message(frame))
            if not self._frozen:
                self._emit()
        self._socket.close(0)
        self._context.term()

    def _take(self, identity: bytes, message: RouterMessage) -> None:
        self.received.append(message)
        if isinstance(message, AbortRequest):
            for key in [key for key in self._jobs if key[0] == message.request_id and message.sequence_index in (None, key[1])]:
                del self._jobs[key]
            return
        if isinstance(message, PrefillLost | SendPrefix):
            return
        failure = self.script.failure(message)
        if failure is not None:
            self._send(identity, failure)
            return
        if message.prefix_pull is not None:
            self._send(identity, PrefixPulled(request_id=message.request_id, failure=self.script.pull_failure))
        if num_prompt_logprobs(message) is not None or (self.script.recomputes and message.sampling.num_prompt_logprobs is not None):
            due_s = time.monotonic() + self.script.about_prompt_delay_s
            self._later += [(due_s, identity, part) for part in self.script.about_prompt(message)]
        if isinstance(message, DecodeRequest):
            for index in range(message.num_sequences):
                self._jobs[message.request_id, index] = _Job(identity, message, index, time.monotonic() + self.script.first_delay_s)

    def _emit(self) -> None:
        now_s = time.monotonic()
        due = [item for item in self._later if item[0] <= now_s]
        self._later = [item for item in self._later if item[0] > now_s]
        for _, identity, message in due:
            self._send(identity, message)
        for key, job in list(self._jobs.items()):
            if job.due_s > now_s or (self.script.stop_after is not None and job.index >= self.script.stop_after):
                continue
            job.due_s = now_s + self.script.delay_s
            output = self._next(job)
            self._send(job.identity, output)
            if output.finish_reason:
                del self._jobs[key]

    def _next(self, job: _Job) -> RequestOutput:
        sampling, index = job.request.sampling, job.index
        if sampling.max_tokens == 0:
            return RequestOutput(
                request_id=job.request.request_id, sequence_index=job.sequence_index, token_id=None, index=0, finish_reason="length"
            )
        tokens = self.script.variants[job.sequence_index] if self.script.variants else self.script.token_ids
        token_id = tokens[index % len(tokens)] if self.script.repeats or index < len(tokens) else EOS
        reason = "length" if index + 1 == sampling.max_tokens else None
        stop_token_id = None
        if token_id in sampling.stop_token_ids:
            reason, stop_token_id = "stop", token_id
        elif token_id == EOS and not sampling.ignore_eos:
            reason = "stop"
        logprobs = None
        if sampling.num_logprobs is not None:
            top = [token_id, *(other for other in range(100, 120) if other != token_id)][: sampling.num_logprobs]
            logprobs = TokenLogprobs(
                logprob=self.script.logprob_of.get(token_id, -0.5),
                rank=1,
                top_token_ids=tuple(top),
                top_logprobs=tuple(-0.5 - rank for rank in range(len(top))),
            )
        job.index += 1
        return RequestOutput(
            request_id=job.request.request_id, sequence_index=job.sequence_index, token_id=token_id, index=index,
            logprobs=logprobs, finish_reason=reason, stop_token_id=stop_token_id,
            num_cached_tokens=self.script.num_cached_tokens,
        )  # fmt: skip

    def _send(self, identity: bytes, message: WorkerMessage) -> None:
        for frame in encode_batch([message]):
            self._socket.send_multipart([identity, frame])
