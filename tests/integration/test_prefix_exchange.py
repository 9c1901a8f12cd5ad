"""A worker takes a prefix from any other that has it: the answer is as computed alone, and what dies or is gone costs time only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from local_stack import LocalStack, ids
from plain_run import assert_equals_plain_run
from worker_driver import Answer, WorkerDriver

BLOCK_SIZE = 16
NUM_PREFIX_BLOCKS = 12
NUM_PREFIX_TOKENS = NUM_PREFIX_BLOCKS * BLOCK_SIZE
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_seeds = iter(range(20_000, 30_000, 10))


@pytest.fixture(scope="module")
def running() -> Iterator[LocalStack]:
    with LocalStack("--prefill", "2", "--decode", "2", num_blocks=300, debug="true") as stack:
        yield stack


@pytest.fixture
def stack(running: LocalStack) -> Iterator[LocalStack]:
    """Every worker is there, and after the test has given everything back."""
    running.wait_until(lambda: all(running.metric("pagewire:kv_blocks_total", worker) for worker in WORKERS), 30)
    yield running
    running.wait_until_idle(10)


@pytest.fixture
def driver(stack: LocalStack) -> Iterator[WorkerDriver]:
    with WorkerDriver(stack) as driver:
        yield driver


def new_prompt(num_tokens: int) -> list[int]:
    return ids(num_tokens, first=next(_seeds))


def tail_of(prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    """The prefix, and a tail that no other prompt has."""
    return [*prompt[:NUM_PREFIX_TOKENS], seed, *ids(num_tokens - 1)]


def a_prefix_on(driver: WorkerDriver, prefill: str | None, decode: str) -> list[int]:
    prompt = new_prompt(NUM_PREFIX_TOKENS + 8)
    driver.finish(driver.start(prompt, prefill, decode))
    return prompt


def assert_right(answer: Answer, num_cached_tokens: int) -> None:
    assert not answer.failures
    assert answer.num_cached_tokens == num_cached_tokens
    assert_equals_plain_run(answer.as_choice())


class Pulls:
    """What the counters of a worker say since this was made."""

    NAMES = ("kv_prefix_pulls", "kv_prefix_pulled_blocks", "kv_prefix_pull_failures")

    def __init__(self, driver: WorkerDriver, worker: str) -> None:
        self._driver, self._worker = driver, worker
        self._before = [driver.counter(worker, name) for name in self.NAMES]

    def assert_were(self, num_pulls: int, num_blocks: int, num_failures: int) -> None:
        for name, before, change in zip(self.NAMES, self._before, (num_pulls, num_blocks, num_failures), strict=True):
            self._driver.wait_for_counter(self._worker, name, before + change)


@pytest.mark.parametrize(
    ("holder", "puller"),
    [("prefill-0", "prefill-1"), ("decode-0", "prefill-1"), ("prefill-0", "decode-1"), ("decode-0", "decode-1")],
)
def test_prefix_that_only_another_worker_has_is_taken_from_there(driver: WorkerDriver, holder: str, puller: str) -> None:
    # A prompt that decode computes itself is known to no prefill worker.
    prefix = a_prefix_on(driver, "prefill-0" if holder.startswith("prefill") else None, "decode-0")
    num_sent = driver.counter(holder, "kv_prefix_sent_blocks")
    pulls = Pulls(driver, puller)
    prompt = tail_of(prefix, 40, seed=31)
    pull = driver.ask_for_prefix(holder, puller, prompt, NUM_PREFIX_BLOCKS)
    answer = driver.finish(driver.start(prompt, puller if puller.startswith("prefill") else None, "decode-1", pull))
    assert_right(answer, NUM_PREFIX_TOKENS)
    pulls.assert_were(1, NUM_PREFIX_BLOCKS, 0)
    driver.wait_for_counter(holder, "kv_prefix_sent_blocks", num_sent + NUM_PREFIX_BLOCKS)
    # What was pulled is in the puller's cache like anything computed there.
    again = driver.finish(driver.start(tail_of(prefix, 24, seed=32), puller if puller.startswith("prefill") else None, "decode-1"))
    assert_right(again, NUM_PREFIX_TOKENS)


def test_only_what_is_missing_is_sent(driver: WorkerDriver) -> None:
    prefix = a_prefix_on(driver, "prefill-0", "decode-0")
    driver.finish(driver.start(prefix[:90], "prefill-1", "decode-0"))
    pulls = Pulls(driver, "prefill-1")
    prompt = tail_of(prefix, 40, seed=33)
    pull = driver.ask_for_prefix("prefill-0", "prefill-1", prompt, NUM_PREFIX_BLOCKS)
    assert_right(driver.finish(driver.start(prompt, "prefill-1", "decode-1", pull)), NUM_PREFIX_TOKENS)
    pulls.assert_were(1, NUM_PREFIX_BLOCKS - 5, 0)


@pytest.mark.parametrize("num_left", [0, 7])
def test_holder_that_has_evicted_the_blocks_gives_what_it_has_left(driver: WorkerDriver, num_left: int) -> None:
    """As when Redis still names it (failure case 24)."""
    prompt = new_prompt(NUM_PREFIX_TOKENS + 40)
    if num_left:
        driver.finish(driver.start(prompt[: num_left * BLOCK_SIZE + 1], "prefill-0", "decode-0"))
    pulls = Pulls(driver, "prefill-1")
    pull = driver.ask_for_prefix("prefill-0", "prefill-1", prompt, NUM_PREFIX_BLOCKS)
    answer = driver.finish(driver.start(prompt, "prefill-1", "decode-1", pull))
    assert_right(answer, num_left * BLOCK_SIZE)
    pulls.assert_were(1, num_left, 0)


@pytest.mark.parametrize("puller", ["prefill-1", "decode-1"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_holder_lost_during_the_pull_costs_time_only(stack: LocalStack, driver: WorkerDriver, number: signal.Signals, puller: str) -> None:
    prefix = a_prefix_on(driver, "prefill-0", "decode-0")
    prompt = tail_of(prefix, 40, seed=34)
    prefill = puller if puller.startswith("prefill") else None
    pulls = Pulls(driver, puller)
    victim = stack.pid("prefill-0")
    pull = driver.ask_for_prefix("prefill-0", puller, prompt, NUM_PREFIX_BLOCKS, timeout_s=1.5)
    stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "prefill-0") == NUM_PREFIX_BLOCKS, 5)  # pinned and offered
    os.kill(victim, number)
    try:
        answer = driver.finish(driver.start(prompt, prefill, "decode-1", pull))
        assert_right(answer, 0)
        assert answer.first_token_s is not None and answer.first_token_s < 1.5 + 2 + 2.5  # the pull's time, and the computing
        pulls.assert_were(1, 0, 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    stack.wait_until_idle(30)


def test_requests_that_want_the_same_prefix_share_one_pull(driver: WorkerDriver) -> None:
    for puller, prefill in (("prefill-1", "prefill-1"), ("decode-1", None)):
        prefix = a_prefix_on(driver, "prefill-0", "decode-0")
        pulls = Pulls(driver, puller)
        answers = []
        for seed in (41, 42):
            prompt = tail_of(prefix, 40, seed)
            pull = driver.ask_for_prefix("prefill-0", puller, prompt, NUM_PREFIX_BLOCKS)
            answers.append(driver.start(prompt, prefill, "decode-1", pull))
        for answer in answers:
            assert_right(driver.finish(answer), NUM_PREFIX_TOKENS)
        pulls.assert_were(1, NUM_PREFIX_BLOCKS, 0)


@pytest.mark.parametrize("puller", ["prefill-1", "decode-1"])
def test_abort_and_deadline_during_a_pull_give_the_blocks_back(stack: LocalStack, driver: WorkerDriver, puller: str) -> None:
    prefix = a_prefix_on(driver, "prefill-0", "decode-0")
    prefill = puller if puller.startswith("prefill") else None
    workers = {worker for worker in (prefill, "decode-1") if worker is not None}
    victim = stack.pid("prefill-0")
    for deadline_s in (60.0, 1.0):
        prompt = tail_of(prefix, 40, seed=50)
        pull = driver.ask_for_prefix("prefill-0", puller, prompt, NUM_PREFIX_BLOCKS, timeout_s=30)
        stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "prefill-0") == NUM_PREFIX_BLOCKS, 5)
        os.kill(victim, signal.SIGSTOP)
        try:
            answer = driver.start(prompt, prefill, "decode-1", pull, deadline_s=deadline_s)
            stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", puller) > 0, 1)
            if deadline_s > 1:
                driver.abort(answer, *workers)
            started_s = time.monotonic()
            stack.wait_until(lambda: all(stack.metric("pagewire:kv_blocks_used", worker) == 0 for worker in workers), 3)
            assert time.monotonic() - started_s < 2.0
        finally:
            os.kill(victim, signal.SIGCONT)
        stack.wait_until_idle(10)
        assert not answer.outputs


def test_next_turn_of_a_conversation_is_pulled_from_the_decode_worker_that_wrote_the_last(stack: LocalStack) -> None:
    prompt = new_prompt(100)
    answer = stack.complete(prompt, 100, ignore_eos=True)["choices"][0]["token_ids"]
    names = [f"pagewire:{name}_total" for name in Pulls.NAMES]
    before = [stack.metric(name) for name in names]
    turn = [*prompt, *answer, *ids(40, first=next(_seeds))]
    result = stack.complete(turn, 4, ignore_eos=True, logprobs=2, return_tokens_as_token_ids=True)
    assert_equals_plain_run(result["choices"][0])
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == (199 // BLOCK_SIZE) * BLOCK_SIZE
    time.sleep(0.5)  # statistics travel with the lease
    after = [stack.metric(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 12 - 6, 0]
