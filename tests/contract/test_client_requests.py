"""What real clients send, recorded by `tests/clients/run.py --record`, is answered in the form that each of them relies on.

The clients themselves run in `make clients`; here their requests meet the real router with workers that emit scripted tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from client_venv import PACKAGES, version_of
from recording_proxy import PLACEHOLDER_ID, PLACEHOLDER_SECRET, RecordingProxy
from router_harness import RedisServer, Stack

from services.router.__main__ import load_model
from shared.config import load_settings

FIXTURES = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "client_requests").glob("*.json"))}
RECORDED = [
    pytest.param(request, id=f"{name}-{number}-{request['method']}{request['path']}-{request['status']}")
    for name, fixture in FIXTURES.items()
    for number, request in enumerate(fixture["requests"])
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    server = RedisServer()
    stack = Stack(server.url, load_model(load_settings("router", {})), "clients")
    try:
        stack.join("prefill", "prefill-0")
        stack.join("decode", "decode-0")
        stack.wait_ready()
        yield stack
    finally:
        stack.close()
        server.stop()


def replay(stack: Stack, request: dict[str, Any]) -> httpx.Response:
    content = None if request["body"] is None else json.dumps(request["body"]).encode()
    return stack.client.request(request["method"], request["path"], headers=request["headers"], content=content)


# ---- the forms -------------------------------------------------------------------------------------------------------------------


def check_usage(usage: dict[str, Any]) -> None:
    assert usage["prompt_tokens"] > 0
    assert usage["completion_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0  # langchain-openai and aiperf report it


def check_error(response: httpx.Response, body: dict[str, Any] | None) -> None:
    """Never a stream, even where one was asked for: clients map the status to a class and show the message."""
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    if body is None:
        assert response.status_code == 404
    elif response.status_code == 404:
        assert body["model"] in error["message"]
    else:
        assert error["param"] in body
        assert error["param"] in error["message"]


def check_whole(answer: dict[str, Any], body: dict[str, Any], is_chat: bool) -> None:
    assert answer["id"].startswith("chatcmpl-" if is_chat else "cmpl-")
    assert answer["object"] == ("chat.completion" if is_chat else "text_completion")
    assert answer["model"] == body["model"]
    assert isinstance(answer["created"], int)
    check_usage(answer["usage"])
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(num_prompts * (body.get("n") or 1)))
    for choice in answer["choices"]:
        assert choice["finish_reason"] in ("stop", "length")
        if is_chat:
            assert choice["message"]["role"] == "assistant"
            assert choice["message"]["content"]
        else:
            assert choice["text"]
        if body.get("logprobs") and is_chat:
            for entry in choice["logprobs"]["content"]:
                assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
                assert len(entry["top_logprobs"]) == body["top_logprobs"]
        elif body.get("logprobs"):
            lists = [choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
            assert len({len(items) for items in lists}) == 1
            assert "".join(lists[0]) == choice["text"]
            assert (lists[1][0] is None) == bool(body.get("echo"))
        else:
            assert choice["logprobs"] is None


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of an event stream: `data: {json}` and a blank line each, then [DONE] and nothing more."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check_stream(chunks: list[dict[str, Any]], body: dict[str, Any], is_chat: bool) -> None:
    options = body.get("stream_options") or {}
    if options.get("include_usage"):
        *chunks, last = chunks
        assert last["choices"] == []
        check_usage(last["usage"])
        assert last["usage"]["completion_tokens"] == len(chunks)  # one chunk a token: load clients time chunks
    if options.get("continuous_usage_stats"):
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, len(chunks) + 1))
    else:
        assert not any(chunk.get("usage") for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if is_chat else "text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in ("stop", "length")
    if is_chat:
        assert choices[0]["delta"]["role"] == "assistant"
        assert choices[0]["delta"]["content"]  # not a chunk of its own, which would count as the first token
        assert not any("role" in choice["delta"] for choice in choices[1:])
    else:
        assert "".join(choice["text"] for choice in choices)
    if body.get("ignore_eos"):
        assert len(chunks) == (body.get("max_tokens") or body["max_completion_tokens"])


def check_responses(response: httpx.Response, body: dict[str, Any]) -> None:
    answer = response.json() if not body.get("stream") else None
    if answer is None:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [event.split("\n") for event in response.text.removesuffix("\n\n").split("\n\n")]
        parsed = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [name.removeprefix("event: ") for name, _ in events] == [event["type"] for event in parsed]
        assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
        answer = parsed[-1]["response"]
    assert answer["object"] == "response"
    assert answer["output"][0]["content"][0]["text"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]


def check_other(response: httpx.Response, request: dict[str, Any], model: str) -> None:
    path = request["path"]
    if path == "/v1/models":
        assert response.json()["object"] == "list"
        assert model in [card["id"] for card in response.json()["data"]]
    elif path == f"/v1/models/{model}":
        assert response.json()["id"] == model
        assert response.json()["object"] == "model"
    elif path == "/metrics":
        assert response.headers["content-type"].startswith("text/plain")
        assert ("vllm:" in response.text) == (request["method"] == "GET")
    elif path == "/health":
        assert response.content == b""
    else:
        raise AssertionError(f"no client relied on {path} so far: say here what it expects")


# ---- the claims ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", RECORDED)
def test_recorded_request_is_answered_as_its_client_needs(stack: Stack, request_: dict[str, Any]) -> None:
    response = replay(stack, request_)
    assert response.status_code == request_["status"], response.text
    assert response.headers["x-request-id"] == request_["headers"].get("x-request-id", response.headers["x-request-id"])
    assert "x-pagewire-ignored-fields" not in response.headers  # what these clients send is understood
    body, is_chat = request_["body"], request_["path"] == "/v1/chat/completions"
    if response.status_code != 200:
        check_error(response, body)
    elif request_["method"] != "POST":
        check_other(response, request_, stack.model.name)
    elif request_["path"] == "/v1/responses":
        check_responses(response, body)
    elif body.get("stream"):
        check_stream(frames(response), body, is_chat)
    else:
        check_whole(response.json(), body, is_chat)


def test_every_client_is_recorded_in_the_version_that_is_run() -> None:
    assert {name: fixture["version"] for name, fixture in FIXTURES.items()} == {name: version_of(name) for name in PACKAGES}
    for fixture in FIXTURES.values():
        answered = {request["path"] for request in fixture["requests"] if request["method"] == "POST" and request["status"] == 200}
        assert answered >= {"/v1/completions", "/v1/chat/completions"}


def test_recorder_changes_nothing_and_keeps_one_request_of_each_kind_without_secrets(stack: Stack) -> None:
    model = stack.model.name
    with RecordingProxy(stack.url) as proxy:
        client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="a-secret", max_retries=0)
        for prompt in ("1, 2, 3, 4, 5,", "another"):
            headers = {"x-request-id": "2f1c7a52-6f0e-4b7e-9d0a-5c2d1e3f4a5b"}
            chunks = list(client.completions.create(model=model, prompt=prompt, max_tokens=8, stream=True, extra_headers=headers))
            assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None] * 7 + ["length"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no-such-model", prompt="1, 2, 3, 4, 5,", max_tokens=8)
        client.close()
    assert [(request["path"], request["status"], request["body"]["prompt"]) for request in proxy.requests] == [
        ("/v1/completions", 200, "1, 2, 3, 4, 5,"),
        ("/v1/completions", 404, "1, 2, 3, 4, 5,"),
    ]
    assert proxy.requests[0]["headers"]["x-request-id"] == PLACEHOLDER_ID
    assert proxy.requests[0]["headers"]["authorization"] == PLACEHOLDER_SECRET
    assert "a-secret" not in json.dumps(proxy.requests)
