"""Requests that the router refuses or repairs, each with the OpenAI error object and the field named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from router_answers import CNT, CNT_IDS, SERVED, check_error, decode_of, events
from router_harness import RedisServer, Stack
from tiny_models import HERMES_TEMPLATE, TINY_TOKENS, tiny_tokenizer_json, write_tiny_hf

from services.router.__main__ import load_model
from shared.config import load_settings
from shared.messages import DecodeRequest


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


def test_text_with_a_token_that_the_tokenizer_knows_and_the_model_does_not_is_refused(redis_server: RedisServer, tmp_path: Path) -> None:
    """More tokens were added than the embedding has rows."""
    write_tiny_hf(tmp_path)
    tokenizer = tiny_tokenizer_json()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": len(TINY_TOKENS) + number, "content": f"<{number}>", **flags} for number in range(12)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    stack = Stack(redis_server.url, load_model(load_settings("router", {}, model=str(tmp_path))), "unknown tokens")
    for role in ("prefill", "decode"):
        stack.join(role, role)
    stack.wait_ready()
    assert stack.complete(prompt="a<7>").status_code == 200
    assert "token id 275" in str(check_error(stack.complete(prompt="a<11>"), 400, "prompt")["message"])
    check_error(stack.chat(messages=[{"role": "user", "content": "a<11>"}]), 400, "messages")
    stack.close()
