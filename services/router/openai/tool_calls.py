"""How models write tool calls, one form a family: found in a stream of text, and as a grammar that leaves nothing else to write.

hermes (Hermes, Qwen): <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, after any text.
llama3_json: {"name": ..., "parameters": {...}} and nothing before it but <|python_tag|>; several are separated by "; ".
mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], after any text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.router.openai.response_format import with_bounded_whitespace

Json = dict[str, Any]

MAX_PARALLEL_CALLS = 16
"""Where a grammar asks for calls, no more than this many, so that it ends."""
_HEADER = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_JINJA_TOOLS = re.compile(r"\{[{%][^}]*\btools\b")
_ALPHANUMERIC = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_call_id() -> str:
    """Mistral's templates take nothing else back."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True)
class ToolFamily:
    """`opening` comes before calls and `closing` after them; both may be special tokens of the model."""

    name: str
    opening: str
    closing: str = ""
    separators: str = ""
    """Characters, besides white space, that may stand between calls."""
    arguments_key: str = "arguments"
    opens_with_object: bool = False
    """An answer that begins with a JSON object is a call, also without `opening`."""
    new_id: Callable[[], str] = _call_id

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing)))


HERMES = ToolFamily("hermes", "<tool_call>", "</tool_call>")
LLAMA3_JSON = ToolFamily("llama3_json", "<|python_tag|>", separators=";", arguments_key="parameters", opens_with_object=True)
MISTRAL = ToolFamily("mistral", "[TOOL_CALLS]", separators="[],", new_id=_short_call_id)


def takes_tools(chat_template: str) -> bool:
    """Whether the template puts a request's tools into the prompt."""
    return _JINJA_TOOLS.search(chat_template) is not None


def family_of(chat_template: str) -> ToolFamily | None:
    """The family whose form the template writes its own earlier calls in; None: one that we have no parser for."""
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL
    if "<tool_call>" in chat_template:
        return HERMES
    if '"parameters"' in chat_template and ("<|eot_id|>" in chat_template or "<|python_tag|>" in chat_template):
        return LLAMA3_JSON
    return None


# ---- as a grammar --------------------------------------------------------------------------------------------------------
def grammar_of(family: ToolFamily, tools: Sequence[tuple[str, dict[str, Any]]], is_parallel: bool, special_ids: dict[str, int]) -> str:
    """Lark: one call of one of `tools` (name, JSON schema of its arguments), or up to MAX_PARALLEL_CALLS. `special_ids`: those markers of
    the family that are special tokens of the model, which in a grammar are not text."""

    def marker(text: str) -> str:
        return f"<[{special_ids[text]}]>" if text in special_ids else _literal(text)

    more = f"{{0,{MAX_PARALLEL_CALLS - 1}}}"
    if family is HERMES:
        call = f"{marker(family.opening)} {_literal(chr(10))} object {_literal(chr(10))} {marker(family.closing)}"
        start = f"call ({_literal(chr(10))} call){more}" if is_parallel else "call"
        lines = [f"start: {start}", f"call: {call}"]
    elif family is MISTRAL:
        several = f" ({_literal(', ')} object){more}" if is_parallel else ""
        lines = [f"start: {marker(family.opening)} {_literal('[')} object{several} {_literal(']')}"]
    else:
        several = f" ({_literal('; ')} object){more}" if is_parallel else ""
        lines = [f"start: object{several}"]
    lines.append("object: " + " | ".join(f"object{index}" for index in range(len(tools))))
    for index, (name, schema) in enumerate(tools):
        head = f'{{"name": {json.dumps(name)}, "{family.arguments_key}": '
        lines.append(f"object{index}: {_literal(head)} arguments{index} {_literal('}')}")
        lines.append(f"arguments{index}: %json {json.dumps(with_bounded_whitespace(schema))}")
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text)


# ---- in a stream of text -------------------------------------------------------------------------------------------------
@dataclass
class ParsedText:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: list[Json] = field(default_factory=list)
    """Deltas as the API streams them: the first of a call has its id and name, each has more of its arguments."""


