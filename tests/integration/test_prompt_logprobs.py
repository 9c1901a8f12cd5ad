"""prompt_logprobs and echo with logprobs, on the real model: the values of one plain forward pass, wherever the prompt is computed."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_stack import CNT, ROOT, LocalStack, ids
from plain_run import plain_logits

from shared.model_files.model_source import resolve_model

TOLERANCE = 2e-4
ABC = "Here is the English alphabet: ABC"


@pytest.fixture(scope="module")
def tight() -> Iterator[LocalStack]:
    """Chunks of 64 tokens, and a decode pool so small that requests wait and are preempted; one machine does both parts."""
    with LocalStack("--aggregated", debug="true", max_num_batched_tokens=64, num_blocks=40) as running:
        yield running


@functools.cache
def _text() -> list[int]:
    return resolve_model("smollm2").load_tokenizer().encode((ROOT / "ARCHITECTURE.md").read_text())


def prompt(num_tokens: int, seed: int) -> list[int]:
    """A piece of English: on tokens drawn at random two runs in fp32 may be 3e-4 apart, and as far from one in fp64."""
    first = random.Random(seed).randrange(len(_text()) - num_tokens)
    return _text()[first : first + num_tokens]


def assert_equals_plain_pass(entries: list[dict[str, Any] | None], token_ids: list[int], num_top: int) -> None:
    expected = plain_logits(token_ids).log_softmax(-1)
    assert len(entries) == len(token_ids) and entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        assert entry is not None
        row, own = expected[position - 1], str(token_ids[position])
        assert next(iter(entry)) == own
        assert len(entry) == num_top + (entry[own]["rank"] > num_top)
        for name, found in entry.items():
            assert abs(found["logprob"] - float(row[int(name)])) < TOLERANCE, f"position {position}, token {name}"
        least, most = ((row > row[int(own)] + shift).sum() for shift in (TOLERANCE, -TOLERANCE))  # neighbours may change places
        assert least < entry[own]["rank"] <= most


def prompt_logprobs(stack: LocalStack, token_ids: list[int], num_top: int, max_tokens: int = 1, **options: Any) -> Any:
    return stack.complete(token_ids, max_tokens, prompt_logprobs=num_top, **options)["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 128, 300])
def test_values_computed_on_prefill_are_those_of_a_plain_pass(stack: LocalStack, length: int) -> None:
    token_ids = prompt(length, seed=length)
    assert_equals_plain_pass(prompt_logprobs(stack, token_ids, 3), token_ids, 3)


def test_values_computed_in_chunks_beside_others_are_those_of_a_plain_pass(tight: LocalStack) -> None:
    prompts = [prompt(40 + 17 * index, seed=100 + index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda token_ids: prompt_logprobs(tight, token_ids, 2, 40, ignore_eos=True), prompts))
    for token_ids, entries in zip(prompts, answers, strict=True):
        assert_equals_plain_pass(entries, token_ids, 2)
    assert tight.counter("decode-0", "preemptions") > 0, "the pool was not small enough to show anything"
    tight.wait_until_idle()


@pytest.mark.parametrize("which", ["stack", "tight"])
def test_a_cached_prefix_changes_nothing(which: str, request: pytest.FixtureRequest) -> None:
    system: LocalStack = request.getfixturevalue(which)
    token_ids = [*ids(112, first=901), *CNT[:5]]
    plain = system.complete(token_ids, 1)
    answer = system.complete(token_ids, 1, echo=True, logprobs=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    logprobs = answer["choices"][0]["logprobs"]
    assert [len(values) for values in logprobs.values()] == [118] * 4
    assert logprobs["token_logprobs"][0] is None and all(value is not None for value in logprobs["token_logprobs"][1:])
    expected = plain_logits([*token_ids, *plain["choices"][0]["token_ids"]]).log_softmax(-1)
    for position, value in enumerate(logprobs["token_logprobs"][1:117], 1):
        assert abs(value - float(expected[position - 1, token_ids[position]])) < TOLERANCE
    assert system.complete(token_ids, 1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 112
    system.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_echo_lists_the_prompt_before_the_answer(stack: LocalStack, stream: bool) -> None:
    if stream:
        chunks = [chunk["choices"][0] for chunk in stack.stream(ABC, 3, echo=True, logprobs=1).chunks]
        text = "".join(chunk["text"] for chunk in chunks)
        logprobs: dict[str, list[Any]] = {name: [v for chunk in chunks for v in chunk["logprobs"][name]] for name in chunks[0]["logprobs"]}
    else:
        choice = stack.complete(ABC, 3, echo=True, logprobs=1)["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text.startswith(ABC)
    assert logprobs["tokens"][0] == "Here" and "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert [len(values) for values in logprobs.values()] == [10] * 4
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_without_generating(stack: LocalStack, stream: bool) -> None:
    """What evaluation harnesses send."""
    if stream:
        streamed = stack.stream(ABC, 0, echo=True, logprobs=1)
        (chunk,), usage = streamed.chunks, streamed.usage
        choice = chunk["choices"][0]
    else:
        answer = stack.complete(ABC, 0, echo=True, logprobs=1)
        choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (ABC, "length", [])
    assert usage is not None and (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 0, 7)
    assert [len(values) for values in choice["logprobs"].values()] == [7] * 4
    stack.wait_until_idle()


def test_echo_and_prompt_logprobs_may_ask_for_different_numbers(stack: LocalStack) -> None:
    choice = stack.complete(CNT, 0, echo=True, logprobs=1, prompt_logprobs=4)["choices"][0]
    assert_equals_plain_pass(choice["prompt_logprobs"], CNT, 4)
    assert max(len(top) for top in choice["logprobs"]["top_logprobs"][1:]) <= 2


def test_every_choice_of_every_prompt_has_them(stack: LocalStack) -> None:
    prompts = [prompt(20, seed=7), prompt(35, seed=8)]
    answer = stack.complete(prompts, 2, n=2, prompt_logprobs=1, temperature=1.0, seed=3)
    assert len(answer["choices"]) == 4
    for index, choice in enumerate(answer["choices"]):
        assert_equals_plain_pass(choice["prompt_logprobs"], prompts[index // 2], 1)


def test_a_conversation_has_them_beside_its_choices(stack: LocalStack) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    token_ids = stack.post("/tokenize", {"messages": messages})["tokens"]
    answer = stack.post("/v1/chat/completions", {"messages": messages, "max_tokens": 0, "prompt_logprobs": 2, "temperature": 0})
    assert_equals_plain_pass(answer["prompt_logprobs"], token_ids, 2)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
