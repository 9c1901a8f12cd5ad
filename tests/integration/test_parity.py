"""Prefill and decode apart answer as one plain run of the same weights does: token for token, log-probabilities within 1e-3."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_stack import CNT, LocalStack, ids
from plain_run import assert_equals_plain_run

LENGTHS = [
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 18, 20, 23, 25, 29, 31, 32, 33, 34, 36, 40, 44, 47, 48, 49),
    *(50, 55, 60, 63, 64, 65, 70, 75, 79, 80, 81, 90, 95, 96, 97, 100, 111, 112, 113, 126, 127, 128, 129, 144, 160, 200),
    *(10, 12, 19, 255, 256, 257, 500, 3000),
]


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(17, 49152) for _ in range(num_tokens)]


def choice(stack: LocalStack, token_ids: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    answer = stack.complete(token_ids, max_tokens, logprobs=5, return_tokens_as_token_ids=True, ignore_eos=True, **options)
    result: dict[str, Any] = answer["choices"][0]
    assert len(result["token_ids"]) == max_tokens
    return result


@pytest.mark.parametrize("lengths", [LENGTHS[::4], pytest.param(LENGTHS, marks=pytest.mark.long)], ids=["a quarter", "all"])
def test_prompts_of_all_lengths_equal_the_plain_run(stack: LocalStack, lengths: list[int]) -> None:
    for length in lengths:
        assert_equals_plain_run(choice(stack, prompt(length, seed=length), 3))


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 500])
def test_prompts_around_a_chunk_boundary_equal_the_plain_run(tight: LocalStack, length: int) -> None:
    assert_equals_plain_run(choice(tight, prompt(length, seed=1000 + length), 4))


def test_sixteen_at_once_equal_the_plain_run(stack: LocalStack) -> None:
    with ThreadPoolExecutor(16) as pool:
        for result in pool.map(lambda i: choice(stack, prompt(10 + 9 * i, seed=2000 + i), 12), range(16)):
            assert_equals_plain_run(result)


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 6])
def test_answers_after_a_cache_hit_equal_the_plain_run(stack: LocalStack, num_blocks: int) -> None:
    prefix = prompt(16 * num_blocks, seed=3000 + num_blocks)
    stack.complete([*prefix, 100], 1)
    warm = stack.complete([*prefix, *CNT], 8, logprobs=5, return_tokens_as_token_ids=True)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * num_blocks
    assert_equals_plain_run(warm["choices"][0])


def test_decode_that_holds_part_of_a_prompt_takes_the_right_rest(stack: LocalStack) -> None:
    prefix = prompt(16 * 31, seed=3100)
    stack.complete(prefix, 1)
    for tail in ([], CNT, [*CNT, 5], [*CNT, 5, 6], prompt(40, seed=3101)):
        assert_equals_plain_run(choice(stack, [*prefix, *tail], 4))


def test_answers_after_eviction_equal_the_plain_run(tight: LocalStack) -> None:
    prompts = [prompt(200 + 3 * i, seed=4000 + i) for i in range(6)]
    first = [choice(tight, token_ids, 3)["token_ids"] for token_ids in prompts]
    again = [choice(tight, token_ids, 3) for token_ids in prompts]
    assert [result["token_ids"] for result in again] == first
    for result in again:
        assert_equals_plain_run(result)


def test_preempted_requests_equal_the_plain_run_and_count_as_asked(tight: LocalStack) -> None:
    before = tight.counter("decode-0", "preemptions")
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda i: choice(tight, prompt(60 + i, seed=5000 + i), 40), range(12)))
    for result in results:
        assert result["finish_reason"] == "length"
        assert_equals_plain_run(result)
    tight.wait_until_idle()
    assert tight.counter("decode-0", "preemptions") > before, "the pool was not small enough to show anything"


def test_a_seeded_request_does_not_depend_on_company_or_streaming(stack: LocalStack) -> None:
    options = {"seed": 42, "temperature": 0.8, "ignore_eos": True}
    alone = stack.tokens("The capital of France is", 16, **options)
    with ThreadPoolExecutor(4) as pool:
        noise = [pool.submit(stack.tokens, "The capital of Germany is", 16, temperature=0.8) for _ in range(3)]
        assert stack.stream("The capital of France is", 16, **options).token_ids == alone
        for future in noise:
            future.result()


def test_repeated_prompt_of_whole_blocks_still_computes_its_last_token(stack: LocalStack) -> None:
    token_ids = ids(64, first=900)
    answers = [stack.complete(token_ids, 4) for _ in range(3)]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 48, 48]
