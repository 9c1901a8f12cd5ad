"""Prefill of 2 ranks and decode of 4, which share 2 KV heads, as a user starts them: what the loss of a rank costs a request."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from decode_harness import DecodeHarness
from local_stack import LocalStack, ids
from lost_time import LostTime
from prefill_harness import answer
from tiny_models import with_changes, write_tiny_hf

from shared.model_files.model_source import resolve_model

NUM_RANKS = {"prefill-0": 2, "decode-0": 4}
FROZEN_S = 4.0
"""After which a frozen rank is noticed; longer than by default, for a test to do something meanwhile."""
LIMIT_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: FROZEN_S + 2.0}
"""Until the worker has ended."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    write_tiny_hf(directory, with_changes(max_model_len=8192), max_position_embeddings=8192)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[DecodeHarness]:
    with DecodeHarness(resolve_model(str(model)), block_size=16, num_blocks=400, max_num_batched_tokens=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[LocalStack]:
    settings = {"decode_tensor_parallel_size": 4, "num_blocks": 400, "max_step_ms": 20, "kv_peer_timeout_s": FROZEN_S}
    with LocalStack("--model", str(model), "--tensor-parallel", "2", debug="true", **settings) as stack:
        yield stack


@pytest.fixture
def stack(running: LocalStack) -> Iterator[LocalStack]:
    """Every worker is there, and after the test has given everything back."""
    running.wait_until(lambda: all(running.metric("pagewire:kv_blocks_total", worker) for worker in NUM_RANKS), 180)
    yield running
    running.wait_until_idle()


def ranks_of(stack: LocalStack, worker: str) -> list[psutil.Process]:
    return psutil.Process(stack.pid(worker)).children()


def prompt_of(num_tokens: int, first: int) -> list[int]:
    return [first, *(token % 200 + 3 for token in ids(num_tokens - 1))]


def lose(rank: psutil.Process, number: signal.Signals) -> None:
    """Its worker ends in time."""
    worker = rank.parent()
    assert worker is not None
    with LostTime() as lost:
        lost_s = time.monotonic()
        rank.send_signal(number)
        psutil.wait_procs([worker], timeout=60)
        assert time.monotonic() - lost_s < LIMIT_S[number] + lost.so_far_s
    assert not worker.is_running()


def test_answers_are_those_of_one_rank_and_kv_travels(stack: LocalStack, alone: DecodeHarness) -> None:
    assert {worker: len(ranks_of(stack, worker)) for worker in NUM_RANKS} == {worker: size - 1 for worker, size in NUM_RANKS.items()}
    for number, num_tokens in enumerate((1, 40, 300, 300)):
        prompt = prompt_of(num_tokens, first=5)
        assert stack.tokens(prompt, 12, ignore_eos=True) == answer(alone, f"request {number}", prompt)
    assert stack.metric("pagewire:bytes_received_total", "decode-0") > 0
    assert stack.metric("pagewire:kv_recompute_fallbacks_total", "decode-0") == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_rank_of_prefill_lost_in_mid_prompt_is_made_good_by_decode(stack: LocalStack, alone: DecodeHarness, number: signal.Signals) -> None:
    prompt = prompt_of(3000, first=20 + number)
    expected = answer(alone, f"prefill {number}", prompt)
    fallbacks = stack.counter("decode-0", "kv_recompute_fallbacks")
    victim = ranks_of(stack, "prefill-0")[-1]
    with ThreadPoolExecutor(1) as client:
        victim.suspend()  # so that the others are in the middle of a step when it is lost
        request = client.submit(stack.stream, prompt, 12, ignore_eos=True)
        if number == signal.SIGKILL:
            stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "decode-0") > 0)
        lose(victim, number)
        seen = request.result(60)
    assert seen.error is None
    assert seen.token_ids == expected
    assert stack.next_event("restarted")["child"] == "prefill-0"
    assert stack.counter("decode-0", "kv_recompute_fallbacks") == fallbacks + 1


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_of_decode_lost_in_mid_answer_is_an_error_at_once(stack: LocalStack, number: signal.Signals) -> None:
    with ThreadPoolExecutor(1) as client:
        request = client.submit(stack.stream, prompt_of(100, first=50 + number), 6000, ignore_eos=True)
        stack.wait_until(lambda: stack.metric("pagewire:kv_blocks_used", "decode-0") > 10)
        lose(ranks_of(stack, "decode-0")[-1], number)
        seen = request.result(60)
    assert seen.error is not None
    assert seen.chunks
    assert stack.next_event("restarted")["child"] == "decode-0"
