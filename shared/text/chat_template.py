"""Renders a model's Jinja chat template in a sandbox, within bounds.

Templates come with the model and messages from anyone, so: no attribute that reaches Python, no mutation of the input, at most
`_MAX_STEPS` loop turns and calls, and at most `max_output_chars` of text. Whatever a template refuses is the client's 400.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequestError, ModelLoadError

_MAX_STEPS = 2_000_000
_STEPS_OF_A_CALL = 20
_MAX_POWER_BITS = 4096
DEFAULT_MAX_OUTPUT_CHARS = 16 << 20
_DEFINED = {"tools": None, "documents": None}
"""Where nothing is given `transformers` passes None, and templates ask `if tools is not none`: an undefined one is not none."""
_LOOP_FILTER = "_counted"
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")


class _Budget:
    """What one rendering may still do."""

    def __init__(self, max_output_chars: int) -> None:
        self.max_output_chars = max_output_chars
        self._steps_left = _MAX_STEPS

    def take(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise jinja2.TemplateRuntimeError("it takes too many steps")

    def check_size(self, size: int) -> None:
        if size > self.max_output_chars:
            raise jinja2.TemplateRuntimeError(f"its text is longer than {self.max_output_chars} characters")

    def list_of(self, items: Iterable[Any]) -> list[Any]:
        counted = list(islice(items, self._steps_left + 1))
        self.take(len(counted))
        return counted


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only passes through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Every loop is counted (its iterable goes through a filter), every call, and every operation that can multiply text."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _LOOP_FILTER, [], [], None, None)
        for join in template.find_all(nodes.Concat):
            # a ~ b as a + b of strings, so that it is counted too
            join.nodes = [nodes.Filter(nodes.List(join.nodes), "_joined", [], [], None, None)]
        return template

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.take(_STEPS_OF_A_CALL)
        if isinstance(getattr(obj, "__self__", None), str):
            # 'x'.ljust(10 ** 12)
            budget.check_size(max((argument for argument in args if isinstance(argument, int)), default=0))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            budget.check_size(len(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            raise jinja2.TemplateRuntimeError("it computes a power that is too large")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    budget.check_size(len(sequence) * max(0, count))
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateRuntimeError("it formats text with %, which is not supported")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _joined(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _budget.get().check_size(sum(map(len, texts)))
    return "".join(texts)


def _counted(items: Any) -> Any:
    # Undefined iterates as nothing; its own class decides whether it may.
    return _budget.get().list_of(items)


def _format(pattern: str, *args: Any, **kwargs: Any) -> str:
    if _WIDE_FIELD.search(pattern):
        raise jinja2.TemplateRuntimeError("it formats a field that is too wide")
    return pattern % (kwargs or args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(str(message))


def _strftime_now(format_string: str) -> str:
    return datetime.datetime.now().strftime(format_string)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters.update({"tojson": _tojson, _LOOP_FILTER: _counted, "_joined": _joined, "format": _format})
    environment.globals.update({"raise_exception": _raise_exception, "strftime_now": _strftime_now})
    return environment


def _text_of_content(content: Any, index: int) -> str:
    """Message content as text: a string, null (""), or a list of text parts, joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"messages[{index}].content must be a string, a list of text parts, or null", param="messages")
    texts: list[str] = []
    for part in content:
        text = (
            part
            if isinstance(part, str)
            else part.get("text")
            if isinstance(part, Mapping) and part.get("type") in ("text", None)
            else None
        )
        if not isinstance(text, str):
            raise InvalidRequestError(f"messages[{index}].content has a part that is not {{type: text, text: ...}}", param="messages")
        texts.append(text)
    return "".join(texts)


def _normalized(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequestError(f"messages[{index}] has no role", param="messages")
    return {**message, "content": _text_of_content(message.get("content"), index)}


class ChatTemplate:
    """A compiled template. `special_tokens`: bos_token, eos_token and the like, as texts."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS
    ) -> None:
        self._special_tokens = dict(special_tokens or {})
        self._max_output_chars = max_output_chars
        try:
            self._template = _new_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt as text. `variables` (tools, documents, ...) reach the template as they are.

        Raises InvalidRequestError (param "messages") for messages the template refuses or cannot render within its bounds.
        """
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        normalized = [_normalized(message, index) for index, message in enumerate(messages)]
        budget = _Budget(self._max_output_chars)
        token = _budget.set(budget)
        pieces: list[str] = []
        size = 0
        try:
            values = {
                **_DEFINED,
                **self._special_tokens,
                **variables,
                "messages": normalized,
                "add_generation_prompt": add_generation_prompt,
            }
            for piece in self._template.generate(values):
                size += len(piece)
                budget.check_size(size)
                pieces.append(piece)
        except RecursionError as error:
            raise InvalidRequestError("the chat template cannot render these messages: it recurses too deeply", param="messages") from error
        except Exception as error:  # a template is a program: TypeError, KeyError, ... are its way to refuse
            raise InvalidRequestError(f"the chat template cannot render these messages: {error}", param="messages") from error
        finally:
            _budget.reset(token)
        return "".join(pieces)


def up_to_final_message(rendered: str, content: str) -> str:
    """A rendered conversation without what the template puts behind its last message, so that an answer goes on in it.

    Raises InvalidRequestError when that message is empty or the template does not show it as it is.
    """
    shown = content.strip()
    end = rendered.rfind(shown)
    if not shown or end < 0:
        what = "is empty" if not shown else "is not in the rendered chat template as it stands"
        raise InvalidRequestError(f"continue_final_message: the last message {what}", param="continue_final_message")
    # White space at the end of the message is the client's, where the template keeps it.
    whole = rendered.rfind(content.lstrip())
    return rendered[: whole + len(content.lstrip())] if whole >= 0 else rendered[: end + len(shown)]
