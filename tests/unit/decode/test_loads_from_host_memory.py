"""A decode worker whose evicted blocks come back from host memory: the same answers, and nothing is kept however a load ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from decode_harness import DecodeHarness
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tiny_models import write_tiny_hf

from shared.model_files.model_source import ModelSource, resolve_model

PROMPT = [5 + i % 50 for i in range(41)]
NUM_PROMPT_BLOCKS = 10
OTHER = [60 + i % 50 for i in range(57)]
GREEDY: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0, "num_logprobs": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory)
    return resolve_model(str(directory))


class Loads:
    """The copies of a worker: each waits until `go`."""

    def __init__(self, decode: DecodeHarness) -> None:
        tier = decode.worker.engine.manager.host_tier
        assert tier is not None
        self.tier = tier
        self.go = threading.Event()
        self.is_failing = False
        self._load: Callable[..., None] = tier._store.load
        tier._store.load = self._wait_and_load  # type: ignore[method-assign]

    def _wait_and_load(self, slots: list[int], block_ids: list[int]) -> None:
        assert self.go.wait(120)
        if self.is_failing:
            raise OSError("the copy failed")
        self._load(slots, block_ids)


@pytest.fixture
def decode(source: ModelSource) -> Iterator[DecodeHarness]:
    """Has served PROMPT, and since then OTHER in all of its 16 blocks."""
    with DecodeHarness(source, num_blocks=16, kv_host_cache_gib=0.01) as harness:
        for name, prompt in (("first", PROMPT), ("other", OTHER)):
            harness.submit(name, prompt, **GREEDY)
            harness.run()
        yield harness
    harness.worker.engine.close()
    assert harness.num_used == 0
    harness.worker.engine.manager.check_invariants()


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.002)


def run(decode: DecodeHarness) -> None:
    while decode.worker._jobs:
        if not decode.turn():
            decode.worker._wait_for_work()


def assert_as_first(decode: DecodeHarness, name: str) -> None:
    assert decode.answers(name) == decode.answers("first")
    for output, expected in zip(decode.outputs(name), decode.outputs("first"), strict=True):
        assert output.logprobs is not None and expected.logprobs is not None
        assert output.logprobs.top_token_ids == expected.logprobs.top_token_ids
        assert output.logprobs.top_logprobs == pytest.approx(expected.logprobs.top_logprobs, abs=1e-5)


def test_a_prompt_whose_blocks_were_evicted_costs_a_copy_and_gives_the_same_answer(decode: DecodeHarness) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    decode.worker.tracer = provider.get_tracer("test")
    num_computed = decode.worker._counters["local_prompt_tokens"]
    decode.submit("again", PROMPT, **GREEDY)
    run(decode)
    assert_as_first(decode, "again")
    assert decode.worker._counters["local_prompt_tokens"] - num_computed == 1
    assert {output.num_cached_tokens for output in decode.outputs("again")} == {4 * NUM_PROMPT_BLOCKS}
    events = [event for span in exporter.get_finished_spans() for event in span.events if event.name == "kv.host_loaded"]
    assert [event.attributes["kv.num_blocks"] for event in events] == [NUM_PROMPT_BLOCKS]
    decode.worker._refresh_stats(force=True)
    counters = decode.worker.record().stats.counters
    block_nbytes = decode.worker.engine.cache.block_nbytes
    assert counters["kv_host_hit_tokens"] == 4 * NUM_PROMPT_BLOCKS
    assert counters["kv_host_loaded_blocks"] == NUM_PROMPT_BLOCKS
    assert counters["kv_host_loaded_bytes"] == NUM_PROMPT_BLOCKS * block_nbytes
    assert counters["kv_host_stored_bytes"] == counters["kv_host_stored_blocks"] * block_nbytes > 0
    assert counters["kv_host_load_seconds"] > 0 and counters["kv_host_store_seconds"] > 0
    assert decode.worker.record().num_host_blocks == int(0.01 * (1 << 30)) // block_nbytes


def test_others_go_on_while_blocks_are_copied(decode: DecodeHarness) -> None:
    loads = Loads(decode)
    decode.submit("again", PROMPT, **GREEDY)
    decode.submit("short", [7, 8, 9], **GREEDY)
    while decode.turn():
        pass
    assert len(decode.answers("short")[0]) == 6
    assert decode.outputs("again") == []
    loads.go.set()
    run(decode)
    assert_as_first(decode, "again")


def test_blocks_of_a_request_aborted_during_a_copy_are_back_when_that_has_ended(decode: DecodeHarness) -> None:
    loads = Loads(decode)
    decode.submit("again", PROMPT, **GREEDY)
    assert not decode.turn()
    decode.abort("again")
    decode.submit("big", OTHER, **GREEDY)  # needs blocks that are still being written
    assert not decode.turn()
    assert decode.num_used == NUM_PROMPT_BLOCKS
    loads.go.set()
    run(decode)
    assert decode.answers("big") == decode.answers("other")
    assert decode.failures() == []
    wait_until(lambda: decode.num_used == 0)


def test_a_request_whose_deadline_passes_during_a_copy_is_told_so(decode: DecodeHarness) -> None:
    loads = Loads(decode)
    decode.submit("again", PROMPT, deadline_s=0.05, **GREEDY)
    decode.turn()
    time.sleep(0.06)
    decode.turn()
    assert [failure.error_type for failure in decode.failures()] == ["deadline"]
    loads.go.set()
    wait_until(lambda: decode.num_used == 0)


def test_a_request_whose_copy_fails_is_computed(decode: DecodeHarness, caplog: pytest.LogCaptureFixture) -> None:
    loads = Loads(decode)
    loads.is_failing = True
    decode.submit("again", PROMPT, **GREEDY)
    assert not decode.turn()
    loads.go.set()
    wait_until(lambda: loads.tier.counters["kv_host_load_failures"])
    loads.is_failing = False
    run(decode)
    assert_as_first(decode, "again")
    assert decode.failures() == []
    assert "could not be copied from host memory" in caplog.text


def test_forks_of_a_request_start_from_blocks_that_came_from_host_memory(decode: DecodeHarness) -> None:
    decode.submit("again", PROMPT, num_sequences=3, **GREEDY)
    run(decode)
    assert decode.answers("again") == decode.answers("first") * 3


@pytest.mark.parametrize("num_blocks", [16, 22])
def test_preempted_requests_give_the_same_answers_with_host_memory_as_without(source: ModelSource, num_blocks: int) -> None:
    answers = []
    for kv_host_cache_gib in (0.0, 0.01):
        with DecodeHarness(source, num_blocks=num_blocks, kv_host_cache_gib=kv_host_cache_gib) as decode:
            for index in range(4):
                prompt = [3 + (7 * index + position) % 90 for position in range(20 + index)]
                decode.submit(f"{index}", prompt, max_tokens=24, ignore_eos=True, temperature=0.0)
            run(decode)
            answers.append([decode.answers(f"{index}") for index in range(4)])
            assert decode.worker.engine.scheduler.num_preemptions > 0
            tier = decode.worker.engine.manager.host_tier
            if tier is not None:
                assert tier.counters["kv_host_loaded_blocks"] > 0
        decode.worker.engine.close()
        assert decode.num_used == 0
    assert answers[0] == answers[1]