def merged_calls(deltas: Sequence[Json]) -> list[Json]:
    """The calls that these deltas make up, as an answer that is not streamed has them."""
    calls: dict[int, Json] = {}
    for delta in deltas:
        call = calls.setdefault(delta["index"], {"id": delta.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
        for key, text in delta["function"].items():
            call["function"][key] += text
    return list(calls.values())


class ToolCallParser:
    """Feed it the text of an answer in pieces of any size, then `finish`. The pieces' size changes nothing but the deltas' size.

    Text is held back only while it may still become a call. What looked like a call and is none comes out as text.
    """

    def __init__(self, family: ToolFamily, is_parallel: bool = True) -> None:
        self._family = family
        self._is_parallel = is_parallel
        self._buffer = ""
        self._unclaimed = ""
        """Read since the last text or call; text after all if no call follows."""
        self._call: _Call | None = None
        self._is_between = False
        self._has_text = False
        self.num_calls = 0

    def push(self, text: str) -> ParsedText:
        self._buffer += text
        parsed = ParsedText()
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> ParsedText:
        """What is left when the answer ends: a call that was cut short stays as far as it got."""
        if self._call is not None:
            is_shown = self._call.has_started or (self.num_calls and not self._is_parallel)
            return ParsedText("" if is_shown else self._unclaimed + self._call.raw)
        # What stands between and behind calls is their punctuation.
        return ParsedText("" if self._is_between and self.num_calls else self._unclaimed + self._buffer)

    def _step(self, parsed: ParsedText) -> bool:
        """One step; False: nothing to do until more text comes."""
        if not self._buffer:
            return False
        if self._call is not None:
            return self._read_object(self._call, parsed)
        return self._read_between(parsed) if self._is_between else self._read_text(parsed)

    def _read_text(self, parsed: ParsedText) -> bool:
        if self._family.opens_with_object:
            return self._read_first(parsed)
        before, marker, after = self._buffer.partition(self._family.opening)
        if marker:
            self._say(before, parsed)
            self._buffer, self._unclaimed, self._is_between = after, self._unclaimed + marker, True
            return True
        held = _held_back(self._buffer, self._family.opening)
        said = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(said) :]
        self._say(said, parsed)
        return False

    def _read_first(self, parsed: ParsedText) -> bool:
        """The family whose calls can only be the first thing said."""
        start = self._buffer.lstrip()
        if not self._has_text and not self.num_calls:
            if self._family.opening.startswith(start):
                return False
            if start.startswith(("{", self._family.opening)):
                marker = self._family.opening if start.startswith(self._family.opening) else ""
                self._unclaimed = self._buffer[: len(self._buffer) - len(start)] + marker
                self._buffer, self._is_between = start.removeprefix(marker), True
                return True
        said, self._buffer = self._buffer, ""
        self._say(said, parsed)
        return False

    def _read_between(self, parsed: ParsedText) -> bool:
        """Markers, separators and white space around calls; anything else is text again."""
        character = self._buffer[0]
        if character == "{":
            self._call = _Call()
            return True
        if character.isspace() or character in self._family.separators:
            self._buffer, self._unclaimed = self._buffer[1:], self._unclaimed + character
            return True
        for marker in self._family.markers:
            if self._buffer.startswith(marker):
                self._buffer, self._unclaimed = self._buffer[len(marker) :], self._unclaimed + marker
                return True
            if marker.startswith(self._buffer):
                return False
        # After a call, what stood between is its punctuation; before one, it is text like the rest.
        unclaimed, self._unclaimed, self._is_between = self._unclaimed, "", False
        self._has_text = self._has_text or bool(self.num_calls)
        self._say(unclaimed if not self.num_calls else "", parsed)
        return True

    def _read_object(self, call: _Call, parsed: ParsedText) -> bool:
        used, arguments = call.read(self._buffer)
        self._buffer = self._buffer[used:]
        if call.name is not None and (self._is_parallel or self.num_calls - call.has_started == 0):
            if not call.has_started:
                call.has_started, self._unclaimed = True, ""
                head = {"index": self.num_calls, "id": self._family.new_id(), "type": "function"}
                parsed.calls.append({**head, "function": {"name": call.name, "arguments": arguments}})
                self.num_calls += 1
            elif arguments:
                last = self.num_calls - 1
                if parsed.calls and parsed.calls[-1]["index"] == last:
                    parsed.calls[-1]["function"]["arguments"] += arguments
                else:
                    parsed.calls.append({"index": last, "function": {"arguments": arguments}})
        if call.is_complete:
            self._call = None
            if call.name is None:
                unclaimed, self._unclaimed, self._is_between = self._unclaimed, "", False
                self._has_text = True
                self._say(unclaimed + call.raw, parsed)
        return bool(self._buffer)

    def _say(self, text: str, parsed: ParsedText) -> None:
        """White space is held until something else is said: before a call it is nobody's."""
        text, self._unclaimed = self._unclaimed + text, ""
        if self._has_text or text.strip():
            self._has_text = True
            parsed.content += text
        else:
            self._unclaimed = text


class _Call:
    """One JSON object as it arrives. Its arguments are handed on while they are read where its name comes first, else at its end."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.has_started = False
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._in_arguments = False

    def read(self, text: str) -> tuple[int, str]:
        """(characters of `text` that belong to the object, those that are new arguments)."""
        arguments: list[str] = []
        for position, character in enumerate(text):
            self.raw += character
            opens = False
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
                opens = character == "{" and self._depth == 2
            elif character in "}]":
                self._depth -= 1
            if opens and self.name is None:
                self._find_header()
            if self._in_arguments:
                arguments.append(character)
                self._in_arguments = self._depth > 1
            if self._depth == 0:
                self.is_complete = True
                if self.name is None:
                    arguments.append(self._read_whole())
                return position + 1, "".join(arguments)
        return len(text), "".join(arguments)

    def _find_header(self) -> None:
        header = _HEADER.fullmatch(self.raw[:-1])
        if header is not None:
            try:
                self.name = json.loads(header[1])
            except ValueError:
                return
            self._in_arguments = True

    def _read_whole(self) -> str:
        """Sets `name` if the object is a call in another order of keys; its arguments as JSON text."""
        try:
            value = json.loads(self.raw)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(value.get("name"), str):
            return ""
        self.name = value["name"]
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            return arguments
        return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _held_back(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
