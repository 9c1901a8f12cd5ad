"""Workers that die or freeze in the middle: the client gets the right answer or an error at once, and no block is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
from local_stack import CNT, LocalStack, Streamed, ids, is_alive
from plain_run import assert_equals_plain_run

LONG = 1000


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[LocalStack]:
    with LocalStack(num_blocks=300, debug="true") as running:
        yield running


@pytest.fixture
def small(shared_stack: LocalStack) -> LocalStack:
    """A stack that has recovered from what the test before did to it."""
    shared_stack.wait_until(lambda: _answers(shared_stack), 30)
    shared_stack.wait_until_idle(10)
    return shared_stack


class Background(threading.Thread):
    """One request in a thread; `result` is what it returned or raised."""

    def __init__(self, call: Any, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self._call = lambda: call(*arguments, **options)
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error


def in_the_middle_of_a_prompt(stack: LocalStack, seed: int) -> Background:
    request = Background(stack.complete, ids(LONG, first=seed), 3, logprobs=2, return_tokens_as_token_ids=True)
    time.sleep(0.5)
    assert request.is_alive(), "the machine is too fast for this test"
    return request


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_lost_in_mid_prompt_is_made_good_by_decode(small: LocalStack, number: signal.Signals) -> None:
    request = in_the_middle_of_a_prompt(small, seed=500 + number)
    victim = small.pid("prefill-0")
    fallbacks = small.metric("pagewire:kv_recompute_fallbacks_total", "decode-0")
    os.kill(victim, number)
    request.join(60)
    if number == signal.SIGSTOP:
        os.kill(victim, signal.SIGCONT)
    assert isinstance(request.result, dict), request.result
    assert_equals_plain_run(request.result["choices"][0])
    small.wait_until(lambda: small.metric("pagewire:kv_recompute_fallbacks_total", "decode-0") == fallbacks + 1, 5)
    small.wait_until(lambda: small.metric("pagewire:kv_blocks_used", "decode-0") == 0, 5)


def test_policy_fail_reports_a_lost_transfer_as_an_error() -> None:
    with LocalStack(num_blocks=300, kv_failure_policy="fail") as stack:
        request = in_the_middle_of_a_prompt(stack, seed=510)
        os.kill(stack.pid("prefill-0"), signal.SIGKILL)
        request.join(10)
        assert isinstance(request.result, urllib.error.HTTPError) and request.result.code >= 500, request.result
        assert b'"error"' in request.result.read()
        stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "decode-0") == 0, 5)


def test_decode_killed_in_mid_answer_ends_the_stream_with_an_error(small: LocalStack) -> None:
    request = Background(small.stream, CNT, 500, ignore_eos=True)
    time.sleep(1.5)
    killed_s = time.monotonic()
    os.kill(small.pid("decode-0"), signal.SIGKILL)
    request.join(5)
    assert time.monotonic() - killed_s < 2
    streamed: Streamed = request.result
    assert streamed.error is not None and streamed.error["code"] == 503
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in streamed.chunks)
    small.wait_until(lambda: small.metric("pagewire:kv_blocks_used", "prefill-0") == 0, 5)


def test_frozen_decode_is_gone_within_two_seconds(small: LocalStack) -> None:
    request = Background(small.stream, CNT, 500, ignore_eos=True)
    time.sleep(1.5)
    frozen_s = time.monotonic()
    os.kill(small.pid("decode-0"), signal.SIGSTOP)
    request.join(10)
    assert time.monotonic() - frozen_s < 3
    assert request.result.error is not None
    os.kill(small.pid("decode-0"), signal.SIGCONT)
    small.wait_until(lambda: _answers(small), 20)


@pytest.fixture(scope="module")
def pairs() -> Iterator[LocalStack]:
    with LocalStack("--prefill", "2", "--decode", "2", num_blocks=300, drain_s=60) as running:
        yield running


def busier_decode(stack: LocalStack) -> str:
    return max(("decode-0", "decode-1"), key=lambda name: stack.metric("pagewire:kv_blocks_used", name))


def test_workers_told_to_leave_end_their_answers_first_and_new_requests_go_elsewhere(pairs: LocalStack) -> None:
    answer = Background(pairs.stream, CNT, 100, ignore_eos=True)
    pairs.wait_until(lambda: any(pairs.num_used_blocks()[name] for name in ("decode-0", "decode-1")), 10)
    leaving = pairs.pid(busier_decode(pairs))
    prompt = in_the_middle_of_a_prompt(pairs, seed=530)
    computing = max(("prefill-0", "prefill-1"), key=lambda name: pairs.metric("pagewire:kv_blocks_used", name))
    for pid in (leaving, pairs.pid(computing)):
        os.kill(pid, signal.SIGTERM)
    assert [pairs.tokens(CNT, 3) for _ in range(3)] == [[216, 38, 28]] * 3
    answer.join(60)
    prompt.join(60)
    assert answer.result.error is None and len(answer.result.token_ids) == 100
    assert isinstance(prompt.result, dict), prompt.result
    assert_equals_plain_run(prompt.result["choices"][0])
    pairs.wait_until(lambda: not is_alive(leaving), 10)


def test_two_of_each_serve_and_decode_killed_before_the_first_token_is_replaced(pairs: LocalStack) -> None:
    assert set(pairs.pids) == {"redis", "router", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert [pairs.tokens(CNT, 3) for _ in range(4)] == [[216, 38, 28]] * 4
    request = in_the_middle_of_a_prompt(pairs, seed=520)
    os.kill(pairs.pid(busier_decode(pairs)), signal.SIGKILL)
    request.join(60)
    assert isinstance(request.result, dict), request.result
    assert_equals_plain_run(request.result["choices"][0])


def test_requests_go_on_while_redis_is_frozen(small: LocalStack) -> None:
    small.tokens(CNT, 3)
    os.kill(small.pid("redis"), signal.SIGSTOP)
    try:
        time.sleep(2.5)
        for _ in range(3):
            start_s = time.monotonic()
            assert small.tokens(CNT, 3) == [216, 38, 28]
            assert time.monotonic() - start_s < 1.5
    finally:
        os.kill(small.pid("redis"), signal.SIGCONT)


def _answers(stack: LocalStack) -> bool:
    try:
        return stack.tokens(CNT, 3) == [216, 38, 28]
    except urllib.error.HTTPError:
        return False
