"""Tool calls from a real system whose model has random weights and a chat template with tools: what it must call, it calls validly."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from local_stack import LocalStack
from tiny_models import HERMES_TEMPLATE, with_changes, write_tiny_hf

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False}
PARAMETERS = {"weather": WEATHER, "time": TIME}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in PARAMETERS.items()]
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tools_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory = tmp_path_factory.mktemp("models") / "tiny-tools"
    write_tiny_hf(directory, with_changes(max_model_len=2048), max_position_embeddings=2048)
    (directory / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    with LocalStack("--model", str(directory), debug="true", num_blocks=512) as running:
        yield running


@pytest.fixture(scope="module")
def client(tools_stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_stack.url}/v1", api_key="none", max_retries=0) as running:
        yield running


def checked(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS[name])


@pytest.mark.parametrize("seed", range(4))
def test_a_named_tool_is_called_validly(client: openai.OpenAI, tools_stack: LocalStack, seed: int) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model=tools_stack.model, messages=MESSAGES, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=400
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    checked("weather", call.function.arguments)


def test_streamed_calls_are_those_of_the_whole_answer(client: openai.OpenAI, tools_stack: LocalStack) -> None:
    body: dict[str, Any] = {
        "model": tools_stack.model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": 1500, "n": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**body).choices
    calls: list[dict[int, list[str]]] = [{}, {}]
    reasons: dict[int, str] = {}
    ids: set[str] = set()
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        for delta in choice.delta.tool_calls or []:
            assert delta.function is not None
            if delta.id is not None:
                ids.add(delta.id)
                calls[choice.index][delta.index] = [delta.function.name or "", ""]
            calls[choice.index][delta.index][1] += delta.function.arguments or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert reasons == {0: "tool_calls", 1: "tool_calls"}
    for index, choice_calls in enumerate(calls):
        expected = [[call.function.name, call.function.arguments] for call in whole[index].message.tool_calls or []]  # type: ignore[union-attr]
        assert [choice_calls[position] for position in sorted(choice_calls)] == expected
        for name, arguments in expected:
            checked(name, arguments)
    assert len(ids) == sum(map(len, calls))


def test_without_parallel_calls_there_is_one(client: openai.OpenAI, tools_stack: LocalStack) -> None:
    answer = client.chat.completions.create(
        model=tools_stack.model, messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400, seed=1
    ).choices[0]
    assert len(answer.message.tool_calls or []) == 1


def test_calls_and_results_go_back_into_the_template(client: openai.OpenAI, tools_stack: LocalStack) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "UTC"}'}}
    conversation: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    answer = client.chat.completions.create(model=tools_stack.model, messages=conversation, max_tokens=4, temperature=0)
    assert answer.usage is not None
    plain = 'user: hello\nassistant: <tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
    tokens = tools_stack.post("/tokenize", {"prompt": plain + "tool: 12:00\nassistant: "})
    assert answer.usage.prompt_tokens == tokens["count"]


def test_auto_leaves_the_model_free_and_none_hides_the_tools(client: openai.OpenAI, tools_stack: LocalStack) -> None:
    def prompt_tokens(**fields: Any) -> int:
        whole = {"ignore_eos": True}  # drawn at random, an answer may end at once
        answer = client.chat.completions.create(model=tools_stack.model, messages=MESSAGES, max_tokens=8, extra_body=whole, **fields)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens(tools=TOOLS) > 100
    assert prompt_tokens(tools=TOOLS, tool_choice="none") == prompt_tokens()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": []}}}], "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ],
)
def test_what_cannot_be_called_is_a_400(tools_stack: LocalStack, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        tools_stack.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert caught.value.code == 400
    assert json.loads(caught.value.read())["error"]["param"] == param
