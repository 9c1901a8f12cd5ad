"""A worker takes a prefix from any other that has it: the answer is as computed alone, and what dies or is gone costs time only.

Every test has a salt of its own, so that no worker has its blocks, and the same few prompts, so that the plain run is made once for each.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_stack import CNT, LocalStack, ids
from lost_time import LostTime
from plain_run import LOGPROB_TOLERANCE, assert_equals_plain_run
from worker_driver import Answer, WorkerDriver

from shared.messages import PrefixPull

BLOCK_SIZE = 16
NUM_PREFIX_BLOCKS = 12
NUM_PREFIX_TOKENS = NUM_PREFIX_BLOCKS * BLOCK_SIZE
PREFIX = ids(NUM_PREFIX_TOKENS)
PROMPT = [*PREFIX, 31, *ids(30)]
OTHER_PROMPT = [*PREFIX, 32, *ids(20)]
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_salts = (f"salt {number}" for number in itertools.count())
_plain: dict[tuple[int, ...], dict[str, Any]] = {}
"""By prompt: an answer that is like the plain run's."""


@pytest.fixture(scope="module")
def running() -> Iterator[LocalStack]:
    """Prefill is so slow that a prompt has a middle on any machine. No peer is taken for dead while a test keeps it silent."""
    settings = {"num_blocks": 300, "prefill_max_num_batched_tokens": 32, "prefill_num_threads": 1, "kv_peer_timeout_s": 30}
    with LocalStack("--prefill", "2", "--decode", "2", debug="true", **settings) as stack:
        yield stack


@pytest.fixture
def stack(running: LocalStack) -> Iterator[LocalStack]:
    """Every worker is there, and after the test has given everything back."""
    running.wait_until(lambda: all(running.metric("pagewire:kv_blocks_total", worker) for worker in WORKERS), 180)
    yield running
    running.wait_until_idle()


class Case:
    """The workers under one salt."""

    def __init__(self, driver: WorkerDriver) -> None:
        self.driver = driver
        self._salt = next(_salts)

    def start(
        self, prompt: list[int], prefill: str | None, decode: str, pull: PrefixPull | None = None, deadline_s: float = 60.0
    ) -> Answer:
        return self.driver.start(prompt, prefill, decode, pull, deadline_s=deadline_s, cache_salt=self._salt)

    def run(self, prompt: list[int], prefill: str | None, decode: str, pull: PrefixPull | None = None) -> Answer:
        return self.driver.finish(self.start(prompt, prefill, decode, pull))

    def ask(self, holder: str, puller: str, prompt: list[int] = PROMPT, timeout_s: float = 30.0) -> PrefixPull:
        return self.driver.ask_for_prefix(holder, puller, prompt, NUM_PREFIX_BLOCKS, timeout_s, self._salt)


@pytest.fixture
def case(stack: LocalStack) -> Iterator[Case]:
    with WorkerDriver(stack) as driver:
        yield Case(driver)


def prefill_of(worker: str) -> str | None:
    return worker if worker.startswith("prefill") else None


def assert_right(answer: Answer, num_cached_tokens: int) -> None:
    assert not answer.failures
    assert answer.num_cached_tokens == num_cached_tokens
    choice: dict[str, Any] = answer.as_choice()
    known = _plain.get(tuple(answer.prompt))
    if known is None:
        assert_equals_plain_run(choice)
        _plain[tuple(answer.prompt)] = choice
        return
    assert choice["token_ids"] == known["token_ids"]
    for top, expected in zip(choice["logprobs"]["top_logprobs"], known["logprobs"]["top_logprobs"], strict=True):
        assert top == pytest.approx(expected, abs=2 * LOGPROB_TOLERANCE)


