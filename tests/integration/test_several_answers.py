"""n, best_of and beam search on the real system: one prefill, one transfer, shared blocks, and every block back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from local_stack import CNT, LocalStack, ids
from plain_beam_search import plain_beam_search
from plain_run import plain_logits

RANDOM = {"temperature": 1.5, "seed": 3, "ignore_eos": True}
PROMPTS = [
    "The capital of France is", "Once upon a time", "def main():", "Water boils at", "The first president of", "Dear Sir,",
    "import numpy as", "1, 2, 3, 4,", "The quick brown fox", "My favourite food is", "In the year 1969", "To be or not",
    "A triangle has", "Monday, Tuesday,", "She opened the door", "The opposite of hot", "E = mc", "Red, green and", "Hi", "Python is a",
]  # fmt: skip


@pytest.fixture(scope="module")
def tight() -> Iterator[LocalStack]:
    """A decode pool that holds the prompts of these tests and little more."""
    with LocalStack(debug="true", decode_num_blocks=14, prefill_num_blocks=60) as running:
        yield running


def test_eight_answers_to_a_long_prompt_are_one_prefill_and_one_transfer(stack: LocalStack) -> None:
    stack.wait_until_idle()
    names = {"prompt_tokens_computed": "prefill-0", "transfers_expected": "decode-0", "local_prompt_tokens": "decode-0"}
    before = stack.statistics()
    peak = 0.0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(stack.complete, ids(2000, first=7001), 40, n=8, **RANDOM)
        while not future.done():
            peak = max(peak, stack.metric("pagewire:kv_blocks_used", "decode-0"))
            time.sleep(0.05)
    answer = future.result()
    assert peak <= 125 + 8 * (40 // 16 + 1) + 8
    assert answer["usage"] == {
        "prompt_tokens": 2000, "completion_tokens": 320, "total_tokens": 2320, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 8
    stack.wait_until_idle()
    after = stack.statistics()
    changes = {name: after[worker].counters[name] - before[worker].counters[name] for name, worker in names.items()}
    assert changes == {"prompt_tokens_computed": 2000, "transfers_expected": 1, "local_prompt_tokens": 0}


def test_seeded_answers_are_the_same_where_they_take_turns(stack: LocalStack, tight: LocalStack) -> None:
    prompt = ids(40, first=7100)
    expected = [choice["token_ids"] for choice in stack.complete(prompt, 40, n=6, **RANDOM)["choices"]]
    assert expected[0] == stack.tokens(prompt, 40, **RANDOM)
    before = tight.counter("decode-0", "preemptions")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(tight.tokens, CNT, 12)
        assert [choice["token_ids"] for choice in tight.complete(prompt, 40, n=6, **RANDOM)["choices"]] == expected
        assert len(other.result()) == 12
    tight.wait_until_idle()
    assert tight.counter("decode-0", "preemptions") > before, "the pool was not small enough to show anything"


def test_streamed_answers_come_token_by_token_and_equal_the_whole(stack: LocalStack) -> None:
    whole = stack.complete(CNT, 16, n=4, **RANDOM)
    streamed = stack.stream(CNT, 16, n=4, **RANDOM)
    tokens: list[list[int]] = [[] for _ in range(4)]
    for chunk in streamed.chunks:
        [choice] = chunk["choices"]
        assert len(choice["token_ids"]) == 1
        tokens[choice["index"]] += choice["token_ids"]
    assert tokens == [choice["token_ids"] for choice in whole["choices"]]
    assert streamed.usage is not None and streamed.usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a_stop_string_ends_its_own_answer_only(stack: LocalStack) -> None:
    free = stack.complete(CNT, 24, n=4, **RANDOM)["choices"]
    stop = next(word for word in free[1]["text"].split(" ") if len(word) > 3 and not any(word in free[i]["text"] for i in (0, 2, 3)))
    stopped = stack.complete(CNT, 24, n=4, stop=[stop], **RANDOM)["choices"]
    assert [choice["finish_reason"] for choice in stopped] == ["length", "stop", "length", "length"]
    assert stopped[1]["text"] == free[1]["text"][: free[1]["text"].index(stop)] and stopped[1]["stop_reason"] == stop
    assert [choice["token_ids"] for choice in stopped if choice["index"] != 1] == [free[i]["token_ids"] for i in (0, 2, 3)]
    stack.wait_until_idle()


def test_a_client_that_hangs_up_frees_every_sequence(stack: LocalStack) -> None:
    with stack.request_under_way(ids(100, first=7300), 2000, ignore_eos=True, n=8):
        stack.wait_until(lambda: stack.metric("vllm:num_requests_running", "decode-0") == 8)
    stack.wait_until_idle()


def test_a_client_that_hangs_up_ends_a_beam_search(stack: LocalStack) -> None:
    with stack.request_under_way(ids(100, first=7301), 2000, stream=False, ignore_eos=True, n=4, use_beam_search=True):
        stack.wait_until(lambda: stack.metric("vllm:num_requests_running", "decode-0") == 4)
    stack.wait_until_idle()


def test_best_of_are_those_of_the_highest_mean_logprob(stack: LocalStack) -> None:
    drawn = stack.complete(CNT, 12, n=5, logprobs=0, temperature=1.5, seed=3)["choices"]
    scores = [sum(choice["logprobs"]["token_logprobs"]) / len(choice["token_ids"]) for choice in drawn]
    order = sorted(range(5), key=lambda index: -scores[index])
    answer = stack.complete(CNT, 12, n=2, best_of=5, temperature=1.5, seed=3)
    assert [choice["token_ids"] for choice in answer["choices"]] == [drawn[index]["token_ids"] for index in order[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in drawn)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Short prompts on several threads, beside the stack's own, mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_prompts", [5, pytest.param(len(PROMPTS), marks=pytest.mark.long)])
def test_beam_search_equals_the_plain_search(stack: LocalStack, num_prompts: int) -> None:
    for text in PROMPTS[:num_prompts]:
        answer = stack.complete(text, 4, n=4, use_beam_search=True)
        prompt = answer["choices"][0]["prompt_token_ids"]
        expected = plain_beam_search(lambda tokens: plain_logits(tokens)[-1], prompt, 4, 4, ending_ids=(2,))
        assert [choice["token_ids"] for choice in answer["choices"]] == [tokens for _, tokens in expected], text


def test_beam_search_under_pressure_equals_beam_search_with_room(stack: LocalStack, tight: LocalStack) -> None:
    bodies = [(ids(100 + 16 * i, first=7400 + i), 24) for i in range(3)]
    options = {"n": 3, "best_of": 4, "use_beam_search": True, "ignore_eos": True}
    expected = [[choice["token_ids"] for choice in stack.complete(*body, **options)["choices"]] for body in bodies]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: tight.complete(*body, **options), bodies))
    assert [[choice["token_ids"] for choice in answer["choices"]] for answer in answers] == expected
    tight.wait_until_idle()


def test_beam_search_ends_with_a_forced_stop_and_is_cut_at_stop_strings(stack: LocalStack) -> None:
    ended = stack.complete("Hi", 10, n=2, use_beam_search=True, logit_bias={"2": 20}, stop=["###"])
    assert [choice["finish_reason"] for choice in ended["choices"]].count("stop") >= 1
    assert all(len(choice["token_ids"]) <= 10 for choice in ended["choices"])
    cut = stack.complete(CNT, 10, n=2, use_beam_search=True, stop=["7"])["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (" 6, ", "stop", "7")
    whole = stack.post("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "n": 2, "use_beam_search": True,
        "logprobs": True, "top_logprobs": 2,
    })  # fmt: skip
    assert [len(choice["logprobs"]["content"]) for choice in whole["choices"]] == [6, 6]
