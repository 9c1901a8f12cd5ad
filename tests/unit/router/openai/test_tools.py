from __future__ import annotations

from typing import Any

import pytest

from services.router.openai.tool_calls import HERMES
from services.router.openai.tools import ToolFields, ToolUse, tool_use, with_parsed_arguments
from shared.errors import InvalidRequestError

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
G = {"type": "function", "function": {"name": "g"}}


def use(takes_tools: bool = True, family: Any = HERMES, **fields: Any) -> ToolUse | None:
    return tool_use(ToolFields.model_validate(fields), "m", takes_tools, family)


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        use(**fields)
    return caught.value


def test_without_tools_or_with_none_to_be_called_nothing_changes() -> None:
    assert use() is None
    assert use(tools=[], tool_choice="none") is None
    assert use(tools=[F], tool_choice="none") is None
    assert use(tools=[F], tool_choice="none", takes_tools=False) is None


def test_a_model_without_tools_in_its_template_says_so() -> None:
    error = refusal(tools=[F], takes_tools=False)
    assert error.param == "tools"
    assert "no place for tools" in error.message
    assert "no parser" in refusal(tools=[F], family=None).message


def test_choice_decides_what_may_be_called() -> None:
    auto = use(tools=[F, G])
    assert auto is not None and not auto.is_forced and auto.grammar({}) is None and auto.is_parallel
    required = use(tools=[F, G], tool_choice="required", parallel_tool_calls=False)
    assert required is not None and required.is_forced and not required.is_parallel
    assert [name for name, _ in required.callable_tools] == ["f", "g"]
    named = use(tools=[F, G], tool_choice={"type": "function", "function": {"name": "g"}})
    assert named is not None and named.is_forced and not named.is_parallel
    assert [name for name, _ in named.callable_tools] == ["g"]
    assert named.definitions == [F, G]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": [F, F]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ],
)
def test_wrong_tools_are_refused_by_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_templates_get_arguments_as_objects() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}]}
    assert with_parsed_arguments(message, 0)["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert with_parsed_arguments({"role": "user", "content": "a"}, 0) == {"role": "user", "content": "a"}


@pytest.mark.parametrize("calls", ["x", [1], [{}], [{"function": {"arguments": "{}"}}], [{"function": {"name": "f", "arguments": "{"}}]])
def test_calls_in_messages_that_are_none_are_refused(calls: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        with_parsed_arguments({"role": "assistant", "content": "", "tool_calls": calls}, 3)
    assert caught.value.param == "messages"
    assert "messages[3]" in caught.value.message
