"""Steps that are queued while the one before runs: the same answers, no block given away that a step still uses, nothing left behind."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import pytest
import torch
from decode_harness import DecodeHarness
from tiny_models import TINY_CONFIG, write_tiny_hf

from shared.cache.block_pool import KVCacheBlock
from shared.engine import engine_core
from shared.engine.decode_batch import DecodeBatch
from shared.engine.model_runner import ModelRunner
from shared.engine.overlapped_decode import DecodedStep, LaunchedStep, OverlappedDecode
from shared.engine.step_input import StepInput
from shared.model_files.model_source import ModelSource, resolve_model

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


@pytest.fixture
def late_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are queued run when they are collected, as on a device that is slow: again, and with the same result as at first."""
    queued: deque[tuple[StepInput, torch.Tensor]] = deque()
    decode, collect, abandon = ModelRunner.decode, OverlappedDecode.collect, OverlappedDecode.abandon

    def noted(self: ModelRunner, batch: DecodeBatch, previous: torch.Tensor | None = None) -> torch.Tensor:
        hidden = decode(self, batch, previous)
        queued.append((batch.step_input(previous), hidden.clone()))
        return hidden

    def repeated(self: OverlappedDecode, step: LaunchedStep) -> DecodedStep:
        step_input, hidden = queued.popleft()
        assert torch.equal(self._runner.forward(step_input), hidden), "what a step reads was written to before it had ended"
        return collect(self, step)

    def forgotten(self: OverlappedDecode) -> None:
        queued.clear()
        abandon(self)

    monkeypatch.setattr(ModelRunner, "decode", noted)
    monkeypatch.setattr(OverlappedDecode, "collect", repeated)
    monkeypatch.setattr(OverlappedDecode, "abandon", forgotten)


def scribble_over_blocks_given_away(decode: DecodeHarness) -> None:
    """At once, as a transfer may that waits for no step."""
    engine = decode.worker.engine
    allocate = engine.manager.pool.allocate

    def allocate_and_write(num_blocks: int) -> list[KVCacheBlock] | None:
        blocks = allocate(num_blocks)
        for block in blocks or ():
            engine.cache.tensor[block.block_id].fill_(1e3)
        return blocks

    engine.manager.pool.allocate = allocate_and_write  # type: ignore[method-assign]


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


@pytest.mark.parametrize("broken", ["decode", "compute_raw_logits"])
def test_a_step_that_fails_after_one_of_its_requests_has_ended_ends_the_others_alone(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    first = answers(source, [{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}] * 2)[0]
    stop_id = first[3][1]
    with DecodeHarness(source, async_scheduling=True) as decode:
        for i, stop_token_ids in enumerate([(stop_id,), ()]):
            decode.submit(f"r{i}", prompts(2)[i], max_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=stop_token_ids)
        while not any(o.finish_reason for o in decode.outputs("r0")):
            decode.turn()
        launched = decode.worker._launched
        assert launched is not None and len(launched.rows) == 2, "the step that comes too late for r0 is queued"

        def fail(*_: object) -> torch.Tensor:
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(decode.worker.engine.runner, broken, fail)
            decode.turn()
        assert [failure.request_id for failure in decode.failures()] == ["r1"]
        assert decode.num_used == 0
        decode.submit("r2", [7] * 9, max_tokens=8, ignore_eos=True)
        decode.run()
        assert len(decode.answers("r2")[0]) == 8


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
    [failure] = decode.failures()
    assert failure.request_id == "a"
    assert failure.message == "decode step failed: RuntimeError", "what a library says is for the log"
    assert decode.num_used == 0


def test_blocks_evicted_by_steps_that_are_queued_go_to_host_memory_at_the_pace_of_steps(
    source: ModelSource, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "MAX_STORED_NBYTES_PER_STEP", 1)  # one block
    with DecodeHarness(source, async_scheduling=True, num_blocks=24, kv_host_cache_gib=0.01) as decode:
        decode.submit("fills", [5] * 60, max_tokens=1, ignore_eos=True)
        decode.run()
        num_cached = decode.worker.engine.manager.pool.num_cached
        assert num_cached >= 15
        decode.submit("evicts", [6] * 3, max_tokens=80, temperature=0.0, ignore_eos=True)
        decode.run()
        assert len(batches) > 70
        tier = decode.worker.engine.manager.host_tier
        assert tier is not None and tier.counters["kv_host_dropped_blocks"] == 0
        assert tier.counters["kv_host_stored_blocks"] > 5


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


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
@pytest.mark.usefixtures("late_steps")
def test_whatever_arrives_and_is_aborted_meanwhile_answers_are_those_of_one_step_after_another(source: ModelSource, seed: int) -> None:
    rng = random.Random(seed)
    settings = {
        "num_blocks": rng.choice([24, 40, 200]),
        "max_num_seqs": rng.choice([2, 4, 16]),
        "max_num_batched_tokens": rng.choice([16, 64]),
        "max_model_len": rng.choice([None, 50]),
        "kv_host_cache_gib": rng.choice([0.0, 0.01]),
    }
    prefixes = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(3)]
    submitted: dict[int, list[tuple[str, list[int], dict[str, Any]]]] = {}
    aborted: dict[int, list[tuple[str, int | None]]] = {}
    is_aborted: set[str] = set()
    for i in range(rng.randint(8, 24)):
        name, turn = f"r{i}", rng.randint(0, 50)
        prompt = rng.choice(prefixes)[: rng.randint(1, 40)] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 6))]
        kind = {
            "max_tokens": rng.randint(1, 25),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": i,
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([0, 5, 12]))),
            "repetition_penalty": rng.choice([1.0] * 9 + [1.3]),
            "num_sequences": rng.choice([1, 1, 1, 3]),
        }
        submitted.setdefault(turn, []).append((name, prompt, kind))
        if rng.random() < 0.2:
            aborted.setdefault(turn + rng.randint(1, 30), []).append((name, rng.choice([None, 1])))
            is_aborted.add(name)

    def run(is_async: bool) -> dict[str, list[Any]]:
        with DecodeHarness(source, **settings, async_scheduling=is_async) as decode:
            scribble_over_blocks_given_away(decode)
            turn, give_up_s = 0, time.monotonic() + 240
            while turn < 100 or decode.worker._jobs or decode.num_used:  # a copy from host memory holds its blocks until it has ended
                for name, prompt, kind in submitted.get(turn, ()):
                    decode.submit(name, prompt, **kind)
                for name, sequence_index in aborted.get(turn, ()):
                    decode.abort(name, sequence_index)
                if not decode.turn():
                    time.sleep(1e-3)
                assert time.monotonic() < give_up_s, "it does not end"
                turn += 1
            assert decode.failures() == []
            names = [name for at_once in submitted.values() for name, _, _ in at_once]
            return {name: what_came(decode, name) for name in names if name not in is_aborted}

    assert run(is_async=True) == run(is_async=False)
