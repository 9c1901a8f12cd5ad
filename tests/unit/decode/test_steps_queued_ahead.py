"""Steps that are queued while the one before runs: the same answers, no block given away that a step still uses, nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decode_harness import DecodeHarness
from tiny_models import TINY_CONFIG, write_tiny_hf

from shared.block_hash import BlockHash
from shared.cache.block_pool import BlockPool
from shared.cache.kv_cache_manager import KVCacheManager
from shared.engine.decode_batch import BlockTableRows, DecodeBatch
from shared.engine.overlapped_decode import LaunchedStep, OverlappedDecode
from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request

VOCAB = TINY_CONFIG.tokenizer_vocab_size


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory)
    return resolve_model(str(directory))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the steps that were queued behind another."""
    sizes: list[int] = []
    launch_next = OverlappedDecode.launch_next

    def noted(self: OverlappedDecode, step: LaunchedStep) -> LaunchedStep | None:
        following = launch_next(self, step)
        if following is not None:
            sizes.append(len(following.rows))
        return following

    monkeypatch.setattr(OverlappedDecode, "launch_next", noted)
    return sizes


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def answers(source: ModelSource, fields: list[dict[str, Any]], **settings: Any) -> list[Any]:
    with DecodeHarness(source, **settings) as decode:
        for i, (prompt, kind) in enumerate(zip(prompts(len(fields)), fields, strict=True)):
            decode.submit(f"r{i}", prompt, **kind)
        decode.run()
        assert decode.failures() == []
        assert decode.num_used == 0
        return [what_came(decode, f"r{i}") for i in range(len(fields))]


def what_came(decode: DecodeHarness, request_id: str) -> list[Any]:
    """Of each sequence; which of them comes first in a step is nobody's business."""
    outputs = sorted(decode.outputs(request_id), key=lambda o: o.sequence_index)
    return [(o.sequence_index, o.token_id, o.finish_reason, o.stop_token_id, o.logprobs) for o in outputs]


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_answers_are_those_of_one_step_after_another(source: ModelSource, batches: list[int], num_blocks: int) -> None:
    rng = random.Random(5)
    fields: list[dict[str, Any]] = [
        {
            "max_tokens": rng.randint(1, 25),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": i,
            "ignore_eos": rng.random() < 0.5,
            "num_logprobs": rng.choice([None, None, 2]),
            "stop_token_ids": tuple(rng.sample(range(VOCAB), 12)),
            "num_sequences": rng.choice([1, 1, 3]),
        }
        for i in range(14)
    ]
    one_by_one = answers(source, fields, num_blocks=num_blocks)
    assert batches == []
    assert answers(source, fields, num_blocks=num_blocks, async_scheduling=True) == one_by_one
    assert len(batches) > 10
    assert {o[2] for answer in one_by_one for o in answer} == {None, "length", "stop"}, "some request has to end before its length"


def test_no_row_is_computed_after_a_length_that_was_known(source: ModelSource, batches: list[int]) -> None:
    lengths = [3, 9, 9, 14]
    answers(source, [{"max_tokens": length, "temperature": 0.0, "ignore_eos": True} for length in lengths], async_scheduling=True)
    # The first token comes with the prompt's step, the second from the first step that is queued.
    assert sum(batches) == sum(length - 2 for length in lengths)


def test_blocks_of_an_aborted_request_are_free_when_the_step_that_uses_them_has_ended(source: ModelSource) -> None:
    with DecodeHarness(source, async_scheduling=True) as decode:
        decode.submit("stays", [5] * 9, max_tokens=30, ignore_eos=True)
        decode.submit("goes", [6] * 9, max_tokens=30, ignore_eos=True)
        for _ in range(4):
            decode.turn()
        manager = decode.worker.engine.manager
        held = set(manager.block_ids("goes"))
        decode.abort("goes")
        decode.worker._drain_inbox()
        assert not manager.holds("goes")
        retired = {block.block_id for block in manager.pool.retired}
        assert retired == held
        assert manager.pool.allocate(manager.pool.num_free) is not None, "the pool was not as free as it says"
        taken = {block.block_id for block in manager.pool.blocks if block.ref_cnt} - retired
        assert not taken & held
        manager.pool.free([block for block in manager.pool.blocks if block.block_id in taken - set(manager.block_ids("stays"))])
        decode.run()
        assert len(decode.answers("stays")[0]) == 30
        assert decode.num_used == 0


