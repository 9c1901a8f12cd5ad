"""What the router answers over real HTTP: texts, streams, choices, usage, log-probabilities."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time

import pytest
from router_answers import CNT, CNT_IDS, LETTERS, LLAMA, check_error, decode_of, events, streamed_text
from router_harness import Stack, eventually
from stub_worker import Script, StubWorker

from shared.messages import AbortRequest, DecodeRequest, PrefillRequest
from shared.sampling_params import BeamSearchParams


def test_completion_is_the_text_of_the_tokens(stack: Stack) -> None:
    body = stack.complete().json()
    assert body["choices"] == [{"index": 0, "text": CNT, "logprobs": None, "finish_reason": "length", "stop_reason": None}]
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == {"prompt_tokens": 14, "completion_tokens": 24, "total_tokens": 38, **details}
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"


def test_token_ids_and_text_are_the_same_prompt(stack: Stack) -> None:
    assert stack.complete(prompt=CNT_IDS).json()["usage"]["prompt_tokens"] == 14
    assert decode_of(stack).of_kind(DecodeRequest)[-1].token_ids == tuple(CNT_IDS)


def test_stream_has_one_chunk_a_token_and_all_keys(stack: Stack) -> None:
    chunks = events(stack.complete(stream=True).text)
    assert len(chunks) == 24
    assert streamed_text(chunks) == CNT
    for chunk in chunks:
        assert {"id", "object", "created", "model", "choices"} == set(chunk)
        assert {"index", "text", "logprobs", "finish_reason", "stop_reason"} == set(chunk["choices"][0])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 23 + ["length"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"logprobs": True}, {"stop": ["6"]}, {"stream_options": {"include_usage": True}}])
def test_chunks_of_a_conversation_have_all_keys(stack: Stack, body: dict[str, object]) -> None:
    chunks = events(stack.chat(stream=True, max_tokens=4, **body).text)
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all({"index", "delta", "logprobs", "finish_reason"} <= set(choice) for choice in choices)
    for index in {choice["index"] for choice in choices}:
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] is None for choice in own] == [True] * (len(own) - 1) + [False]
        assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)


def test_usage_comes_last_and_only_when_asked_for(stack: Stack) -> None:
    chunks = events(stack.complete(stream=True, stream_options={"include_usage": True}).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 38
    assert all("usage" not in chunk for chunk in chunks[:-1])
    chunks = events(stack.complete(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == list(range(1, 25))
    check_error(stack.complete(stream_options={"include_usage": True}), 400, "stream_options")


def test_chat_streams_the_role_with_the_first_token(stack: Stack) -> None:
    chunks = events(stack.chat(stream=True, max_completion_tokens=4).text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": " "}, {"content": "6"}, {"content": ","}, {"content": " "},
    ]  # fmt: skip
    assert chunks[0]["object"] == "chat.completion.chunk"


def test_chat_answer_and_default_length(stack: Stack) -> None:
    decode_of(stack).script = Script(token_ids=LETTERS)
    body = stack.chat().json()
    assert body["choices"][0]["message"]["content"] == "DEFGHIJKLMNOPQRSTUVW"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 13
    request = decode_of(stack).of_kind(DecodeRequest)[-1]
    assert request.sampling.max_tokens == 8192 - len(request.token_ids)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["DEFGHIJ"], "", "DEFGHIJ"), (["FGHI"], "DE", "FGHI"), (["IJ", "GHIJ"], "DEF", "GHIJ"), (["W"], "DEFGHIJKLMNOPQRSTUV", "W"),
        (["ZZZ"], "DEFGHIJKLMNOPQRSTUVW", None), ("E", "D", "E"), (["M"], "DEFGHIJKL", "M"), (["WXYZ!"], "DEFGHIJKLMNOPQRSTUVW", None),
    ],
)  # fmt: skip
def test_stop_strings_cut_at_the_match_streamed_or_not(stack: Stack, stop: object, text: str, reason: str | None) -> None:
    decode_of(stack).script = Script(token_ids=LETTERS)
    whole = stack.complete(stop=stop, max_tokens=12).json()
    chunks = events(stack.complete(stop=stop, max_tokens=12, stream=True, stream_options={"include_usage": True}).text)
    last = chunks[-2]["choices"][0]
    assert whole["choices"][0]["text"] == streamed_text(chunks) == text
    expected = ("stop", reason) if reason else ("length", None)
    assert (last["finish_reason"], last["stop_reason"]) == expected
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == expected
    assert chunks[-1]["usage"] == whole["usage"]
    eventually(lambda: decode_of(stack).num_active == 0)


def test_stop_string_aborts_at_decode(stack: Stack) -> None:
    decode_of(stack).script = Script(token_ids=LETTERS, repeats=True, delay_s=0.01)
    answer = stack.complete(stop=["GH"], max_tokens=1000).json()
    assert answer["choices"][0]["text"] == "DEF"
    assert answer["usage"]["completion_tokens"] == 2
    request_id = decode_of(stack).of_kind(DecodeRequest)[-1].request_id
    eventually(lambda: request_id in decode_of(stack).aborted())


def test_stop_token_adds_no_text_unless_included(stack: Stack) -> None:
    choice = stack.complete(stop_token_ids=[41]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" 6, 7, 8, ", "stop", 41)
    assert stack.complete(stop_token_ids=[41], include_stop_str_in_output=True).json()["choices"][0]["text"] == " 6, 7, 8, 9"


def read_slowly(stack: Stack, body: dict[str, object]) -> list[dict[str, object]]:
    """The events of a stream whose client takes a little at a time through a small window, so that pieces wait and come together."""
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.socket() as window, contextlib.closing(http.client.HTTPConnection(host, int(port))) as connection:
        window.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        window.connect((host, int(port)))
        connection.sock = window
        connection.request("POST", "/v1/completions", json.dumps({"stream": True, **body}), {"content-type": "application/json"})
        response = connection.getresponse()
        time.sleep(0.2)
        received = b""
        while part := response.read(7 if len(received) < 3000 else 1000):
            received += part
            time.sleep(0.0002)
    return events(received.decode())


@pytest.mark.parametrize("tokens", [LETTERS, (*LLAMA, 7906, 240, 178, 239, 230)])
def test_a_slow_reader_gets_the_same_text(stack: Stack, tokens: tuple[int, ...]) -> None:
    decode_of(stack).script = Script(token_ids=tokens, repeats=True)
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stop": ["WDEFX", "\u754c\U0001f999!"]}
    assert streamed_text(read_slowly(stack, body)) == stack.complete(**body).json()["choices"][0]["text"]


def test_first_token_can_be_the_last(stack: Stack) -> None:
    for stream in (False, True):
        response = stack.complete(max_tokens=1, stream=stream)
        choice = events(response.text)[-1]["choices"][0] if stream else response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (" ", "length")
    assert stack.complete(stop=[" "], max_tokens=8).json()["choices"][0] == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": " ",
    }  # fmt: skip


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 12])
def test_characters_of_several_tokens_are_never_split(stack: Stack, max_tokens: int) -> None:
    decode_of(stack).script = Script(token_ids=LLAMA, repeats=True)
    whole = stack.complete(max_tokens=max_tokens).json()["choices"][0]["text"]
    assert whole == "\U0001f999" * (max_tokens // 3) + ("�" if max_tokens % 3 else "")
    assert streamed_text(events(stack.complete(max_tokens=max_tokens, stream=True).text)) == whole


def test_choices_each_end_once_and_count_the_prompt_once(stack: Stack) -> None:
    chunks = events(stack.complete(n=3, seed=1, max_tokens=8, stream=True, stream_options={"include_usage": True}).text)
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert chunks[-1]["usage"]["prompt_tokens"] == 14
    assert chunks[-1]["usage"]["completion_tokens"] == 24


def test_several_choices_are_one_request_to_each_worker(stack: Stack) -> None:
    before = [len(worker.of_kind(kind)) for worker, kind in zip(stack.workers, (PrefillRequest, DecodeRequest), strict=True)]
    answer = stack.complete(prompt=CNT_IDS * 4, n=3, max_tokens=2)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]

    def received() -> list[int]:
        after = [len(worker.of_kind(kind)) for worker, kind in zip(stack.workers, (PrefillRequest, DecodeRequest), strict=True)]
        return [new - old for new, old in zip(after, before, strict=True)]

    eventually(lambda: received() == [1, 1])  # decode may answer before prefill has read its message
    assert decode_of(stack).of_kind(DecodeRequest)[-1].num_sequences == 3


def test_a_stop_string_ends_one_choice_and_decode_is_told_which(stack: Stack) -> None:
    decode_of(stack).script = Script(variants=[Script.token_ids, LLAMA * 8, Script.token_ids], delay_s=0.005)
    for stream in (False, True):
        response = stack.complete(n=3, stop=["\U0001f999"], max_tokens=20, stream=stream)
        chunks = events(response.text) if stream else [response.json()]
        texts = ["", "", ""]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts[1] == "" and texts[0] == texts[2] == CNT[: len(texts[0])] and len(texts[0]) > 10
        request_id = decode_of(stack).of_kind(DecodeRequest)[-1].request_id
        eventually(lambda request_id=request_id: aborted_sequences(decode_of(stack), request_id))
        assert aborted_sequences(decode_of(stack), request_id) == [1]


def aborted_sequences(worker: StubWorker, request_id: str) -> list[int | None]:
    return [message.sequence_index for message in worker.of_kind(AbortRequest) if message.request_id == request_id]


def test_a_stop_string_in_every_choice_ends_the_request(stack: Stack) -> None:
    decode_of(stack).script = Script(delay_s=0.005)
    assert [choice["text"] for choice in stack.complete(n=2, stop=["6"], max_tokens=20).json()["choices"]] == [" ", " "]
    request_id = decode_of(stack).of_kind(DecodeRequest)[-1].request_id
    eventually(lambda: request_id in decode_of(stack).aborted() and decode_of(stack).num_active == 0)


def test_best_of_returns_the_most_likely_sequences_and_counts_all(stack: Stack) -> None:
    likely, unlikely = [33, 28, 33, 28], [34, 28, 34, 28]
    decode_of(stack).script = Script(variants=[unlikely, likely, unlikely, likely[:2]], logprob_of={34: -3.0})
    body = stack.complete(n=2, best_of=4, max_tokens=4, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    # Equal means: the earlier sequence first. The last one ended by EOS.
    assert [choice["token_ids"] for choice in body["choices"]] == [likely, [33, 28, 2]]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 15
    request = decode_of(stack).of_kind(DecodeRequest)[-1]
    assert (request.num_sequences, request.beam_search) == (4, None)
    assert stack.complete(best_of=2, max_tokens=4, logprobs=0).json()["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 4
    check_error(stack.complete(n=2, best_of=1), 400, "best_of")
    check_error(stack.complete(n=1, best_of=2, stream=True), 400, "best_of")
    assert len(events(stack.complete(n=2, best_of=2, stream=True, max_tokens=2).text)) == 4


def test_a_beam_search_asks_decode_for_its_width(stack: Stack) -> None:
    body = stack.complete(n=2, best_of=3, use_beam_search=True, length_penalty=0.5, early_stopping=True, max_tokens=2).json()
    assert len(body["choices"]) == 2
    request = decode_of(stack).of_kind(DecodeRequest)[-1]
    assert request.num_sequences == 2
    assert request.beam_search == BeamSearchParams(width=3, length_penalty=0.5, early_stopping=True)
    stack.complete(n=4, use_beam_search=True, max_tokens=1)
    assert decode_of(stack).of_kind(DecodeRequest)[-1].beam_search == BeamSearchParams(width=4)
    check_error(stack.complete(use_beam_search=True, stream=True), 400, "stream")
    check_error(stack.complete(use_beam_search=True, length_penalty=11), 400, "length_penalty")
    check_error(stack.complete(length_penalty=2), 400, "length_penalty")
    check_error(stack.complete(early_stopping=True), 400, "early_stopping")


def test_several_prompts_are_answered_in_order(stack: Stack) -> None:
    body = stack.complete(prompt=["a b", "c"], n=2, max_tokens=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 8


def test_echo_puts_the_prompt_before_the_text(stack: Stack) -> None:
    assert stack.complete(echo=True).json()["choices"][0]["text"] == "1, 2, 3, 4, 5," + CNT
    assert stack.complete(echo=True, prompt=CNT_IDS).json()["choices"][0]["text"] == "1, 2, 3, 4, 5," + CNT
    assert streamed_text(events(stack.complete(echo=True, stream=True).text)) == "1, 2, 3, 4, 5," + CNT


def test_completion_logprobs_streamed_lists_join_to_the_whole(stack: Stack) -> None:
    whole = stack.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert "".join(whole["tokens"]) == CNT
    assert whole["text_offset"][:4] == [0, 1, 2, 3]
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(stack.complete(logprobs=2, stream=True).text)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts for entry in part[name]] == whole[name]


def test_logprobs_zero_is_on(stack: Stack) -> None:
    logprobs = stack.complete(logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"] == [{" ": -0.5}, {"6": -0.5}]
    entry = stack.chat(logprobs=True, top_logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"]["content"][0]
    assert entry == {"token": " ", "logprob": -0.5, "bytes": [32], "top_logprobs": []}
    for wrong in (6, -1):
        check_error(stack.complete(logprobs=wrong), 400, "logprobs")


def test_partial_characters_have_bytes_in_logprobs(stack: Stack) -> None:
    decode_of(stack).script = Script(token_ids=LLAMA)
    content = stack.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == "\U0001f999".encode()
    assert content[-1]["token"] == "<|im_end|>"
    tokens = stack.complete(logprobs=0, max_tokens=3).json()["choices"][0]["logprobs"]["tokens"]
    assert all(token.startswith("bytes:\\x") for token in tokens)
    assert len(set(tokens)) == 3


@pytest.mark.parametrize("options", [{}, {"skip_special_tokens": False}, {"stop_token_ids": [57], "include_stop_str_in_output": True}])
def test_bytes_of_all_tokens_are_the_bytes_of_the_text(stack: Stack, options: dict[str, object]) -> None:
    """A special token that is not shown has its name and no bytes, wherever it stands."""
    decode_of(stack).script = Script(token_ids=(*LLAMA, 1, 33203, 57, 58))
    for stream in (False, True):
        response = stack.chat(logprobs=True, top_logprobs=1, stream=stream, **options)
        choices = [chunk["choices"][0] for chunk in (events(response.text) if stream else [response.json()])]
        content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        text = "".join(choice["delta" if stream else "message"]["content"] for choice in choices)
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
        assert content[3]["token"] == "<|im_start|>"
        assert ("<|im_start|>" in text) == (options.get("skip_special_tokens") is False)
        assert text.endswith("I" if "stop_token_ids" in options else "J")


def test_cached_tokens_are_reported(stack: Stack) -> None:
    decode_of(stack).script = Script(num_cached_tokens=48)
    assert stack.complete(prompt=CNT_IDS * 5).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


def test_null_is_as_absent(stack: Stack) -> None:
    names = ["max_tokens", "temperature", "top_p", "n", "stop", "logprobs", "echo", "seed", "stream", "stream_options", "logit_bias"]
    names += ["suffix", "user", "presence_penalty", "best_of", "top_k"]
    body = stack.complete(**dict.fromkeys(names)).json()
    assert body["usage"]["completion_tokens"] == 16
