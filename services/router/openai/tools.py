"""A chat request's tools: what the client may send, and what it means for the template, the grammar and the answer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from services.router.openai.response_format import AskedGrammar
from services.router.openai.tool_calls import ToolCallParser, ToolFamily, grammar_of
from shared.errors import InvalidRequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionDefinition


def _check_tool_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return value
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": {"type": "object", "properties": {"name": {"type": "string"}}}},
        },
    ]
}
ToolChoice = Annotated[Any, BeforeValidator(_check_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)]


class ToolFields(BaseModel):
    """Fields of a chat request. `tool_choice` is "auto" where there are tools and nothing is said."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @property
    def named_tool(self) -> str | None:
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model may or must call. `definitions` is what the template is shown."""

    family: ToolFamily
    definitions: list[dict[str, Any]]
    is_parallel: bool
    is_forced: bool
    callable_tools: tuple[tuple[str, dict[str, Any]], ...]
    """(name, schema of its arguments) of those that may be called."""

    def parser(self) -> ToolCallParser:
        """A new one for each choice."""
        return ToolCallParser(self.family, self.is_parallel)

    def grammar(self, special_ids: dict[str, int]) -> AskedGrammar | None:
        """What a forced call has to look like, as yet unchecked; None: the model may say what it likes."""
        if not self.is_forced:
            return None
        return AskedGrammar("lark", grammar_of(self.family, self.callable_tools, self.is_parallel, special_ids), "tools")


def tool_use(body: ToolFields, model: str, takes_tools: bool, family: ToolFamily | None) -> ToolUse | None:
    """None: no tools, or none to be called, so that the prompt does not speak of any. Raises InvalidRequestError naming the field, also
    when this model's template has no place for tools or there is no parser for its calls."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice asks for a call, and there are no tools; add them", param="tool_choice")
        return None
    names = [tool.function.name for tool in body.tools]
    for name in names:
        if not _NAME.fullmatch(name):
            message = f"tools: the name {name[:100]!r} is not 1 to 64 letters, digits, '_', '-' or '.'"
            raise InvalidRequestError(message, param="tools")
    if len(set(names)) < len(names):
        raise InvalidRequestError("tools: two functions have the same name", param="tools")
    if body.named_tool is not None and body.named_tool not in names:
        raise InvalidRequestError(f"tool_choice names {body.named_tool[:100]!r}, which is not among the tools", param="tool_choice")
    if body.tool_choice == "none":
        return None
    if not takes_tools:
        message = f"the chat template of {model} has no place for tools; leave them out or serve a model made to call them"
        raise InvalidRequestError(message, param="tools")
    if family is None:
        raise InvalidRequestError(f"there is no parser for the form in which {model} writes tool calls; leave tools out", param="tools")
    is_forced = body.tool_choice == "required" or body.named_tool is not None
    return ToolUse(
        family=family,
        definitions=[tool.model_dump(exclude_unset=True) for tool in body.tools],
        is_parallel=body.parallel_tool_calls is not False and body.named_tool is None,
        is_forced=is_forced,
        callable_tools=tuple(
            (tool.function.name, tool.function.parameters or _NO_ARGUMENTS)
            for tool in body.tools
            if body.named_tool in (None, tool.function.name)
        ),
    )


def with_parsed_arguments(message: dict[str, Any], index: int) -> dict[str, Any]:
    """An assistant's message as templates want it: the arguments of its calls are objects, where the API has them as JSON text."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list) or not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        raise InvalidRequestError(f"messages[{index}].tool_calls must be a list of calls of functions", param="messages")
    return {**message, "tool_calls": [{**call, "function": _with_object(call["function"], index)} for call in calls]}


def _with_object(function: dict[str, Any], index: int) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"messages[{index}].tool_calls has a function without a name", param="messages")
    if not isinstance(arguments, str):
        return {**function, "arguments": arguments if isinstance(arguments, dict) else {}}
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        message = f"messages[{index}].tool_calls: the arguments of {function['name'][:100]!r} are not valid JSON: {error}"
        raise InvalidRequestError(message, param="messages") from error
    return {**function, "arguments": parsed}