@pytest.mark.parametrize("num_good_steps", [0, 1, 5])
def test_a_step_that_fails_ends_its_requests_and_leaves_nothing(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, num_good_steps: int
) -> None:
    with DecodeHarness(source, async_scheduling=True) as decode:
        runner = decode.worker.engine.runner
        whole, calls = runner.decode, 0

        def fail_once(batch: DecodeBatch, previous: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == num_good_steps + 1:
                raise RuntimeError("injected")
            return whole(batch, previous)

        monkeypatch.setattr(runner, "decode", fail_once)
        decode.submit("a", [5] * 9, max_tokens=30, ignore_eos=True)
        decode.submit("b", [6] * 5, max_tokens=30, ignore_eos=True)
        decode.run()
        assert sorted(failure.request_id for failure in decode.failures()) == ["a", "b"]
        assert decode.num_used == 0
        decode.submit("c", [7] * 9, max_tokens=8, ignore_eos=True)
        decode.run()
        assert len(decode.answers("c")[0]) == 8
        assert decode.num_used == 0


@pytest.mark.parametrize("ends_by", ["an abort", "its last token"])
def test_a_step_that_fails_after_one_of_its_requests_has_ended_takes_only_the_others(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    with DecodeHarness(source, async_scheduling=True) as decode:
        decode.submit("goes", [5] * 9, max_tokens=30, temperature=0.0, ignore_eos=True)
        while len(decode.outputs("goes")) < 30:
            decode.turn()
        stop = next(token for token in decode.answers("goes")[0][4:] if token not in decode.answers("goes")[0][:4])
        decode.run()
        decode.sent.clear()
        fields = {"stop_token_ids": (stop,)} if ends_by == "its last token" else {}
        decode.submit("goes", [5] * 9, max_tokens=30, temperature=0.0, ignore_eos=True, **fields)
        decode.submit("stays", [6] * 5, max_tokens=30, temperature=0.0, ignore_eos=True)
        for _ in range(4):
            decode.turn()
        if ends_by == "an abort":
            decode.abort("goes")
            decode.worker._drain_inbox()
        else:
            while "goes" in decode.worker._jobs:
                decode.turn()
        launched = decode.worker._launched
        assert launched is not None and "goes" in {row.request.request_id for row in launched.output.scheduled}

        def fail(batch: DecodeBatch, previous: torch.Tensor | None = None) -> torch.Tensor:
            raise RuntimeError("injected")

        with monkeypatch.context() as patched:
            patched.setattr(decode.worker.engine.runner, "decode", fail)
            decode.run()
        assert [failure.request_id for failure in decode.failures()] == ["stays"]
        assert decode.num_used == 0
        decode.submit("next", [7] * 9, max_tokens=8, ignore_eos=True)
        decode.run()
        assert len(decode.answers("next")[0]) == 8


def test_a_worker_whose_device_is_broken_still_tells_its_clients(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = DecodeHarness(source, async_scheduling=True)
    worker = decode.worker
    monkeypatch.setattr(worker._lease, "start", lambda: None)
    monkeypatch.setattr(worker._lease, "close", lambda: None)
    decode.submit("a", [5] * 9, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        decode.turn()

    def broken(*_: object) -> None:
        raise RuntimeError("sticky device error")

    monkeypatch.setattr(worker.engine.runner, "decode", broken)
    monkeypatch.setattr(worker.engine.runner, "wait", broken)
    with pytest.raises(RuntimeError, match="sticky"):
        worker.run()
    assert [failure.request_id for failure in decode.failures()] == ["a"]
    assert decode.num_used == 0


def test_every_step_queued_ahead_may_store_what_it_evicts(source: ModelSource) -> None:
    with DecodeHarness(source, async_scheduling=True, num_blocks=16, kv_host_cache_gib=0.01) as decode:
        tier = decode.worker.engine.manager.host_tier
        assert tier is not None
        decode.submit("cached", [5] * 9, max_tokens=50, ignore_eos=True)
        decode.run()
        tier._max_blocks_per_step = 1
        decode.submit("evicts", [6] * 9, max_tokens=50, ignore_eos=True)
        decode.run()
        assert tier.counters["kv_host_stored_blocks"] > 8
        assert tier.counters["kv_host_dropped_blocks"] <= 2, "the prompt's own step takes three blocks and may store one"


def test_a_table_finds_a_row_while_others_that_hold_blocks_sit_the_step_out() -> None:
    manager = KVCacheManager(BlockPool(12), 4, BlockHash(b"root"))
    tables = BlockTableRows(manager, max_num_rows=2, max_num_blocks=3)
    for name, length in (("a", 5), ("b", 9), ("c", 12)):
        assert manager.reserve(Request(name, [len(name)] * length, arrival_s=0.0, deadline_at_s=1.0)) is not None
    for step in (["a", "b"], ["c"], ["a", "c"], ["b", "c"], ["b", "a"]):
        for name, row in zip(step, tables.rows_of(step), strict=True):
            block_ids = manager.block_ids(name)
            assert tables.matrix[row, : len(block_ids)].tolist() == block_ids


def test_a_request_of_the_same_name_is_not_taken_for_one_that_was_aborted(source: ModelSource) -> None:
    alone = answers(source, [{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}])[0]
    with DecodeHarness(source, async_scheduling=True) as decode:
        decode.submit("r0", [6] * 9, max_tokens=30, temperature=0.0, ignore_eos=True)
        for _ in range(4):
            decode.turn()
        decode.abort("r0")
        decode.worker._drain_inbox()
        decode.sent.clear()
        decode.submit("r0", prompts(1)[0], max_tokens=6, temperature=0.0, ignore_eos=True)
        decode.run()
        assert what_came(decode, "r0") == alone
