"""The log-probabilities of a prompt, put together from the parts that workers send while they compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.messages import PromptLogprobs, TokenLogprobs
from shared.text.detokenizer import IncrementalDetokenizer
from shared.text.tokenizer import Tokenizer


class PromptLogprobsAssembler:
    """By position, so that parts may come in any order and again (after a retry, or when decode computes the prompt itself)."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._entries: list[TokenLogprobs | None] = [None] * num_prompt_tokens
        self._num_missing = num_prompt_tokens - 1

    def add(self, part: PromptLogprobs) -> None:
        """Positions past the end of the prompt are ignored."""
        for position, entry in enumerate(part.entries, part.first_position):
            if position < len(self._entries):
                self._num_missing -= self._entries[position] is None
                self._entries[position] = entry

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0

    @property
    def entries(self) -> Sequence[TokenLogprobs | None]:
        """One a prompt token, in order; None for the first, and for what has not come."""
        return self._entries


@dataclass(frozen=True)
class PromptReport:
    """What an answer says about its prompt; the counts are None for what the client did not ask for."""

    token_ids: Sequence[int]
    assembler: PromptLogprobsAssembler
    text_offsets: Sequence[int]
    """Characters of the echoed prompt before each token."""
    num_prompt_logprobs: int | None
    num_echo_logprobs: int | None

    def scored_tokens(self) -> list[tuple[int, TokenLogprobs | None]]:
        return list(zip(self.token_ids, self.assembler.entries, strict=True))


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool, text: str) -> list[int]:
    """Where each token begins in `text`, the prompt as it is echoed. A token that has no text of its own there (a special one, the
    middle of a character) begins where the next does."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    offsets, num_characters = [], 0
    for token_id in token_ids:
        offsets.append(num_characters)
        num_characters += len(detokenizer.push(token_id))
    # A token of the tokenizer's own (BOS) stands before the text.
    num_added = max(0, num_characters - len(text))
    return [min(max(0, offset - num_added), len(text)) for offset in offsets]


def first_alternatives(entry: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    """`entry` with no more than `count` of its most likely tokens: two parts of an answer may ask for different numbers."""
    if entry is None or len(entry.top_token_ids) <= count:
        return entry
    return msgspec.structs.replace(entry, top_token_ids=entry.top_token_ids[:count], top_logprobs=entry.top_logprobs[:count])
