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
from local_stack import CNT, LocalStack, Streamed, ids
from lost_time import LostTime
from plain_run import assert_equals_plain_run

LONG = 600
SLOW_PREFILL = {"prefill_max_num_batched_tokens": 16, "prefill_num_threads": 1}
"""So slow that a prompt has a middle on any machine."""


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[LocalStack]:
    with LocalStack(num_blocks=300, debug="true", **SLOW_PREFILL) as running:
        yield running


@pytest.fixture
def small(shared_stack: LocalStack) -> LocalStack:
    """A stack that has recovered from what the test before did to it."""
    shared_stack.wait_until(lambda: _answers(shared_stack), 180)
    shared_stack.wait_until_idle()
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
    stack.wait_until(lambda: stack.metric("vllm:num_requests_running", "prefill-0") and stack.metric("pagewire:kv_blocks_used", "decode-0"))
    assert request.is_alive(), "the machine is too fast for this test"
    return request


def in_the_middle_of_an_answer(stack: LocalStack) -> tuple[Background, Streamed]:
    seen = Streamed()
    request = Background(stack.stream, CNT, 4000, into=seen, ignore_eos=True)
    stack.wait_until(lambda: seen.chunks)
    return request, seen


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_lost_in_mid_prompt_is_made_good_by_decode(small: LocalStack, number: signal.Signals) -> None:
    fallbacks = small.counter("decode-0", "kv_recompute_fallbacks")
    victim = small.pid("prefill-0")
    request = in_the_middle_of_a_prompt(small, seed=500 + number)
    os.kill(victim, number)
    request.join(120)
    if number == signal.SIGSTOP:
        os.kill(victim, signal.SIGCONT)
    assert isinstance(request.result, dict), request.result
    assert_equals_plain_run(request.result["choices"][0])
    small.wait_until(lambda: small.metric("pagewire:kv_recompute_fallbacks_total", "decode-0") == fallbacks + 1)
    small.wait_until(lambda: small.metric("pagewire:kv_blocks_used", "decode-0") == 0)


def test_policy_fail_reports_a_lost_transfer_as_an_error() -> None:
    with LocalStack(num_blocks=300, kv_failure_policy="fail", **SLOW_PREFILL) as stack:
        request = in_the_middle_of_a_prompt(stack, seed=510)
        os.kill(stack.pid("prefill-0"), signal.SIGKILL)
        request.join(60)
        assert isinstance(request.result, urllib.error.HTTPError) and request.result.code >= 500, request.result
        assert b'"error"' in request.result.read()
        stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "decode-0") == 0)


def test_decode_killed_in_mid_answer_ends_the_stream_with_an_error(small: LocalStack) -> None:
    victim = small.pid("decode-0")
    request, seen = in_the_middle_of_an_answer(small)
    with LostTime() as lost:
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        request.join(60)
        assert time.monotonic() - killed_s < 2 + lost.so_far_s
    assert seen.error is not None and seen.error["code"] == 503
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in seen.chunks)
    small.wait_until(lambda: small.metric("pagewire:kv_blocks_used", "prefill-0") == 0)


def test_frozen_decode_is_gone_within_two_seconds(small: LocalStack) -> None:
    victim = small.pid("decode-0")
    request, seen = in_the_middle_of_an_answer(small)
    with LostTime() as lost:
        frozen_s = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        request.join(60)
        assert time.monotonic() - frozen_s < 3 + lost.so_far_s
    assert seen.error is not None
    os.kill(victim, signal.SIGCONT)
    small.wait_until(lambda: _answers(small), 180)


def test_requests_go_on_while_redis_is_frozen(small: LocalStack) -> None:
    small.tokens(CNT, 3)
    redis = small.pid("redis")
    os.kill(redis, signal.SIGSTOP)
    try:
        time.sleep(2.5)
        for _ in range(3):
            with LostTime() as lost:
                start_s = time.monotonic()
                assert small.tokens(CNT, 3) == [216, 38, 28]
                assert time.monotonic() - start_s < 1.5 + lost.so_far_s
    finally:
        os.kill(redis, signal.SIGCONT)


def _answers(stack: LocalStack) -> bool:
    try:
        return stack.tokens(CNT, 3) == [216, 38, 28]
    except urllib.error.HTTPError:
        return False
