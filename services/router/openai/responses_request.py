"""What a client may send to /v1/responses in its text form. Nothing is stored: each request brings its whole conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.router.openai.openai_types import INSTEAD, NOT_OFFERED, ChatMessage, GenerationRequest
from services.router.openai.response_format import AskedGrammar, asked_json_object, asked_json_schema
from shared.errors import InvalidRequestError

LOGPROBS_INCLUDED = "message.output_text.logprobs"
_INT64 = 2**63
_PART_TYPES = ("input_text", "output_text", "text")
_STORED_NOWHERE = "by this server, which stores nothing; send the whole conversation as input"
_ELSEWHERE = "by responses; use /v1/chat/completions"

_NOT_OFFERED: dict[str, tuple[object, ...]] = {
    **NOT_OFFERED,
    "background": (False,),
    "conversation": (),
    "logprobs": (False,),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
}
_INSTEAD = {
    **INSTEAD,
    "conversation": _STORED_NOWHERE,
    "logprobs": f"here; use include ({LOGPROBS_INCLUDED}) and top_logprobs",
    "previous_response_id": _STORED_NOWHERE,
    "prompt": "by this server, which stores none; send it as instructions and input",
    "tools": _ELSEWHERE,
    "tool_choice": _ELSEWHERE,
    "truncation": "by this server; use truncate_prompt_tokens",
}
# Fields of completions and chat that the answer to this request has no place for, with the values (besides null) that ask for nothing.
_OF_OTHERS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "response_format": (),
    "max_tokens": (),
    "max_completion_tokens": (),
}
# Fields that change nothing here and are sent by many clients.
_WITHOUT_EFFECT = frozenset(
    {
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
    }
)


class TextFormat(BaseModel):
    """`strict` changes nothing: an answer always follows its schema."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    format: TextFormat | None = None
    verbosity: str | None = None

    def asked_grammar(self) -> AskedGrammar | None:
        """Raises InvalidRequestError for a schema that is missing or not JSON."""
        if self.format is None or self.format.type == "text":
            return None
        return asked_json_object("text") if self.format.type == "json_object" else asked_json_schema("text", self.format.schema_)


class ResponsesRequest(GenerationRequest):
    """`input`: a text, or messages whose content is a text or parts of type input_text and output_text."""

    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = _NOT_OFFERED
    instead: ClassVar[Mapping[str, str]] = _INSTEAD
    without_effect: ClassVar[frozenset[str]] = _WITHOUT_EFFECT
    prompt_field: ClassVar[str] = "input"

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=_INT64)
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, Any] | None = None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_output_tokens"

    @property
    def num_logprobs(self) -> int | None:
        is_asked = LOGPROBS_INCLUDED in (self.include or ()) or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def include_usage(self) -> bool:
        """It stands in the last event always, whatever stream_options (of other use here) says."""
        return False

    def check_offered(self) -> None:
        for name, defaults in _OF_OTHERS.items():
            value = getattr(self, name)
            if value is not None and value not in defaults:
                raise InvalidRequestError(f"{name} is not supported {_ELSEWHERE}", param=name)
        super().check_offered()

    def messages(self) -> list[ChatMessage]:
        """The conversation, instructions first. Raises InvalidRequestError for an item that is not a message of text."""
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, ChatMessage(role="user", content=self.input)]
        if not self.input:
            raise InvalidRequestError("input must not be empty", param="input")
        return [*messages, *(_message(f"input[{index}]", item) for index, item in enumerate(self.input))]


def _message(where: str, item: dict[str, Any]) -> ChatMessage:
    kind = item.get("type", "message")
    if kind != "message":
        raise InvalidRequestError(f"{where}: items of type {str(kind)[:40]!r} are not supported; send messages", param="input")
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where} has no role", param="input")
    if isinstance(content, str):
        return ChatMessage(role=role, content=content)
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content must be a string or a list of parts", param="input")
    return ChatMessage(role=role, content="".join(_text(f"{where}.content[{index}]", part) for index, part in enumerate(content)))


def _text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _PART_TYPES:
        message = f"{where}: parts of type {str(kind)[:40]!r} are not supported by this model; send parts of type 'input_text'"
        raise InvalidRequestError(message, param="input")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a string", param="input")
    return text