class Pulls:
    """What the counters of a worker say since this was made."""

    NAMES = ("kv_prefix_pulls", "kv_prefix_pulled_blocks", "kv_prefix_pull_failures")

    def __init__(self, stack: LocalStack, case: Case, worker: str) -> None:
        self._driver, self._worker = case.driver, worker
        counters = stack.statistics(worker)[worker].counters
        self._before = [counters[name] for name in self.NAMES]

    def assert_were(self, num_pulls: int, num_blocks: int, num_failures: int) -> None:
        for name, before, change in zip(self.NAMES, self._before, (num_pulls, num_blocks, num_failures), strict=True):
            self._driver.wait_for_counter(self._worker, name, before + change)


@pytest.mark.parametrize(
    ("holder", "puller"),
    [
        ("prefill-0", "prefill-1"),
        pytest.param("decode-0", "prefill-1", marks=pytest.mark.long),
        pytest.param("prefill-0", "decode-1", marks=pytest.mark.long),
        ("decode-0", "decode-1"),
    ],
)
def test_prefix_that_another_worker_has_is_taken_from_there(stack: LocalStack, case: Case, holder: str, puller: str) -> None:
    case.run([*PREFIX, 7], prefill_of(holder), "decode-0")  # what decode computes itself no prefill worker has
    num_offered = stack.counter(holder, "kv_prefix_offered_blocks")
    pulls = Pulls(stack, case, puller)
    answer = case.run(PROMPT, prefill_of(puller), "decode-1", case.ask(holder, puller))
    assert_right(answer, NUM_PREFIX_TOKENS)
    pulls.assert_were(1, NUM_PREFIX_BLOCKS, 0)
    case.driver.wait_for_counter(holder, "kv_prefix_offered_blocks", num_offered + NUM_PREFIX_BLOCKS)
    # What was pulled is in the puller's cache like anything computed there.
    assert_right(case.run(OTHER_PROMPT, prefill_of(puller), "decode-1"), NUM_PREFIX_TOKENS)


def test_only_what_is_missing_is_sent(stack: LocalStack, case: Case) -> None:
    case.run([*PREFIX, 7], "prefill-0", "decode-0")
    case.run(PREFIX[:90], "prefill-1", "decode-0")
    pulls = Pulls(stack, case, "prefill-1")
    assert_right(case.run(PROMPT, "prefill-1", "decode-1", case.ask("prefill-0", "prefill-1")), NUM_PREFIX_TOKENS)
    pulls.assert_were(1, NUM_PREFIX_BLOCKS - 5, 0)


@pytest.mark.parametrize("num_left", [0, 7])
def test_holder_that_has_evicted_the_blocks_gives_what_it_has_left(stack: LocalStack, case: Case, num_left: int) -> None:
    """As when Redis still names it (failure case 24)."""
    if num_left:
        case.run(PREFIX[: num_left * BLOCK_SIZE + 1], "prefill-0", "decode-0")
    pulls = Pulls(stack, case, "prefill-1")
    assert_right(case.run(PROMPT, "prefill-1", "decode-1", case.ask("prefill-0", "prefill-1")), num_left * BLOCK_SIZE)
    pulls.assert_were(1, num_left, 0)


@pytest.mark.parametrize(
    ("number", "puller"),
    [(signal.SIGSTOP, "prefill-1"), pytest.param(signal.SIGSTOP, "decode-1", marks=pytest.mark.long), (signal.SIGKILL, "prefill-1")],
)
def test_holder_lost_during_the_pull_costs_time_only(stack: LocalStack, case: Case, number: signal.Signals, puller: str) -> None:
    prefix_s = case.run([*PREFIX, 7], "prefill-0", "decode-0").first_token_s
    pulls = Pulls(stack, case, puller)
    victim = stack.pid("prefill-0")
    pull = case.ask("prefill-0", puller, timeout_s=1.5)
    stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "prefill-0") == NUM_PREFIX_BLOCKS)  # pinned and offered
    os.kill(victim, number)
    try:
        with LostTime() as lost:
            answer = case.run(PROMPT, prefill_of(puller), "decode-1", pull)
        assert_right(answer, 0)
        assert answer.first_token_s is not None and prefix_s is not None
        assert answer.first_token_s < 2 + 4 * prefix_s + lost.so_far_s, "more than the wait and the computing"
        pulls.assert_were(1, 0, 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)


