"""A prefill worker that hands over groups of layers, and the decode worker it sends to: both real, over real sockets, in one process; on a
GPU in every combination of devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_harness import DecodeHarness
from prefill_harness import answer, prefill_worker, submit
from tiny_models import with_changes, write_tiny_hf

from services.prefill.worker import PrefillWorker
from shared.messages import RequestFailed, WorkerMessage
from shared.model_files.model_source import ModelSource, resolve_model

PROMPT = [(11 * i + 5) % 200 for i in range(43)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory, with_changes(num_layers=5))
    return resolve_model(str(directory))


@pytest.fixture
def prefill(source: ModelSource) -> Iterator[tuple[PrefillWorker, list[WorkerMessage]]]:
    with prefill_worker(source, kv_layer_groups=3) as worker_and_messages:
        yield worker_and_messages


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
        expected = answer(aggregated, "one", PROMPT)
        assert answer(decode, "two", PROMPT, worker) == expected
        assert decode.worker._counters["kv_recompute_fallbacks"] == 0
        # Ten tokens a step at most, cut to whole blocks.
        assert [blocks for blocks, _ in calls] == [blocks for blocks in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]) for _ in range(3)]
        assert {layers for _, layers in calls} == {(0, 2), (2, 2), (4, 1)}
        # The same prompt again finds its blocks cached here and there; one that shares its head sends cached blocks whole, then groups.
        assert answer(decode, "three", PROMPT, worker) == expected
        other = PROMPT[:21] + [3] * 9
        assert answer(decode, "four", other, worker) == answer(aggregated, "five", other)
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
        expected = answer(aggregated, "one", PROMPT)
        assert answer(decode, "two", PROMPT, worker) == expected, "decode computes the prompt itself"
        assert decode.worker._counters["kv_recompute_fallbacks"] == 1
        assert decode.num_used == 0
    assert worker.engine.manager.num_used() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("source_device", "target_device"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_tokens_are_the_same_whichever_side_computes_on_a_gpu(
    tmp_path: Path, source_device: str, target_device: str, transport: str
) -> None:
    write_tiny_hf(tmp_path, with_changes(num_layers=5, head_dim=32), head_dim=32)
    model = resolve_model(str(tmp_path))
    common = {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 32, "kv_transport": transport}
    prompt = PROMPT * 3
    other = prompt[:37] + [3] * 40
    with DecodeHarness(model, device="cpu", **common) as aggregated:
        expected = answer(aggregated, "one", prompt)
        expected_other = answer(aggregated, "other", other)
    with (
        prefill_worker(model, device=source_device, kv_layer_groups=2, kv_checksum_device="cuda", debug=True, **common) as (worker, sent),
        DecodeHarness(model, device=target_device, kv_checksum_device="cuda", **common) as decode,
    ):
        assert (worker.engine.device.type, decode.worker.engine.device.type) == (source_device, target_device)
        assert answer(decode, "two", prompt, worker) == expected
        assert answer(decode, "three", other, worker) == expected_other
        assert decode.worker._counters["kv_recompute_fallbacks"] == 0
        assert not [message for message in sent if isinstance(message, RequestFailed)]
        assert worker.engine.manager.num_used() == 0


def test_blocks_that_were_handed_over_stay_the_transfers_when_another_request_has_entered_the_same(source: ModelSource) -> None:
    """Of two equal prompts in one step the second's blocks are exchanged for the first's in the cache. Lanes may not have read them yet,
    and read them again for a chunk that was lost; were they free, what is read might be a third prompt's, and its checksum right."""
    with (
        prefill_worker(source, max_num_batched_tokens=128) as (worker, _),
        DecodeHarness(source) as first,
        DecodeHarness(source) as second,
    ):
        handed: list[int] = []
        worker._sender.send_blocks = lambda _transfer_id, blocks, layers=None: handed.extend(block_id for _, block_id in blocks)  # type: ignore[method-assign]
        for request_id, decode in (("one", first), ("two", second)):
            submit(decode, request_id, PROMPT, worker)
        give_up_s = time.monotonic() + 60
        while len(worker.engine.scheduler.waiting) < 2:
            assert time.monotonic() < give_up_s, "not granted"
            worker._drain_inbox()
            time.sleep(0.005)
        worker._turn()
        assert len(set(handed)) == 2 * 11 and len(worker._jobs) == 2
        assert all(worker.engine.manager.pool.blocks[block_id].ref_cnt > 0 for block_id in handed)
        worker.fail_all("the test is over")
        assert worker.engine.manager.num_used() == 0
        worker.engine.manager.check_invariants()
