"""The router over real HTTP, ZeroMQ and Redis, with stub workers that emit scripted tokens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import openai
import pytest
import redis
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from router_harness import RedisServer, Stack, eventually, free_port
from stub_worker import Script, StubWorker, prompt_parts

from services.router import __main__ as router_main
from services.router.__main__ import load_model
from services.router.http import http_edge
from services.router.served_model import ServedModel
from shared.block_hash import hash_full_blocks, root_hash
from shared.config import load_settings
from shared.membership import blocks_key, worker_key
from shared.messages import AbortRequest, DecodeRequest, PrefillLost, PrefillRequest, RequestFailed, WorkerMessage, WorkerTiming
from shared.sampling_params import BeamSearchParams
from shared.telemetry import setup_tracing

CNT = " 6, 7, 8, 9, 10, 11, 12,"
CNT_IDS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
LETTERS = (33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71)  # DEF GH I J K LM N OP QR ST UV W
LLAMA = (10813, 116, 243)
SERVED = "SmolLM2-135M-Instruct"
namespaces = count()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_model(load_settings("router", {}))


@pytest.fixture
def bare(redis_server: RedisServer, model: ServedModel) -> Iterator[Stack]:
    """A router without workers."""
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}")
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def shared_stack(redis_server: RedisServer, model: ServedModel) -> Iterator[Stack]:
    """A router with one prefill and one decode worker, for tests that only ask."""
    stack = Stack(redis_server.url, model, "shared")
    stack.join("prefill", "prefill-0")
    stack.join("decode", "decode-0")
    stack.wait_ready()
    yield stack
    stack.close()


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    decode_of(shared_stack).script = Script()
    return shared_stack


def decode_of(stack: Stack) -> StubWorker:
    return next(worker for worker in stack.workers if worker.role == "decode")


def events(text: str) -> list[dict[str, object]]:
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed_text(chunks: list[dict]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, object]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    if param is not None:
        assert body["error"]["param"] == param
    return body["error"]


# ---- answers ---------------------------------------------------------------------------------------------------------------------


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
    after = [len(worker.of_kind(kind)) for worker, kind in zip(stack.workers, (PrefillRequest, DecodeRequest), strict=True)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]
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
        aborts = [message for message in decode_of(stack).of_kind(AbortRequest) if message.request_id == request_id]
        assert [message.sequence_index for message in aborts] == [1]


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


# ---- refusals --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [[-1], [49152], [2147483648], [1.5], [True], [[1, 2], [49152]], ["a", 1], [-49152], "", [""], [], [[]], ["", ""], ["a", ""],
     None, 5, [[1], 2]],
)  # fmt: skip
def test_bad_prompts_are_refused(stack: Stack, prompt: object) -> None:
    check_error(stack.complete(prompt=prompt), 400, "prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 2.5), ("min_p", 2), ("n", 0),
        ("n", 17), ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5), ("seed", 1.5), ("presence_penalty", 3),
        ("repetition_penalty", 0), ("stop", [1]), ("stop", [""]), ("stop", ["x"] * 17), ("logit_bias", {"49152": 5}),
        ("logit_bias", {"191222": -100}), ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 1}), ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "x"}), ("logit_bias", {str(i): 1 for i in range(2000)}), ("logit_bias", []), ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []), ("stop_token_ids", [49152]), ("min_tokens", 25), ("suffix", "x"), ("best_of", 0), ("best_of", 17),
        ("use_beam_search", 1), ("length_penalty", "x"), ("early_stopping", "never"),
        ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("response_format", {"type": "xml"}), ("tools", [{}]),
        ("tool_choice", "auto"), ("bad_words", [""]), ("chat_template_kwargs", {"a": 1}), ("continue_final_message", True),
        ("guided_json", {"enum": []}), ("stream", "yes"), ("cache_salt", "x" * 1025), ("truncate_prompt_tokens", 0), ("user", 5),
    ],
)  # fmt: skip
def test_bad_fields_are_refused_by_name(stack: Stack, name: str, value: object) -> None:
    check_error(stack.complete(**{name: value}), 400, name)


def test_fields_of_another_api_are_refused_by_name_and_not_ignored(stack: Stack) -> None:
    for name, value in (("top_logprobs", 2), ("max_output_tokens", 5)):
        check_error(stack.complete(**{name: value}), 400, name)
    for name, value in (("echo", True), ("max_output_tokens", 5), ("suffix", "x"), ("logprobs", 2)):
        check_error(stack.chat(**{name: value}), 400, name)
    for name, value in (("echo", False), ("top_logprobs", 0)):
        assert stack.complete(**{name: value}).status_code == 200
    for body in ({"echo": False}, {"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}):
        choice = stack.chat(max_tokens=1, **body).json()["choices"][0]
        assert choice["logprobs"] is None


def test_max_completion_tokens_counts_in_completions_too(stack: Stack) -> None:
    for stream in (False, True):
        response = stack.complete(max_tokens=None, max_completion_tokens=24, min_tokens=10, n=2, stream=stream)
        chunks = events(response.text) if stream else [response.json()]
        texts = ["", ""]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == [CNT, CNT]
    check_error(stack.complete(max_completion_tokens=0), 400, "max_completion_tokens")
    check_error(stack.complete(max_completion_tokens=10**6), 400, "max_completion_tokens")


def test_fields_that_ask_for_nothing_are_accepted(stack: Stack) -> None:
    harmless = {
        "suffix": "", "best_of": 1, "use_beam_search": False, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none",
        "bad_words": [], "top_k": 10**6, "temperature": 1e9, "logit_bias": {}, "stop": [], "user": "someone",
    }  # fmt: skip
    response = stack.complete(**harmless)
    assert response.status_code == 200
    assert "x-pagewire-ignored-fields" not in response.headers


def test_unknown_fields_are_ignored_and_named(stack: Stack) -> None:
    response = stack.complete(foo=1, bar={"a": 2}, **{"né\r\nw": 1})
    assert response.status_code == 200
    assert response.headers["x-pagewire-ignored-fields"] == "bar,foo"
    assert "bar,foo" in stack.complete(foo=1, bar=2, stream=True).headers["x-pagewire-ignored-fields"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b"\xff\xfe", b'"text"', b"5", b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_bad_bodies_have_the_error_object(stack: Stack, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        check_error(stack.client.post(route, content=content, headers=headers), 400)


def test_http_errors_have_the_error_object(stack: Stack) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            response = stack.client.request(method, path)
            check_error(response, 405)
            assert response.headers["allow"] == "POST"
        check_error(stack.client.post(f"{path}/", json={}), 404)
    check_error(stack.client.get("/nowhere"), 404)
    check_error(stack.client.post("/v1/completions", content=b"x" * (10 << 20 | 1), headers={"content-type": "application/json"}), 413)
    check_error(stack.client.post("/v1/completions", content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}), 415)
    check_error(stack.complete(model="nope"), 404, "model")
    check_error(stack.client.get("/v1/models/nope"), 404, "model")
    check_error(stack.chat(messages=[]), 400, "messages")
    check_error(stack.chat(messages=[{"content": "no role"}]), 400, "messages")
    check_error(stack.chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400, "messages")
    check_error(stack.chat(top_logprobs=2), 400, "top_logprobs")


def test_absent_or_empty_model_is_the_served_one(stack: Stack) -> None:
    for model in ("", None, SERVED):
        assert stack.complete(model=model).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "x"}], [{"role": "robot", "content": "x"}], [{"role": "user", "content": None}], [{"role": "user"}],
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], [{"role": "developer", "content": "x"}],
    ],
)  # fmt: skip
def test_odd_conversations_are_rendered(stack: Stack, messages: object) -> None:
    assert stack.chat(messages=messages, max_tokens=1).status_code == 200
    prompt = decode_of(stack).of_kind(DecodeRequest)[-1].token_ids
    assert "None" not in stack.model.tokenizer.decode(prompt)


def test_tokenize_and_detokenize_are_inverse(stack: Stack) -> None:
    body = stack.client.post("/tokenize", json={"prompt": "1, 2, 3, 4, 5,"}).json()
    assert body == {"tokens": CNT_IDS, "count": 14, "max_model_len": 8192}
    assert stack.client.post("/detokenize", json={"tokens": CNT_IDS}).json() == {"prompt": "1, 2, 3, 4, 5,"}
    chat = stack.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"][0] == 1
    for tokens in ([49152], [-1], [2**70], [1.5], [True], ["a"], None, 5):
        check_error(stack.client.post("/detokenize", json={"tokens": tokens}), 400, "tokens")
    check_error(stack.client.post("/tokenize", json={}), 400, "prompt")


# ---- lengths and limits ----------------------------------------------------------------------------------------------------------


def test_context_limit_is_the_smallest_of_all_and_exact(bare: Stack) -> None:
    bare.join("prefill", "p")
    bare.join("decode", "d", max_model_len=128)
    bare.wait_ready()
    assert bare.client.get("/v1/models").json()["data"][0]["max_model_len"] == 128
    for num_tokens, status in ((126, 200), (127, 200), (128, 400), (129, 400)):
        assert bare.complete(prompt=[504] * num_tokens, max_tokens=1).status_code == status
    scored = bare.complete(prompt=[504] * 128, max_tokens=0, echo=True, logprobs=1)
    assert scored.json()["usage"] == {
        "prompt_tokens": 128, "completion_tokens": 0, "total_tokens": 128, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip
    check_error(bare.complete(prompt=[504] * 129, max_tokens=0, echo=True), 400, "prompt")
    message = check_error(bare.complete(prompt="What is the capital of Paris?", max_tokens=10**9), 400, "max_tokens")["message"]
    assert "128" in str(message) and "7 tokens" in str(message) and str(10**9) in str(message)
    # A default is cut to what fits.
    assert bare.complete(prompt=[504] * 120, max_tokens=None).json()["usage"]["completion_tokens"] == 8


def test_more_than_the_limit_in_flight_is_429_with_retry_after(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", max_num_requests=4)
    stack.join("prefill", "p")
    stack.join("decode", "d", Script(first_delay_s=0.5))
    stack.wait_ready()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: stack.complete(), range(12)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 4
    assert all(answer.json()["choices"][0]["text"] == CNT for answer in answers if answer.status_code == 200)
    for answer in answers:
        if answer.status_code != 200:
            check_error(answer, 429)
            assert int(answer.headers["retry-after"]) >= 1
    rejected = f'pagewire:requests_rejected_total{{error_type="overloaded_error",model_name="{SERVED}"}} {statuses.count(429)}.0'
    assert rejected in stack.client.get("/metrics").text
    check_error(stack.complete(n=5), 400, "n")
    stack.close()


# ---- status, metrics, tracing ----------------------------------------------------------------------------------------------------


def test_before_readiness_requests_get_503_and_health_is_200(bare: Stack) -> None:
    check_error(bare.complete(), 503)
    check_error(bare.complete(stream=True), 503)
    assert bare.client.get("/health").status_code == 200
    assert bare.client.get("/health").content == b""
    assert bare.client.get("/ready").status_code == 503
    bare.join("prefill", "p")
    eventually(lambda: bare.client.get("/ready").json()["prefill"] == 1)
    assert bare.client.get("/ready").status_code == 503
    bare.join("decode", "d")
    bare.wait_ready()


def test_request_id_is_echoed_or_made(stack: Stack) -> None:
    assert stack.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = stack.client.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert made.startswith("req-")


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/metrics", "/v1/models", f"/v1/models/{SERVED}", "/nothing"])
def test_head_is_get_without_the_body(stack: Stack, path: str) -> None:
    got, head = stack.client.get(path), stack.client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type" if got.content else "x-request-id"]


def test_without_an_accepted_key_nothing_is_answered(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", api_keys="one,two")
    try:
        stack.join("prefill", "p")
        decode = stack.join("decode", "d")
        stack.wait_ready()
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic b25l"}):
            response = stack.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine", **headers})
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"] == "mine"
        assert stack.client.get("/metrics").status_code == 200
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert caught.value.code == "invalid_api_key"
        for key in ("one", "two"):
            client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)
            assert client.completions.create(model=SERVED, prompt="a", max_tokens=2).choices[0].text
        assert len(decode.of_kind(DecodeRequest)) == 2
    finally:
        stack.close()


def test_metrics_name_workers_and_not_clients(stack: Stack) -> None:
    stack.complete()
    assert stack.client.head("/metrics").status_code == 200
    text = stack.client.get("/metrics").text
    for line in (
        f'vllm:num_requests_running{{model_name="{SERVED}",role="decode",worker="decode-0"}} 1.0',
        f'pagewire:kv_blocks_total{{model_name="{SERVED}",role="prefill",worker="prefill-0"}} 1024.0',
        f'pagewire:chunks_sent_total{{model_name="{SERVED}",role="decode",worker="decode-0"}} 7.0',
        f'pagewire:requests_in_flight{{model_name="{SERVED}"}} 0.0',
    ):
        assert line in text
    for name in ("vllm:time_to_first_token_seconds_count", "gen_ai_server_time_to_first_token_seconds_bucket", "vllm:prompt_tokens_total"):
        assert name in text
    # The first of each kind of answer may make a series of its own.
    stack.complete(model="x")
    before = stack.client.get("/metrics").text.count("\n")
    for number in range(50):
        stack.client.post(f"/nowhere/{number}", json={})
        stack.client.post(
            "/v1/completions", json={"prompt": "a", "model": f"x{number}", "user": str(number)}, headers={"x-request-id": f"id{number}"}
        )
    assert stack.client.get("/metrics").text.count("\n") <= before + 5


def test_trace_context_reaches_both_workers(stack: Stack) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    stack.client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 1}, headers=headers)
    prefill = next(worker for worker in stack.workers if worker.role == "prefill")
    to_decode = decode_of(stack).of_kind(DecodeRequest)[-1]
    # The stand-in for decode answers without waiting for prefill, whose message may still be on its way.
    eventually(lambda: [m for m in prefill.of_kind(PrefillRequest) if m.transfer_id == to_decode.transfer_id])
    sent = [to_decode, prefill.of_kind(PrefillRequest)[-1]]
    assert all(message.traceparent.startswith(f"00-{trace_id}-") for message in sent)
    assert all("00f067aa0ba902b7" not in message.traceparent for message in sent)


def test_one_trace_holds_root_tokenize_and_route_and_the_clients_ttft(
    redis_server: RedisServer, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(router_main, "setup_tracing", lambda name: setup_tracing(name, {}, exporter))
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}")
    stack.join("prefill", "p")
    stack.join("decode", "d", Script(first_delay_s=0.2, delay_s=0.02))
    stack.wait_ready()
    body = {"prompt": "1, 2, 3,", "max_tokens": 5, "stream": True}
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    start_s = time.perf_counter()
    with stack.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        ttft_s = time.perf_counter() - start_s
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    eventually(lambda: len(exporter.get_finished_spans()) == 3)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans[f"text_completion {SERVED}"]
    assert root.parent is not None and root.parent.span_id == 0x00F067AA0BA902B7
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    for name in ("tokenize", "route"):
        assert spans[name].parent.span_id == root.context.span_id
    assert spans["route"].attributes["pagewire.route.decode"] == "d"
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert abs(root.attributes["gen_ai.latency.time_to_first_token"] - ttft_s) <= 0.005 + 0.02 * ttft_s
    stack.close()


def test_the_stock_openai_client_works(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    assert [card.id for card in client.models.list()] == [SERVED]
    completion = client.completions.create(model=SERVED, prompt="1, 2, 3, 4, 5,", max_tokens=24, temperature=0, extra_body={"top_k": 1})
    assert completion.choices[0].text == CNT
    stream = client.chat.completions.create(
        model=SERVED, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == " 6,"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="a")
    client.close()


# ---- hanging up and dying --------------------------------------------------------------------------------------------------------


def send_and_hang_up(stack: Stack, after_s: float, path: str = "/v1/completions", **body: object) -> None:
    prompt: dict[str, object] = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 2000} if path == "/v1/completions" else {}
    payload = json.dumps({**prompt, "ignore_eos": True, **body}).encode()
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        time.sleep(after_s)


@pytest.mark.parametrize(
    "body",
    [
        {"stream": False}, {"stream": True}, {"stream": False, "n": 4}, {"stream": True, "prompt": CNT_IDS * 3, "n": 2},
        {"prompt": ["a", "b"]}, {"best_of": 3}, {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "a"}], "n": 2},
        {"path": "/v1/responses", "input": "a"}, {"path": "/v1/responses", "input": "a", "stream": True},
    ],
)  # fmt: skip
@pytest.mark.parametrize("first_delay_s", [0.0, 5.0])
def test_hanging_up_aborts_at_both_workers(bare: Stack, body: dict[str, object], first_delay_s: float) -> None:
    prefill = bare.join("prefill", "p")
    decode = bare.join("decode", "d", Script(repeats=True, delay_s=0.01, first_delay_s=first_delay_s))
    bare.wait_ready()
    send_and_hang_up(bare, 0.3, **body)
    eventually(lambda: decode.num_active == 0, 1.0)
    started = {message.request_id for message in decode.of_kind(DecodeRequest)}
    assert started
    eventually(lambda: decode.aborted() == started == prefill.aborted(), 1.0)
    eventually(lambda: f'pagewire:client_disconnects_total{{model_name="{SERVED}"}} 1.0' in bare.client.get("/metrics").text, 1.0)
    assert f'pagewire:requests_in_flight{{model_name="{SERVED}"}} 0.0' in bare.client.get("/metrics").text


def test_decode_is_told_of_the_death_of_prefill(bare: Stack) -> None:
    prefill = bare.join("prefill", "p")
    decode = bare.join("decode", "d", Script(first_delay_s=2.0))
    bare.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(bare.complete)
        eventually(lambda: decode.of_kind(DecodeRequest) and prefill.of_kind(PrefillRequest))
        prefill.kill()
        eventually(lambda: decode.of_kind(PrefillLost), 2.0)
        request = decode.of_kind(DecodeRequest)[0]
        assert [message.request_id for message in decode.of_kind(PrefillLost)] == [request.request_id]
        assert answer.result().status_code == 200


def test_death_before_the_first_token_is_retried_elsewhere(bare: Stack) -> None:
    bare.join("prefill", "p")
    first = bare.join("decode", "d0", Script(first_delay_s=30))
    bare.wait_ready()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(bare.complete)
        eventually(lambda: first.num_active == 1)
        second = bare.join("decode", "d1")
        first.kill()
        assert answer.result(timeout=10).json()["choices"][0]["text"] == CNT
    assert second.of_kind(DecodeRequest)[0].attempt == 1


def test_request_waits_for_a_dead_worker_to_come_back(bare: Stack) -> None:
    bare.join("prefill", "p")
    first = bare.join("decode", "d", Script(first_delay_s=30))
    bare.wait_ready()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(bare.complete)
        eventually(lambda: first.num_active == 1)
        first.kill()
        time.sleep(0.3)
        bare.join("decode", "d")
        assert answer.result(timeout=10).json()["choices"][0]["text"] == CNT


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": "a"}), ("completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream_options": {"include_usage": True}}),
    ],
)  # fmt: skip
def test_death_in_mid_stream_ends_with_an_error_event(bare: Stack, path: str, asked: dict[str, object]) -> None:
    bare.join("prefill", "p")
    decode = bare.join("decode", "d", Script(repeats=True, delay_s=0.01))
    bare.wait_ready()
    body = {**asked, "max_tokens": 500, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    start_s = 0.0
    with bare.client.stream("POST", f"/v1/{path}", json=body) as response:
        for line in response.iter_lines():
            lines += [line] if line else []
            if len(lines) == 5:
                decode.kill()
                start_s = time.monotonic()
    assert time.monotonic() - start_s < 1.0
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"] == 503
    assert set(error) == {"message", "type", "param", "code"}
    assert not any('"finish_reason":"' in line for line in lines)
    assert "data: [DONE]" not in lines


def test_retryable_failures_go_to_another_worker_and_others_do_not(bare: Stack) -> None:
    def refuse(error_type: str, retryable: bool) -> Script:
        return Script(
            failure=lambda request: RequestFailed(request_id=request.request_id, message="no", error_type=error_type, retryable=retryable)
        )

    bare.join("prefill", "p")
    bad = bare.join("decode", "a-bad", refuse("internal", True))
    bare.join("decode", "good")
    bare.wait_ready()
    eventually(lambda: bare.client.get("/ready").json()["decode"] == 2)
    assert [bare.complete().status_code for _ in range(6)] == [200] * 6
    assert bad.of_kind(DecodeRequest)
    bad.script = refuse("overloaded", True)
    assert [bare.complete().status_code for _ in range(6)] == [200] * 6
    bad.script = refuse("invalid_request", False)
    assert 400 in [bare.complete().status_code for _ in range(4)]
    decode_good = bare.workers[-1]
    decode_good.script = bad.script = refuse("overloaded", True)
    response = bare.complete()
    check_error(response, 429)
    assert "retry-after" in response.headers


def test_prefill_that_is_full_does_not_leave_decode_waiting(bare: Stack) -> None:
    full = Script(
        failure=lambda request: RequestFailed(request_id=request.request_id, message="full", error_type="overloaded", retryable=True)
    )
    bare.join("prefill", "a-full", full)
    decode = bare.join("decode", "d", Script(first_delay_s=0.3))
    bare.wait_ready()
    check_error(bare.complete(), 429)
    eventually(lambda: decode.num_active == 0 and decode.aborted())
    bare.join("prefill", "free")
    eventually(lambda: bare.client.get("/ready").json()["prefill"] == 2)
    assert [bare.complete().status_code for _ in range(4)] == [200] * 4


def test_deadline_gives_504_and_aborts(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", request_timeout_s=0.4)
    prefill = stack.join("prefill", "p")
    decode = stack.join("decode", "d", Script(stop_after=0))
    stack.wait_ready()
    check_error(stack.complete(), 504)
    eventually(lambda: decode.aborted() and prefill.aborted())
    stack.close()


def test_hung_worker_is_gone_when_its_lease_ran_out(bare: Stack) -> None:
    bare.join("prefill", "p")
    decode = bare.join("decode", "d")
    bare.wait_ready()
    decode.freeze()
    start_s = time.monotonic()
    eventually(lambda: bare.client.get("/ready").status_code == 503, 3.0)
    assert time.monotonic() - start_s < 2.0


def test_restarted_worker_replaces_its_predecessor(bare: Stack) -> None:
    bare.join("prefill", "p")
    old = bare.join("decode", "d")
    bare.wait_ready()
    old.kill()
    new = bare.join("decode", "d")
    eventually(lambda: bare.complete().status_code == 200)
    assert new.of_kind(DecodeRequest)


def test_incompatible_worker_is_refused(bare: Stack) -> None:
    bare.join("prefill", "p")
    bare.join("decode", "d", model_fingerprint="another")
    time.sleep(0.6)
    assert bare.client.get("/ready").json()["decode"] == 0


def test_workers_that_cannot_exchange_kv_are_not_paired(bare: Stack) -> None:
    bare.join("prefill", "p")
    other = bare.join("decode", "d-24", block_size=24)
    time.sleep(0.6)
    assert bare.client.get("/ready").status_code == 503
    assert bare.complete().status_code == 503
    double = bare.join("decode", "d-32", block_size=32)
    bare.wait_ready()
    assert bare.complete().status_code == 200
    assert double.of_kind(DecodeRequest)
    assert not other.of_kind(DecodeRequest)


# ---- what the answer says about the prompt ----------------------------------------------------------------------------------------


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


# ---- aggregated mode --------------------------------------------------------------------------------------------------------------


def test_aggregated_router_needs_no_prefill_worker(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", aggregated=True)
    check_error(stack.complete(), 503)
    assert "prefill" not in stack.complete().json()["error"]["message"]
    prefill = stack.join("prefill", "p")
    decode = stack.join("decode", "d")
    stack.wait_ready()
    assert stack.client.get("/ready").json()["required_roles"] == ["decode"]
    assert stack.complete().json()["choices"][0]["text"] == CNT
    assert all(stack.complete(prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"][1:])
    assert [request.transfer_id for request in decode.of_kind(DecodeRequest)] == [None, None]
    assert not prefill.of_kind(PrefillRequest)
    stack.close()


# ---- the index and Redis ---------------------------------------------------------------------------------------------------------


def prompt_hashes(stack: Stack, token_ids: list[int]) -> list[bytes]:
    return hash_full_blocks(root_hash(stack.model.fingerprint, "float32", 16), token_ids, 16)


def test_request_goes_to_the_holder_of_its_prefix(bare: Stack) -> None:
    prompt = [504 + number for number in range(100)]
    bare.join("prefill", "p0")
    holder = bare.join("prefill", "p1")
    bare.join("decode", "d")
    holder.index.publish(prompt_hashes(bare, prompt)[:4])  # the rest is too long for decode to compute
    bare.wait_ready()
    eventually(lambda: bare.client.get("/ready").json()["prefill"] == 2)
    time.sleep(0.2)
    for _ in range(3):
        bare.complete(prompt=prompt)
    eventually(lambda: len(holder.of_kind(PrefillRequest)) == 3)


def test_short_uncached_tail_stays_on_decode(bare: Stack) -> None:
    prompt = [504 + number for number in range(100)]
    prefill = bare.join("prefill", "p")
    decode = bare.join("decode", "d")
    decode.index.publish(prompt_hashes(bare, prompt))
    bare.wait_ready()
    time.sleep(0.2)
    assert bare.complete(prompt=prompt).status_code == 200
    assert decode.of_kind(DecodeRequest)[0].transfer_id is None
    assert prefill.received == []
    assert bare.complete(prompt=[*prompt, *range(600, 620)]).status_code == 200
    assert decode.of_kind(DecodeRequest)[1].transfer_id is not None


def test_cache_salt_separates_prefixes(bare: Stack) -> None:
    prompt = [504 + number for number in range(100)]
    bare.join("prefill", "p")
    decode = bare.join("decode", "d")
    decode.index.publish(prompt_hashes(bare, prompt))
    bare.wait_ready()
    time.sleep(0.2)
    for salt, is_local in (("a", False), ("", True), (None, True)):
        bare.complete(prompt=prompt, cache_salt=salt)
        assert (decode.of_kind(DecodeRequest)[-1].transfer_id is None) == is_local


def test_hanging_redis_costs_less_than_half_a_second_and_workers_stay(model: ServedModel) -> None:
    server = RedisServer()
    stack = Stack(server.url, model, "hang")
    stack.join("prefill", "p")
    stack.join("decode", "d")
    stack.wait_ready()
    prompt = CNT_IDS * 5
    server.pause()
    durations_s = []
    for _ in range(5):
        start_s = time.monotonic()
        assert stack.complete(prompt=prompt).status_code == 200
        durations_s.append(time.monotonic() - start_s)
        time.sleep(0.5)
    assert max(durations_s) < 0.5
    ready = stack.client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["redis"] == "unreachable"
    server.resume()
    eventually(lambda: stack.client.get("/ready").json()["redis"] == "ok")
    eventually(lambda: stack.client.get("/ready").json()["prefix_index"] == "ok")
    assert stack.client.get("/ready").status_code == 200
    stack.close()
    server.stop()


def test_empty_redis_after_a_restart_is_filled_again_and_requests_go_on(model: ServedModel) -> None:
    server = RedisServer()
    stack = Stack(server.url, model, "restart")
    stack.join("prefill", "p")
    decode = stack.join("decode", "d", Script(repeats=True, delay_s=0.02))
    stack.wait_ready()
    hashes = prompt_hashes(stack, list(range(500, 660)))
    decode.index.publish(hashes)
    failures = []

    def long_request() -> None:
        answer = stack.complete(max_tokens=200, ignore_eos=True)
        if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 200:
            failures.append(answer.text)

    thread = threading.Thread(target=long_request)
    thread.start()
    server.stop()
    time.sleep(0.5)
    server.start()
    client = redis.Redis.from_url(server.url)
    eventually(lambda: client.scard(blocks_key("restart", "d", decode.incarnation)) == len(hashes), 3.0)
    eventually(lambda: client.exists(worker_key("restart", "p"), worker_key("restart", "d")) == 2, 3.0)
    thread.join()
    assert failures == []
    assert stack.client.get("/ready").status_code == 200
    stack.close()
    server.stop()


def test_everything_becomes_ready_when_redis_comes_last(model: ServedModel) -> None:
    server = RedisServer()
    server.stop()
    stack = Stack(server.url, model, "last")
    stack.join("decode", "d")
    stack.join("prefill", "p")
    check_error(stack.complete(), 503)
    time.sleep(0.5)
    server.start()
    stack.wait_ready()
    assert stack.complete().json()["choices"][0]["text"] == CNT
    stack.close()
    server.stop()


# ---- the process -----------------------------------------------------------------------------------------------------------------


def start_process(port: int, redis_url: str = "redis://127.0.0.1:1/0") -> subprocess.Popen[str]:
    environ = {**os.environ, "PAGEWIRE_PORT": str(port), "REDIS_URL": redis_url}
    return subprocess.Popen([sys.executable, "-m", "services.router"], env=environ, stderr=subprocess.PIPE, text=True)


def test_taken_port_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start_process(taken.getsockname()[1])
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert len(stderr.strip().split("\n")) == 1
    assert "PAGEWIRE_PORT" in stderr


def test_sigterm_ends_the_process_within_three_seconds_even_with_a_request_running(redis_server: RedisServer, model: ServedModel) -> None:
    port = free_port()
    process = start_process(port, redis_server.url)
    workers = [
        StubWorker(role, f"{role}-term", redis_server.url, model.fingerprint, "pagewire", Script(first_delay_s=30))
        for role in ("prefill", "decode")
    ]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready").status_code == 200
        return False

    eventually(is_ready, 15)
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=20))
        except httpx.TransportError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: workers[1].num_active == 1)
    start_s = time.monotonic()
    process.terminate()
    assert process.wait(10) == 0
    assert time.monotonic() - start_s < 3.0
    eventually(lambda: workers[1].num_active == 0)
    thread.join()
    assert isinstance(outcome[0], httpx.Response)
    check_error(outcome[0], 503)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    for worker in workers:
        worker.close()


def test_a_body_that_does_not_come_is_given_up_and_its_connection_with_it(bare: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "BODY_TIMEOUT_S", 0.3)
    with socket.create_connection(bare.listener.getsockname(), timeout=3) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408


def test_a_bug_is_answered_with_the_error_object(bare: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(bare.parts.frontend), "complete", lambda *_: 1 / 0)
    response = bare.complete()
    check_error(response, 500)
    assert response.headers["x-request-id"]
    assert bare.client.get("/health").status_code == 200


def test_a_long_text_holds_nobody_up(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        gaps = [0.0]
        refused = pool.submit(stack.complete, prompt="x" * 3_000_000)
        while not refused.done():
            start_s = time.monotonic()
            assert httpx.get(f"{stack.url}/health", timeout=10).status_code == 200
            gaps.append(time.monotonic() - start_s)
        check_error(refused.result(), 400, "prompt")
    assert len(gaps) > 3
    assert max(gaps) < 0.7


def test_after_a_body_that_is_too_large_the_connection_ends(stack: Stack) -> None:
    response = stack.client.post("/v1/completions", content=b"x" * (10 << 20 | 1), headers={"content-type": "application/json"})
    check_error(response, 413)
    assert response.headers["connection"] == "close"
