"""/v1/responses over real HTTP with the stock OpenAI client and stub workers that emit scripted tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import Response
from router_harness import RedisServer, Stack
from stub_worker import Script

from services.router.__main__ import load_model
from shared.config import load_settings
from shared.messages import DecodeRequest

MODEL = "SmolLM2-135M-Instruct"
SECRET = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    server = RedisServer()
    stack = Stack(server.url, load_model(load_settings("router", {})), "responses")
    stack.join("prefill", "p")
    stack.join("decode", "d", Script())
    stack.wait_ready()
    yield stack
    stack.close()
    server.stop()


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def prompt_of_last(stack: Stack) -> str:
    decode = next(worker for worker in stack.workers if worker.role == "decode")
    return stack.model.tokenizer.decode(decode.of_kind(DecodeRequest)[-1].token_ids, skip_special_tokens=False)


def test_an_answer_is_one_message_and_says_why_it_ended(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Count.", max_output_tokens=6, temperature=0, metadata={"a": "b"})
    assert response.id.startswith("resp")
    assert (response.object, response.status) == ("response", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].type == "message"
    assert response.output_text
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (6, response.usage.input_tokens + 6)
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert (response.max_output_tokens, response.temperature, response.metadata) == (6, 0, {"a": "b"})


def test_the_events_of_a_stream_are_those_the_client_knows_and_add_up(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Count.", max_output_tokens=6)
    events = list(client.responses.create(model=MODEL, input="Count.", max_output_tokens=6, stream=True))
    kinds = [event.type for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 6,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Response = events[-1].response
    assert text == last.output_text == whole.output_text
    assert last.usage == whole.usage
    assert len({event.item_id for event in events if hasattr(event, "item_id")} | {last.output[0].id}) == 1


def test_the_clients_stream_helper_assembles_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Count.", max_output_tokens=4) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
    with client.responses.stream(model=MODEL, input="Count.") as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == deltas


def test_input_and_instructions_become_the_conversation(stack: Stack, client: openai.OpenAI) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "three", "annotations": []}],
        },
        {"role": "user", "content": "four"},
    ]
    client.responses.create(model=MODEL, input=items, instructions="Be brief.", max_output_tokens=2)
    prompt = prompt_of_last(stack)
    turns = ["system\nBe brief.", "user\none two", "assistant\nthree", "user\nfour"]
    assert prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


def test_logprobs_come_when_included(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "input": "Count.", "max_output_tokens": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = client.responses.create(**asked).output[0].content[0]
    assert len(part.logprobs) == 3
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    streamed = [event for event in client.responses.create(**asked, stream=True) if event.type == "response.output_text.delta"]
    assert [event.logprobs[0].token for event in streamed] == [entry.token for entry in part.logprobs]
    assert client.responses.create(model=MODEL, input="Count.", max_output_tokens=3).output[0].content[0].logprobs == []


def test_a_schema_reaches_decode(stack: Stack, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="a", max_output_tokens=2, text={"format": SECRET})
    decode = next(worker for worker in stack.workers if worker.role == "decode")
    grammar = decode.of_kind(DecodeRequest)[-1].sampling.structured_output
    assert grammar is not None
    assert grammar.param == "text"
    assert response.text is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {}),
        ("input", {"input": 5}),
        ("input", {"input": []}),
        ("input", {"input": [{"role": "user"}]}),
        ("input", {"input": [{"content": "a"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("input", {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}),
        ("previous_response_id", {"input": "a", "previous_response_id": "resp_1"}),
        ("conversation", {"input": "a", "conversation": "conv_1"}),
        ("background", {"input": "a", "background": True}),
        ("tools", {"input": "a", "tools": [{"type": "web_search"}]}),
        ("tool_choice", {"input": "a", "tool_choice": "required"}),
        ("truncation", {"input": "a", "truncation": "auto"}),
        ("n", {"input": "a", "n": 2}),
        ("best_of", {"input": "a", "best_of": 2}),
        # Equal to 1 or to False in Python.
        ("use_beam_search", {"input": "a", "use_beam_search": True}),
        ("return_token_ids", {"input": "a", "return_token_ids": True}),
        ("prompt_logprobs", {"input": "a", "prompt_logprobs": 0}),
        ("prompt_logprobs", {"input": "a", "prompt_logprobs": 1}),
        ("max_tokens", {"input": "a", "max_tokens": 1}),
        ("max_completion_tokens", {"input": "a", "max_completion_tokens": 1}),
        ("logprobs", {"input": "a", "logprobs": True}),
        ("echo", {"input": "a", "echo": True}),
        ("max_output_tokens", {"input": "a", "max_output_tokens": 0}),
        ("max_output_tokens", {"input": "a", "max_output_tokens": 1_000_000}),
        ("max_tokens", {"input": "a", "max_tokens": 5}),
        ("text", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text", {"input": "a", "text": {"format": {"type": "xml"}}}),
        ("text", {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "integer", "minimum": 5, "maximum": 1}}}}),
        ("temperature", {"input": "a", "temperature": -1}),
        ("model", {"input": "a", "model": ["x"]}),
    ],
)
def test_what_is_wrong_or_not_offered_is_refused_by_name(stack: Stack, param: str, body: dict[str, object]) -> None:
    response = stack.client.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_fields_without_effect_are_accepted_and_unknown_ones_named(stack: Stack) -> None:
    silent = {
        "store": True,
        "reasoning": {"effort": "low"},
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
    }
    response = stack.client.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, **silent})
    assert response.status_code == 200, response.text
    assert "x-pagewire-ignored-fields" not in response.headers
    response = stack.client.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, "foo": 1})
    assert response.headers["x-pagewire-ignored-fields"] == "foo"


def test_no_response_is_stored(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="a", max_output_tokens=1, store=True)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(response.id)


def test_a_stream_that_breaks_off_ends_with_an_error_event(stack: Stack) -> None:
    broken = Stack(stack.redis_url, stack.model, "responses-broken")
    try:
        broken.join("prefill", "p")
        decode = broken.join("decode", "d", Script(stop_after=3))
        broken.wait_ready()
        lines: list[str] = []
        with broken.client.stream("POST", "/v1/responses", json={"input": "a", "max_output_tokens": 8, "stream": True}) as response:
            for line in response.iter_lines():
                lines += [line] if line.startswith("data: ") else []
                if len(lines) == 7:
                    decode.kill()
    finally:
        broken.close()
    last = json.loads(lines[-1].removeprefix("data: "))
    assert (last["type"], last["sequence_number"]) == ("error", len(lines) - 1)
    assert last["message"]
