"""The model as the router needs it: names, limits, tokenizer, chat template. No weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from types import MappingProxyType
from typing import Any

from services.router.openai.tool_calls import ToolFamily
from shared.errors import InvalidRequestError, ModelNotFoundError
from shared.text.tokenizer import Tokenizer

_INLINE_CHARACTERS = 4096
"""Longer texts are tokenized in a thread: the event loop has other clients to serve."""

ChatRenderer = Callable[[Sequence[dict[str, Any]], bool, Mapping[str, Any]], str]


@dataclass(frozen=True)
class ServedModel:
    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    """Ids from here on are refused."""
    tokenizer: Tokenizer
    render_chat: ChatRenderer | None
    """Messages, whether to open the assistant's turn, and other variables of the template -> prompt text. None: the model has no chat
    template."""
    takes_tools: bool = False
    """The chat template has a place for tools."""
    tool_family: ToolFamily | None = None
    created: int = field(default_factory=lambda: int(time()))

    def check_name(self, model: str | None) -> None:
        """Raises ModelNotFoundError; an absent or empty name means the one model served."""
        if model and model != self.name:
            raise ModelNotFoundError(f"the model {model[:100]!r} does not exist; this server serves {self.name!r}", param="model")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def render(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """In a thread: a template is a program, and this one's input is the client's."""
        if self.render_chat is None:
            raise InvalidRequestError(f"{self.name} has no chat template; use /v1/completions", param="messages")
        return await asyncio.to_thread(self.render_chat, messages, add_generation_prompt, variables)

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Those of `texts` that are special tokens, with their ids."""
        found = {text: self.tokenizer.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in found.items() if token_id is not None and token_id in self.tokenizer.special_ids}

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises InvalidRequestError for an id outside the vocabulary; `field` is where they stood."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequestError(f"{field}: token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})", param=field)


def resolve_max_tokens(
    requested: int | None,
    default: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    prompt_field: str = "prompt",
    max_tokens_field: str = "max_tokens",
) -> int:
    """How many tokens may be generated: prompt + max_tokens <= max_model_len.

    Errors name the fields as given. A limit the client named must fit as it is; a default (None: no limit of its own) is cut to what fits.
    """
    room = max_model_len - num_prompt_tokens
    wanted = requested if requested is not None else default
    if room < (1 if requested is None else requested):
        asked = f"{requested} tokens of output were asked for" if requested is not None else "at least 1 token of output needs room"
        raise InvalidRequestError(
            f"this model's maximum context length is {max_model_len} tokens; the prompt has {num_prompt_tokens} tokens and {asked}: "
            f"shorten the prompt or lower {max_tokens_field}",
            param=prompt_field if room < 1 else max_tokens_field,
        )
    return room if wanted is None else min(wanted, room)
