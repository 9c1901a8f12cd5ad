from __future__ import annotations

import json

import pytest

from services.router.openai.openai_types import ChatCompletionRequest, CompletionRequest, parse_body
from shared.errors import InvalidRequestError

VOCAB_SIZE = 100


def parse(**fields: object) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())


def refusal(**fields: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        body = parse(**fields)
        body.check_offered()
        body.check_token_ids(VOCAB_SIZE)
        body.prompts()
        body.sampling(16, VOCAB_SIZE)
    return caught.value


def test_defaults_are_those_of_the_api() -> None:
    sampling = parse().sampling(16, VOCAB_SIZE)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.num_logprobs) == (1.0, 1.0, 16, None)
    assert parse().num_choices == 1


def test_every_field_reaches_the_sampler() -> None:
    sampling = parse(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.3,
        logit_bias={"5": -100}, allowed_token_ids=[5, 6], seed=0, min_tokens=2, stop_token_ids=[9], ignore_eos=True, logprobs=0,
        prompt_logprobs=3, bad_words=["x", " y"],
    ).sampling(16, VOCAB_SIZE)  # fmt: skip
    assert sampling.model_dump() == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.3, "logit_bias": {5: -100.0}, "allowed_token_ids": (5, 6), "seed": 0,
        "max_tokens": 16, "min_tokens": 2, "stop_token_ids": (9,), "ignore_eos": True, "num_logprobs": 0, "num_prompt_logprobs": 3,
        "bad_words": ("x", "y"), "structured_output": None,
    }  # fmt: skip


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert parse(top_k=10**6).sampling(16, VOCAB_SIZE).top_k == VOCAB_SIZE


@pytest.mark.parametrize("prompt", [[True], [1.0], ["a", 1], [[1], "a"], [[1.5]], {}, 3, [None]])
def test_prompt_of_wrong_type_names_prompt(prompt: object) -> None:
    assert refusal(prompt=prompt).param == "prompt"


def test_prompt_forms_become_lists_of_prompts() -> None:
    assert parse(prompt="x").prompts() == ["x"]
    assert parse(prompt=["x", "y"]).prompts() == ["x", "y"]
    assert parse(prompt=[1, 2]).prompts() == [[1, 2]]
    assert parse(prompt=[[1], [2]]).prompts() == [[1], [2]]
    assert parse(prompt=[0]).prompts() == [[0]]


@pytest.mark.parametrize("key", ["-1", "+5", " 5", "5_0", "", "x", "٥", "1e2", "9" * 30])
def test_logit_bias_keys_are_plain_token_ids(key: str) -> None:
    assert refusal(logit_bias={key: 1}).param == "logit_bias"


def test_false_and_zero_are_different_defaults() -> None:
    parse(use_beam_search=False).check_offered()
    assert refusal(use_beam_search=0).param == "use_beam_search"


def test_message_says_what_to_do() -> None:
    assert "0 to 99" in refusal(stop_token_ids=[100]).message
    assert "leave it out" in refusal(suffix="x").message


def test_deprecated_functions_are_refused_with_the_way_to_go() -> None:
    assert "use tools" in refusal(functions=[{"name": "f"}]).message


@pytest.mark.parametrize("words", [[""], ["  "], ["x" * 129], ["a"] * 65, "a", [1]])
def test_bad_words_have_limits(words: object) -> None:
    assert refusal(bad_words=words).param == "bad_words"


@pytest.mark.parametrize("limit", [0, -2, 1.5, "1"])
def test_truncate_prompt_tokens_is_a_count_or_minus_one(limit: object) -> None:
    assert refusal(truncate_prompt_tokens=limit).param == "truncate_prompt_tokens"


def chat_refusal(**fields: object) -> InvalidRequestError:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatCompletionRequest, json.dumps(body).encode()).check_offered()
    return caught.value


def test_a_turn_is_continued_or_opened_but_not_both() -> None:
    assert chat_refusal(continue_final_message=True, add_generation_prompt=True).param == "continue_final_message"


@pytest.mark.parametrize(
    "variables", [{"messages": []}, {"tools": []}, {"add_generation_prompt": True}, [], {str(i): 1 for i in range(65)}]
)
def test_template_variables_do_not_take_the_place_of_fields(variables: object) -> None:
    assert chat_refusal(chat_template_kwargs=variables).param == "chat_template_kwargs"


def test_chat_prefers_max_completion_tokens_and_joins_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts, "name": "n"}], "max_tokens": 5, "max_completion_tokens": 7}
    request = parse_body(ChatCompletionRequest, json.dumps(body).encode())
    assert request.requested_max_tokens == 7
    assert request.messages[0].as_template_input() == {"role": "user", "content": "ab", "name": "n"}
    assert request.num_logprobs is None


def test_nested_field_is_named_by_its_root() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatCompletionRequest, b'{"messages": [{"role": 5}]}')
    assert caught.value.param == "messages"
    assert caught.value.message.startswith("messages.0.role")


def test_echo_and_prompt_logprobs_ask_for_the_larger_number() -> None:
    assert parse(logprobs=2).num_prompt_logprobs is None
    assert parse(echo=True).num_prompt_logprobs is None
    assert parse(echo=True, logprobs=0).num_prompt_logprobs == 0
    assert parse(echo=True, logprobs=2, prompt_logprobs=1).num_prompt_logprobs == 2
    assert parse(echo=True, logprobs=2, prompt_logprobs=7).num_prompt_logprobs == 7


@pytest.mark.parametrize("value", [-1, 21, True, 1.5, "2"])
def test_prompt_logprobs_is_a_small_number(value: object) -> None:
    assert refusal(prompt_logprobs=value).param == "prompt_logprobs"


def test_prompt_logprobs_are_refused_in_a_stream() -> None:
    assert refusal(prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    parse(echo=True, logprobs=1, stream=True).check_offered()


def test_no_tokens_may_be_asked_for_where_the_prompt_is_the_answer() -> None:
    assert refusal(max_tokens=0).param == "max_tokens"
    assert refusal(max_tokens=0, logprobs=1).param == "max_tokens"
    for fields in ({"echo": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}):
        parse(max_tokens=0, **fields).check_offered()
    chat = parse_body(ChatCompletionRequest, b'{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}')
    with pytest.raises(InvalidRequestError) as caught:
        chat.check_offered()
    assert caught.value.param == "max_completion_tokens"
