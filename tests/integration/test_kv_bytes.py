"""Only KV that decode does not have goes to it: counted in bytes, on the real system."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from local_stack import LocalStack, ids
from plain_run import assert_equals_plain_run

BLOCK_SIZE = 16
TOKEN_NBYTES = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in fp32: layers, K and V, KV heads, head size, bytes."""
NUM_NEW_TOKENS = 200
"""The block in which the last answer ends has up to 15 tokens that are not new; with these that is within a tenth."""


class ReceivedBytes:
    """What decode has received since the last call."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._last = self._read()

    def _read(self) -> float:
        return self._stack.counter("decode-0", "bytes_received")

    def __call__(self) -> float:
        last, self._last = self._last, self._read()
        return self._last - last


@pytest.fixture
def received(stack: LocalStack) -> ReceivedBytes:
    stack.wait_until_idle()
    return ReceivedBytes(stack)


def test_eight_answers_move_no_more_bytes_than_one(stack: LocalStack, received: ReceivedBytes) -> None:
    moved = []
    for seed, num_answers in ((8001, 1), (8002, 8)):
        stack.complete(ids(300, first=seed), 4, n=num_answers, temperature=1.0, ignore_eos=True)
        moved.append(received())
    assert moved[0] == 300 * TOKEN_NBYTES
    assert moved[1] == moved[0]


def test_a_turn_of_a_conversation_moves_little_more_than_its_new_tokens(stack: LocalStack, received: ReceivedBytes) -> None:
    prompt: list[int] = []
    shares = []
    for turn in range(4):
        new_tokens = ids(NUM_NEW_TOKENS, first=8100 + turn)
        prompt = [*prompt, *new_tokens]
        answer = stack.tokens(prompt, 20, ignore_eos=True)
        shares.append(received() / (len(new_tokens) * TOKEN_NBYTES))
        prompt = [*prompt, *answer]
    print("bytes moved, as a share of the new tokens':", [f"{share:.3f}" for share in shares])
    assert max(shares) <= 1.1


def test_a_prefix_that_two_want_at_the_same_time_is_sent_once(stack: LocalStack, received: ReceivedBytes) -> None:
    prefix = ids(25 * BLOCK_SIZE, first=8300)
    prompts = [[*prefix, 8301 + number, *ids(30)] for number in range(3)]
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda prompt: stack.complete(prompt, 3, logprobs=2, return_tokens_as_token_ids=True), prompts))
    assert received() == (len(prefix) + 3 * 31) * TOKEN_NBYTES
    for answer in answers:
        assert_equals_plain_run(answer["choices"][0])


def test_who_waits_for_a_prefix_goes_on_when_the_other_leaves(stack: LocalStack, received: ReceivedBytes) -> None:
    prefix = ids(60 * BLOCK_SIZE, first=8400)
    with ThreadPoolExecutor(1) as clients, stack.request_under_way([*prefix, 8401, *ids(30)], 3):
        stack.wait_until(lambda: stack.metric("pagewire:requests_in_flight") == 1)
        waiting = clients.submit(stack.complete, [*prefix, 8402, *ids(30)], 3, logprobs=2, return_tokens_as_token_ids=True)
        stack.wait_until(lambda: stack.metric("pagewire:requests_in_flight") == 2)
        time.sleep(0.1)  # to reach decode
        assert not waiting.done()
    assert_equals_plain_run(waiting.result()["choices"][0])


def test_the_same_prompt_again_moves_at_most_its_last_block(stack: LocalStack, received: ReceivedBytes) -> None:
    for num_tokens in (300, 304, 305):
        prompt = ids(num_tokens, first=8200 + num_tokens)
        first = stack.tokens(prompt, 4)
        assert received() >= num_tokens * TOKEN_NBYTES
        assert stack.tokens(prompt, 4) == first
        assert received() <= BLOCK_SIZE * TOKEN_NBYTES
