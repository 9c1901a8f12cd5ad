"""Log-probabilities of the prompt, put together from parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from router_answers import CNT, CNT_IDS, check_error, events
from router_harness import Stack, eventually
from stub_worker import Script, prompt_parts

from shared.messages import DecodeRequest, PrefillRequest, RequestFailed, WorkerMessage, WorkerTiming


def test_parts_in_any_order_twice_and_late_are_one_list(bare: Stack) -> None:
    shuffled = Script(about_prompt=lambda request: [*prompt_parts(request)[::-1], *prompt_parts(request, 3)], about_prompt_delay_s=0.3)
    bare.join("prefill", "p", shuffled)
    bare.join("decode", "d")  # its tokens come first
    bare.wait_ready()
    choice = bare.complete(prompt_logprobs=2, max_tokens=2).json()["choices"][0]
    assert [entry and entry[str(token_id)] for entry, token_id in zip(choice["prompt_logprobs"], CNT_IDS, strict=True)] == [
        None,
        *({"logprob": -position, "rank": 50, "decoded_token": text} for position, text in enumerate(", 2, 3, 4, 5,"[:13], 1)),
    ]
    assert list(choice["prompt_logprobs"][1]) == ["28", "100", "101"]
    assert choice["text"] == CNT[:2]


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_prompt_with_logprobs_comes_before_the_first_token(bare: Stack, stream: bool) -> None:
    bare.join("prefill", "p", Script(about_prompt_delay_s=0.2))
    bare.join("decode", "d")
    bare.wait_ready()
    response = bare.complete(echo=True, logprobs=0, max_tokens=2, n=2, stream=stream)
    answers = events(response.text) if stream else [response.json()]
    for index in (0, 1):
        choices = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        joined = {name: [value for choice in choices for value in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
        assert "".join(choice["text"] for choice in choices) == "1, 2, 3, 4, 5, 6"
        assert joined["token_logprobs"] == [None, *range(-1, -14, -1), -0.5, -0.5]
        assert "".join(joined["tokens"]) == "1, 2, 3, 4, 5, 6"
        assert joined["text_offset"] == list(range(16))


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_behind_a_stop_string_is_shown_where_tokens_waited_for_the_prompt(bare: Stack, stream: bool) -> None:
    """Decode has ended the sequence by itself before the first of its tokens is looked at."""
    bare.join("prefill", "p", Script(about_prompt_delay_s=0.4))
    bare.join("decode", "d")
    bare.wait_ready()
    response = bare.complete(echo=True, logprobs=0, max_tokens=8, stop=["7"], stream=stream)
    answers = events(response.text) if stream else [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert "".join(choice["text"] for choice in choices) == "1, 2, 3, 4, 5, 6, "
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]][14:] == [" ", "6", ",", " ", "7"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


def half(request: DecodeRequest | PrefillRequest) -> list[WorkerMessage]:
    return prompt_parts(request)[:2]


def finished(request: DecodeRequest | PrefillRequest) -> WorkerTiming:
    return WorkerTiming(
        request_id=request.request_id, phase="prefill", queue_ms=0, compute_ms=0, num_computed_tokens=0, num_cached_tokens=0, num_steps=1
    )


def test_parts_that_were_lost_are_fetched_by_another_attempt(bare: Stack) -> None:
    careless = bare.join("prefill", "a-careless", Script(about_prompt=lambda request: [*half(request), finished(request)]))
    decode = bare.join("decode", "d")
    bare.wait_ready()
    check_error(bare.complete(prompt_logprobs=0), 503)
    eventually(lambda: decode.num_active == 0)
    bare.join("prefill", "good")
    eventually(lambda: bare.client.get("/ready").json()["prefill"] == 2)
    for _ in range(4):
        assert all(bare.complete(prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"][1:])
    assert careless.of_kind(PrefillRequest)


def test_death_of_prefill_before_all_parts_came_is_made_good(bare: Stack) -> None:
    dying = bare.join("prefill", "a-dying", Script(about_prompt=half))
    bare.join("decode", "d")
    bare.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(bare.complete, prompt_logprobs=0)
        eventually(lambda: dying.of_kind(PrefillRequest))
        bare.join("prefill", "good")
        eventually(lambda: bare.client.get("/ready").json()["prefill"] == 2)
        assert not answer.done()
        dying.kill()
        assert all(answer.result().json()["choices"][0]["prompt_logprobs"][1:])


def test_decode_that_computes_the_prompt_after_all_sends_the_parts(bare: Stack) -> None:
    def failed(request: DecodeRequest | PrefillRequest) -> list[WorkerMessage]:
        return [*half(request), RequestFailed(request_id=request.request_id, message="lost", error_type="transfer", retryable=True)]

    bare.join("prefill", "p", Script(about_prompt=failed))
    decode = bare.join("decode", "d", Script(first_delay_s=0.3, recomputes=True))
    bare.wait_ready()
    assert all(bare.complete(prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"][1:])
    assert len(decode.of_kind(DecodeRequest)) == 1
