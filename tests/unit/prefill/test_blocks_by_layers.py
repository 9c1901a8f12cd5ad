"""A prefill worker that hands over groups of layers, and the decode worker it sends to: both real, over real sockets, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decode_harness import DecodeHarness
from opentelemetry.trace import NoOpTracer
from tiny_models import with_changes, write_tiny_hf

from services.prefill.worker import PrefillWorker
from shared.config import Settings
from shared.ids import new_transfer_id
from shared.messages import KVPeer, PrefillRequest, RequestFailed, WorkerMessage
from shared.model_files.model_source import ModelSource, resolve_model

SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 10, "num_threads": 1, "max_step_ms": 1e6}
PROMPT = [(11 * i + 5) % 200 for i in range(43)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory, with_changes(num_layers=5))
    return resolve_model(str(directory))


@pytest.fixture
def prefill(source: ModelSource) -> Iterator[tuple[PrefillWorker, list[WorkerMessage]]]:
    worker = PrefillWorker(source, Settings(**SETTINGS, kv_layer_groups=3), NoOpTracer())
    sent: list[WorkerMessage] = []
    worker.rpc.send = lambda _router, message: sent.append(message)  # type: ignore[method-assign]
    yield worker, sent
    worker.fail_all("the test is over")
    worker.close_transport()
    worker.rpc._socket.close(0)
    worker.rpc._wake_receiver.close(0)
    worker.rpc.close()


def answer(decode: DecodeHarness, request_id: str, prefill: PrefillWorker | None = None, prompt: list[int] = PROMPT) -> list[int]:
    transfer_id = new_transfer_id() if prefill is not None else None
    decode.submit(request_id, prompt, transfer_id=transfer_id, max_tokens=12, ignore_eos=True, temperature=0.0)
    if prefill is not None:
        assert transfer_id is not None
        worker = decode.worker
        peer = KVPeer(
            worker_id="d", ctrl_endpoint=worker.kv_ctrl_endpoint() or "", incarnation=worker.incarnation, server_key=worker.kv_server_key()
        )
        prefill.accept(
            b"router",
            PrefillRequest(request_id=request_id, transfer_id=transfer_id, token_ids=tuple(prompt), decode=peer, deadline_s=60.0),
        )
    give_up_s = time.monotonic() + 30
    while decode.worker._jobs or (prefill is not None and prefill._jobs):
        assert time.monotonic() < give_up_s, "the request does not end"
        if prefill is not None:
            prefill._turn()
        decode.turn()
    [tokens] = decode.answers(request_id)
    return tokens


def test_tokens_equal_those_of_a_prompt_computed_where_it_is_decoded(
    source: ModelSource, prefill: tuple[PrefillWorker, list[WorkerMessage]]
) -> None:
    worker, sent = prefill
    calls: list[tuple[list[int], tuple[int, int] | None]] = []
    send = worker._sender.send_blocks

    def recorded(transfer_id: str, blocks: Any, layers: tuple[int, int] | None = None) -> None:
        calls.append(([index for index, _ in blocks], layers))
        send(transfer_id, blocks, layers)

    worker._sender.send_blocks = recorded  # type: ignore[method-assign]
    with DecodeHarness(source) as aggregated, DecodeHarness(source) as decode:
        expected = answer(aggregated, "one")
        assert answer(decode, "two", worker) == expected
        assert decode.worker._counters["kv_recompute_fallbacks"] == 0
        # Ten tokens a step at most, cut to whole blocks.
        assert [blocks for blocks, _ in calls] == [blocks for blocks in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]) for _ in range(3)]
        assert {layers for _, layers in calls} == {(0, 2), (2, 2), (4, 1)}
        # The same prompt again finds its blocks cached here and there; one that shares its head sends cached blocks whole, then groups.
        assert answer(decode, "three", worker) == expected
        other = PROMPT[:21] + [3] * 9
        assert answer(decode, "four", worker, other) == answer(aggregated, "five", prompt=other)
    assert not [message for message in sent if isinstance(message, RequestFailed)]
    assert worker.engine.manager.num_used() == 0


def test_a_step_that_fails_between_two_groups_gives_every_block_back(
    source: ModelSource, prefill: tuple[PrefillWorker, list[WorkerMessage]]
) -> None:
    worker, _ = prefill
    layer_cache, num_calls = worker.engine.cache.layer, 0

    def fails_once(index: int) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5 + 4:  # in the second step, after its first group has left
            raise RuntimeError("injected")
        return layer_cache(index)

    worker.engine.cache.layer = fails_once  # type: ignore[method-assign]
    with DecodeHarness(source) as aggregated, DecodeHarness(source) as decode:
        expected = answer(aggregated, "one")
        assert answer(decode, "two", worker) == expected, "decode computes the prompt itself"
        assert decode.worker._counters["kv_recompute_fallbacks"] == 1
        assert decode.num_used == 0
    assert worker.engine.manager.num_used() == 0
