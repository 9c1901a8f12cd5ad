"""Only KV that decode does not have goes to it: counted in bytes, on the real system."""

from __future__ import annotations

import time

import pytest
from local_stack import LocalStack, ids

BLOCK_SIZE = 16
TOKEN_NBYTES = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in fp32: layers, K and V, KV heads, head size, bytes."""
NUM_NEW_TOKENS = 330
"""The two blocks of a turn that are not all new have up to 31 old or empty tokens; with these that is within a tenth."""


class ReceivedBytes:
    """What decode has received since the last call."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._last = self._read()

    def _read(self) -> float:
        time.sleep(0.3)  # statistics travel with the lease
        return self._stack.metric("pagewire:bytes_received_total", "decode-0")

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
    assert 300 * TOKEN_NBYTES <= moved[0] <= (300 + BLOCK_SIZE) * TOKEN_NBYTES
    assert moved[1] == moved[0]


def test_a_turn_of_a_conversation_moves_little_more_than_its_new_tokens(stack: LocalStack, received: ReceivedBytes) -> None:
    """Two blocks are not all new: that in which the last answer ends and the last one of the prompt, which is partly filled."""
    prompt: list[int] = []
    shares = []
    for turn in range(5):
        new_tokens = ids(NUM_NEW_TOKENS, first=8100 + turn)
        prompt = [*prompt, *new_tokens]
        answer = stack.tokens(prompt, 20, ignore_eos=True)
        shares.append(received() / (len(new_tokens) * TOKEN_NBYTES))
        prompt = [*prompt, *answer]
    print("bytes moved, as a share of the new tokens':", [f"{share:.3f}" for share in shares])
    assert max(shares) <= 1.1


def test_the_same_prompt_again_moves_at_most_its_last_block(stack: LocalStack, received: ReceivedBytes) -> None:
    for num_tokens in (300, 304, 305):
        prompt = ids(num_tokens, first=8200 + num_tokens)
        first = stack.tokens(prompt, 4)
        assert received() >= num_tokens * TOKEN_NBYTES
        assert stack.tokens(prompt, 4) == first
        assert received() <= BLOCK_SIZE * TOKEN_NBYTES
