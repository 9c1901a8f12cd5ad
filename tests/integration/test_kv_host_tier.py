"""Real workers with tiny KV caches and host memory: a prompt that was evicted comes back by a copy, with the answer of the plain run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from local_stack import LocalStack, ids
from plain_run import assert_equals_plain_run
from worker_driver import WorkerDriver

from shared.cache.prefix_index import Tier

NUM_PREFIX_BLOCKS = 12
PREFIX = ids(16 * NUM_PREFIX_BLOCKS)
PROMPT = [*PREFIX, 31, *ids(6)]
NUM_BLOCKS = 20
LOGPROBS = {"logprobs": 2, "return_tokens_as_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def running() -> Iterator[LocalStack]:
    arguments = ("--prefill", "1", "--decode", "2", "--kv-host-cache-gib", "0.1")
    with LocalStack(*arguments, num_blocks=NUM_BLOCKS, debug="true", kv_peer_timeout_s=30) as stack:
        yield stack


@pytest.fixture
def driver(running: LocalStack) -> Iterator[WorkerDriver]:
    with WorkerDriver(running) as driver:
        yield driver
    running.wait_until_idle()


def evict(driver: WorkerDriver, worker: str, salt: str) -> None:
    """Fill the worker's cache with something else."""
    prompt = ids(16 * NUM_BLOCKS - 1, first=9)
    prefill = worker if worker.startswith("prefill") else None
    answer = driver.finish(driver.start(prompt, prefill, "decode-1" if prefill else worker, max_tokens=1, cache_salt=salt))
    assert not answer.failures


def expect_tiers(running: LocalStack, driver: WorkerDriver, worker: str, salt: str, tier: Tier) -> None:
    """The index learns of it in a moment."""

    def found() -> list[Tier | None]:
        return driver.tiers(worker, PREFIX, salt)

    running.wait_until(lambda: found() == [tier] * NUM_PREFIX_BLOCKS, describe=lambda: f"it says {found()}")


def test_an_evicted_prompt_of_a_client_comes_back_from_host_memory(running: LocalStack, driver: WorkerDriver) -> None:
    first = running.complete(PROMPT, 8, **LOGPROBS)
    for worker in ("prefill-0", "decode-0", "decode-1"):
        evict(driver, worker, "the client's")
    before = totals(running)
    again = running.complete(PROMPT, 8, **LOGPROBS)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PREFIX)
    assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    assert_equals_plain_run(again["choices"][0])
    after = totals(running)
    assert after["kv_host_loaded_blocks"] - before["kv_host_loaded_blocks"] == NUM_PREFIX_BLOCKS
    assert after["kv_host_hit_tokens"] - before["kv_host_hit_tokens"] == len(PREFIX)
    assert after["kv_host_loaded_bytes"] > 0
    assert after["kv_host_corrupt_blocks"] == 0
    running.wait_until(lambda: running.metric("pagewire:kv_host_blocks_cached") >= NUM_PREFIX_BLOCKS)


def totals(stack: LocalStack) -> Counter[str]:
    """The counters of all workers."""
    summed: Counter[str] = Counter()
    for statistics in stack.statistics().values():
        summed.update(statistics.counters)
    return summed


def test_a_prefill_worker_sends_what_it_has_brought_back(running: LocalStack, driver: WorkerDriver) -> None:
    driver.finish(driver.start(PROMPT, "prefill-0", "decode-0", cache_salt="prefill's"))
    expect_tiers(running, driver, "prefill-0", "prefill's", Tier.DEVICE)
    evict(driver, "prefill-0", "fill prefill")
    expect_tiers(running, driver, "prefill-0", "prefill's", Tier.HOST)
    loaded = running.counter("prefill-0", "kv_host_loaded_blocks")
    answer = driver.finish(driver.start(PROMPT, "prefill-0", "decode-1", cache_salt="prefill's"))
    assert answer.num_cached_tokens == len(PREFIX)
    assert_equals_plain_run(answer.as_choice())
    driver.wait_for_counter("prefill-0", "kv_host_loaded_blocks", loaded + NUM_PREFIX_BLOCKS)
    expect_tiers(running, driver, "prefill-0", "prefill's", Tier.DEVICE)


def test_another_worker_pulls_what_its_holder_has_in_host_memory(running: LocalStack, driver: WorkerDriver) -> None:
    driver.finish(driver.start(PROMPT, None, "decode-0", cache_salt="pulled"))
    evict(driver, "decode-0", "fill the holder")
    before = running.statistics()
    pulled = before["decode-1"].counters["kv_prefix_pulled_blocks"]
    loaded = before["decode-0"].counters["kv_host_loaded_blocks"]
    pull = driver.ask_for_prefix("decode-0", "decode-1", PROMPT, NUM_PREFIX_BLOCKS, cache_salt="pulled")
    answer = driver.finish(driver.start(PROMPT, None, "decode-1", pull, cache_salt="pulled"))
    assert answer.num_cached_tokens == len(PREFIX)
    assert_equals_plain_run(answer.as_choice())
    driver.wait_for_counter("decode-1", "kv_prefix_pulled_blocks", pulled + NUM_PREFIX_BLOCKS)
    driver.wait_for_counter("decode-0", "kv_host_loaded_blocks", loaded + NUM_PREFIX_BLOCKS)


def test_clients_that_hang_up_around_a_copy_leave_nothing(running: LocalStack, driver: WorkerDriver) -> None:
    for number in range(4):
        evict(driver, f"decode-{number % 2}", f"fill {number}")
        answer = driver.start(PROMPT, None, f"decode-{number % 2}", cache_salt="pulled", max_tokens=64)
        if number > 1:
            driver.read(0.02)
        driver.abort(answer, f"decode-{number % 2}")
    running.wait_until_idle()
    answer = driver.finish(driver.start(PROMPT, None, "decode-0", cache_salt="pulled"))
    assert_equals_plain_run(answer.as_choice())
