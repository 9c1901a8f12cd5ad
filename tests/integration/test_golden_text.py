"""The golden continuations of the packaged model: exact token ids over HTTP, streamed and not."""

from __future__ import annotations

import pytest
from local_stack import CNT, LocalStack

LLAMA = "\U0001f999"
GOLDEN = {
    "CNT": (
        "1, 2, 3, 4, 5,", 24,
        [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216, 33, 34, 28],
        " 6, 7, 8, 9, 10, 11, 12,",
    ),
    "ABC": ("Here is the English alphabet: ABC", 12, [33203,23960,57,58,59,34519,62,7627,43323,3127,19539,71], "DEFGHIJKLMNOPQRSTUVW"),
    "LLAMA": (LLAMA * 8, 12, [10813, 116, 243] * 4, LLAMA * 4),
    "HAN": ("\u4e16\u754c" * 6, 10, [7906, 240, 178, 239, 230] * 2, "\u4e16\u754c" * 2),
    "PAR": ("The capital of France is", 1, [7042], " Paris"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_continuation_whole_and_streamed(stack: LocalStack, name: str) -> None:
    prompt, max_tokens, token_ids, text = GOLDEN[name]
    whole = stack.complete(prompt, max_tokens)
    choice = whole["choices"][0]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == (token_ids, text, "length")
    streamed = stack.stream(prompt, max_tokens)
    assert (streamed.token_ids, streamed.text) == (token_ids, text)
    assert len(streamed.chunks) == max_tokens, "one token, one chunk"
    num_prompt_tokens = len(choice["prompt_token_ids"])
    for usage in (whole["usage"], streamed.usage):
        assert usage is not None
        assert usage.pop("prompt_tokens_details")["cached_tokens"] in (0, (num_prompt_tokens - 1) // 16 * 16)
        assert usage == {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": max_tokens,
            "total_tokens": num_prompt_tokens + max_tokens,
        }


def test_prompts_as_text_list_ids_and_lists_of_ids_agree(stack: LocalStack) -> None:
    text = "1, 2, 3, 4, 5,"
    as_text = stack.tokens(text, 24)
    assert stack.tokens([text], 24) == stack.tokens(CNT, 24) == stack.tokens([CNT], 24) == as_text
    both = stack.complete([text, "The capital of France is"], 3)
    assert [choice["token_ids"][0] for choice in both["choices"]] == [216, 7042]
    assert stack.post("/tokenize", {"prompt": text})["tokens"] == CNT
    assert stack.post("/detokenize", {"tokens": CNT})["prompt"] == text


def test_chat_answers_from_the_model(stack: LocalStack) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24, "temperature": 0}
    answer = stack.post("/v1/chat/completions", body)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_prefill_computed_the_prompt_and_decode_none_of_it(stack: LocalStack) -> None:
    before = stack.statistics()
    stack.complete([7, *CNT, *range(100, 300)], 4)
    after = stack.statistics()
    assert after["prefill-0"].counters["prompt_tokens_computed"] == before["prefill-0"].counters["prompt_tokens_computed"] + 215
    assert after["decode-0"].counters["local_prompt_tokens"] == before["decode-0"].counters["local_prompt_tokens"]
