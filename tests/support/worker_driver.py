"""Speaks to the real workers of a LocalStack as a router does, but sends each request where the test wants it."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from types import TracebackType

import psutil
import redis
import zmq
from local_stack import LocalStack

from shared.block_hash import BlockHash, encode_extra_keys, hash_full_blocks
from shared.cache.prefix_index import Tier
from shared.ids import new_transfer_id
from shared.membership import WorkerRecord, blocks_key, parse_record, worker_key
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    KVPeer,
    PrefillRequest,
    PrefixPull,
    RequestFailed,
    RequestOutput,
    RouterMessage,
    SendPrefix,
    WorkerTiming,
    decode_batch,
    encode,
)
from shared.sampling_params import SamplingParams
from shared.transport.protocol.kv_format import KVFormat

_numbers = itertools.count()


@dataclass
class Answer:
    """What the workers said of one request so far."""

    request_id: str
    prompt: list[int]
    outputs: list[RequestOutput] = field(default_factory=list)
    timings: dict[str, WorkerTiming] = field(default_factory=dict)
    failures: list[RequestFailed] = field(default_factory=list)
    sent_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.outputs[0].num_cached_tokens

    @property
    def is_complete(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    def as_choice(self) -> dict[str, object]:
        """As plain_run.assert_equals_plain_run wants it."""
        tops = []
        for output in self.outputs:
            assert output.logprobs is not None
            pairs = zip(output.logprobs.top_token_ids, output.logprobs.top_logprobs, strict=True)
            tops.append({f"token_id:{token_id}": logprob for token_id, logprob in pairs})
        token_ids = [output.token_id for output in self.outputs]
        return {"prompt_token_ids": self.prompt, "token_ids": token_ids, "logprobs": {"top_logprobs": tops}}


class WorkerDriver:
    """Not thread-safe. Use as a context manager."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._redis = redis.Redis.from_url(psutil.Process(stack.pid("router")).environ()["REDIS_URL"])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, tuple[int, zmq.Socket[bytes]]] = {}
        self._answers: dict[str, Answer] = {}

    def __enter__(self) -> WorkerDriver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for _, sock in self._sockets.values():
            sock.close(0)
        self._context.term()
        self._redis.close()

    def record(self, worker: str, timeout_s: float = 120.0) -> WorkerRecord:
        """As it stands in Redis; waits for a worker that is starting."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            value = self._redis.get(worker_key("pagewire", worker))
            record = parse_record(value) if value is not None else None
            if record is not None:
                return record
            time.sleep(0.05)
        raise AssertionError(f"{worker} has no record")

    def wait_for_counter(self, worker: str, name: str, value: float) -> None:
        """Statistics travel with the lease."""

        def now() -> float:
            return self.record(worker).stats.counters[name]

        self._stack.wait_until(lambda: now() == value, describe=lambda: f"{worker}: {name} is {now()}, not {value}")

    def peer(self, worker: str) -> KVPeer:
        record = self.record(worker)
        assert record.kv_ctrl_endpoint is not None
        return KVPeer(
            worker_id=worker, ctrl_endpoint=record.kv_ctrl_endpoint, incarnation=record.incarnation, server_key=record.kv_server_key
        )

    def send(self, worker: str, message: RouterMessage) -> None:
        self._socket(worker).send(encode(message))

    def ask_for_prefix(
        self, holder: str, puller: str, prompt: list[int], num_blocks: int, timeout_s: float = 30.0, cache_salt: str | None = None
    ) -> PrefixPull:
        """What the router does before it sends the request."""
        hashes = self._hashes(self.record(holder), prompt, cache_salt)[:num_blocks]
        assert len(hashes) == num_blocks
        pull = PrefixPull(transfer_id=new_transfer_id(), num_blocks=num_blocks, timeout_s=timeout_s)
        self.send(holder, SendPrefix(
            transfer_id=pull.transfer_id, block_hashes=tuple(block_hash.hex() for block_hash in hashes), peer=self.peer(puller),
            deadline_s=20.0,
        ))  # fmt: skip
        return pull

    def tiers(self, worker: str, prompt: list[int], cache_salt: str | None = None) -> list[Tier | None]:
        """Where the index says that it has the full blocks of a prompt."""
        record = self.record(worker)
        hashes = self._hashes(record, prompt, cache_salt)
        values = self._redis.hmget(blocks_key("pagewire", worker, record.incarnation), hashes)
        return [None if value is None else Tier(value) for value in values]

    @staticmethod
    def _hashes(record: WorkerRecord, prompt: list[int], cache_salt: str | None) -> list[BlockHash]:
        root = KVFormat(record.dtype, record.block_size, record.kv_wire_dtype).root(record.model_fingerprint)
        return hash_full_blocks(root, prompt, record.block_size, encode_extra_keys(cache_salt))

    def start(
        self,
        prompt: list[int],
        prefill: str | None,
        decode: str,
        pull: PrefixPull | None = None,
        max_tokens: int = 4,
        deadline_s: float = 120.0,
        cache_salt: str | None = None,
    ) -> Answer:
        """`prefill` None: decode computes the prompt."""
        answer = Answer(f"driven-{next(_numbers)}", prompt)
        self._answers[answer.request_id] = answer
        transfer_id = new_transfer_id() if prefill is not None else None
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, num_logprobs=2)
        self.send(decode, DecodeRequest(
            request_id=answer.request_id, transfer_id=transfer_id, token_ids=tuple(prompt), sampling=sampling,
            prefix_pull=pull if prefill is None else None, deadline_s=deadline_s, cache_salt=cache_salt,
        ))  # fmt: skip
        if prefill is not None and transfer_id is not None:
            self.send(prefill, PrefillRequest(
                request_id=answer.request_id, transfer_id=transfer_id, token_ids=tuple(prompt), decode=self.peer(decode),
                prefix_pull=pull, deadline_s=deadline_s, cache_salt=cache_salt,
            ))  # fmt: skip
        return answer

    def abort(self, answer: Answer, *workers: str) -> None:
        for worker in workers:
            self.send(worker, AbortRequest(request_id=answer.request_id, reason="test"))

    def finish(self, answer: Answer, timeout_s: float = 120.0) -> Answer:
        """Until its last token is here."""
        deadline_s = time.monotonic() + timeout_s
        while not answer.is_complete:
            assert time.monotonic() < deadline_s, f"no answer within {timeout_s} s; failures: {answer.failures}"
            self.read(0.05)
        return answer

    def read(self, duration_s: float) -> None:
        """Take in what workers say, for at least one message or `duration_s`."""
        poller = zmq.Poller()
        for _, sock in self._sockets.values():
            poller.register(sock, zmq.POLLIN)
        for sock, _ in poller.poll(int(duration_s * 1000)):
            for message in decode_batch(sock.recv()):
                answer = self._answers.get(getattr(message, "request_id", ""))
                if answer is None:
                    continue
                if isinstance(message, RequestOutput):
                    answer.first_token_s = answer.first_token_s or time.monotonic() - answer.sent_s
                    answer.outputs.append(message)
                elif isinstance(message, WorkerTiming):
                    answer.timings[message.phase] = message
                elif isinstance(message, RequestFailed):
                    answer.failures.append(message)

    def _socket(self, worker: str) -> zmq.Socket[bytes]:
        """To the worker's present incarnation."""
        record = self.record(worker)
        incarnation, sock = self._sockets.get(worker, (0, None))
        if sock is None or incarnation != record.incarnation:
            if sock is not None:
                sock.close(0)
            sock = self._context.socket(zmq.DEALER)
            sock.connect(record.rpc_endpoint)
            self._sockets[worker] = (record.incarnation, sock)
        return sock
