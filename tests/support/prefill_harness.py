"""A prefill worker stepped by the test, and a request that goes from it to a decode worker: real engines and sockets, no Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from decode_harness import DecodeHarness
from opentelemetry.trace import NoOpTracer

from services.prefill.worker import PrefillWorker
from shared.config import Settings
from shared.ids import new_transfer_id
from shared.messages import KVPeer, PrefillRequest, WorkerMessage
from shared.model_files.model_source import ModelSource

SETTINGS: dict[str, Any] = {
    "block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 10, "num_threads": 1, "max_step_ms": 1e6, "kv_peer_timeout_s": 30.0,
}  # fmt: skip


@contextmanager
def prefill_worker(source: ModelSource, **settings: Any) -> Iterator[tuple[PrefillWorker, list[WorkerMessage]]]:
    """The worker, and what it sends to its router."""
    worker = PrefillWorker(source, Settings(**{**SETTINGS, **settings}), NoOpTracer())
    sent: list[WorkerMessage] = []
    worker.rpc.send = lambda _router, message: sent.append(message)  # type: ignore[method-assign]
    try:
        yield worker, sent
    finally:
        worker.fail_all("the test is over")
        worker.close_transport()
        worker.rpc._socket.close(0)
        worker.rpc._wake_receiver.close(0)
        worker.rpc.close()
        worker.engine.close()


def peer_of(decode: DecodeHarness) -> KVPeer:
    worker, receiver = decode.worker, decode.worker.prefixes.receiver
    return KVPeer(worker_id="d", ctrl_endpoint=receiver.ctrl_endpoint, incarnation=worker.incarnation, server_key=receiver.server_key)


def submit(decode: DecodeHarness, request_id: str, prompt: list[int], prefill: PrefillWorker | None, max_tokens: int = 12) -> None:
    """`prefill` None: decode computes the prompt."""
    transfer_id = new_transfer_id() if prefill is not None else None
    decode.submit(request_id, prompt, transfer_id=transfer_id, max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    if prefill is not None:
        assert transfer_id is not None
        message = PrefillRequest(
            request_id=request_id, transfer_id=transfer_id, token_ids=tuple(prompt), decode=peer_of(decode), deadline_s=60.0
        )
        prefill.accept(b"router", message)


def run(decode: DecodeHarness, prefill: PrefillWorker | None) -> None:
    """Until no request is left."""
    give_up_s = time.monotonic() + 120
    while decode.worker._jobs or (prefill is not None and prefill._jobs):
        assert time.monotonic() < give_up_s, "the request does not end"
        if prefill is not None:
            prefill._turn()
        decode.turn()


def answer(decode: DecodeHarness, request_id: str, prompt: list[int], prefill: PrefillWorker | None = None) -> list[int]:
    submit(decode, request_id, prompt, prefill)
    run(decode, prefill)
    [tokens] = decode.answers(request_id)
    return tokens