def test_requests_that_want_the_same_prefix_share_one_pull(stack: LocalStack, case: Case) -> None:
    for puller in ("prefill-1", "decode-1"):
        case = Case(case.driver)
        case.run([*PREFIX, 7], "prefill-0", "decode-0")
        pulls = Pulls(stack, case, puller)
        prompts = (PROMPT, OTHER_PROMPT)
        wanted = [case.ask("prefill-0", puller, prompt) for prompt in prompts]
        answers = [case.start(prompt, prefill_of(puller), "decode-1", pull) for prompt, pull in zip(prompts, wanted, strict=True)]
        for answer in answers:
            assert_right(case.driver.finish(answer), NUM_PREFIX_TOKENS)
        pulls.assert_were(1, NUM_PREFIX_BLOCKS, 0)


@pytest.mark.parametrize("puller", ["prefill-1", pytest.param("decode-1", marks=pytest.mark.long)])
def test_abort_and_deadline_during_a_pull_give_the_blocks_back(stack: LocalStack, case: Case, puller: str) -> None:
    case.run([*PREFIX, 7], "prefill-0", "decode-0")
    workers = {puller, "decode-1"}
    victim = stack.pid("prefill-0")
    for deadline_s in (60.0, 3.0):
        pull = case.ask("prefill-0", puller, timeout_s=30)
        stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "prefill-0") == NUM_PREFIX_BLOCKS)
        os.kill(victim, signal.SIGSTOP)
        try:
            answer = case.start(PROMPT, prefill_of(puller), "decode-1", pull, deadline_s)
            stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", puller) > 0)
            if deadline_s == 60:
                case.driver.abort(answer, *workers)
            # Well before the pull's own time is up, in which the holder stays silent.
            stack.wait_until(lambda: all(stack.metric("pagewire:kv_blocks_used", worker) == 0 for worker in workers), 20)
        finally:
            os.kill(victim, signal.SIGCONT)
        stack.wait_until_idle()
        assert not answer.outputs


def test_next_turn_of_a_conversation_is_pulled_from_the_decode_worker_that_wrote_the_last(stack: LocalStack) -> None:
    """Through the router, which finds it cheaper."""
    prompt = ids(60, first=20_001)
    answer = stack.tokens(prompt, 71, ignore_eos=True)
    before = stack.statistics()  # the hashes of the blocks travel to Redis with them
    turn = [*prompt, *answer, *ids(20, first=20_002)]
    result = stack.complete(turn, 4, ignore_eos=True, logprobs=2, return_tokens_as_token_ids=True)
    assert_equals_plain_run(result["choices"][0])
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == 8 * BLOCK_SIZE
    after = stack.statistics()
    num_pulls, num_blocks, num_failures = (
        sum(after[worker].counters[name] - before[worker].counters[name] for worker in WORKERS) for name in Pulls.NAMES
    )
    assert (num_pulls, num_failures) == (1, 0)
    assert num_blocks in (8 - 3, 8)  # the other prefill worker, where that one was measured to be faster, has none of them


def test_two_of_each_serve_and_decode_killed_before_the_first_token_is_replaced(stack: LocalStack) -> None:
    assert set(stack.pids) == {"redis", "router", *WORKERS}
    assert [stack.tokens(CNT, 3) for _ in range(4)] == [[216, 38, 28]] * 4
    with ThreadPoolExecutor(1) as client:
        request = client.submit(stack.complete, ids(600, first=20_003), 3, logprobs=2, return_tokens_as_token_ids=True)
        decode = ("decode-0", "decode-1")
        stack.wait_until(lambda: any(stack.metric("pagewire:kv_blocks_used", name) for name in decode))
        assert not request.done(), "the machine is too fast for this test"
        os.kill(stack.pid(max(decode, key=lambda name: stack.metric("pagewire:kv_blocks_used", name))), signal.SIGKILL)
        assert_equals_plain_run(request.result()["choices"][0])
