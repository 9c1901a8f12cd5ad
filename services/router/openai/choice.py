"""One choice of a request while its tokens arrive: text, stop strings, logprobs, the reason it ended. Pure; no I/O.

Streamed or not, an answer is the concatenation of the same pieces, so the two can never disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.messages import FinishReason, RequestOutput, TokenLogprobs
from shared.text.detokenizer import IncrementalDetokenizer
from shared.text.stop_strings import StopStringMatcher
from shared.text.tokenizer import Tokenizer


class TokenPiece(NamedTuple):
    """What one token adds. `text` may be "" while bytes or a possible stop string are held back; logprobs never are."""

    token_id: int | None
    """None where no token was asked for."""
    text: str
    logprobs: TokenLogprobs | None
    text_offset: int
    """Characters of the choice decoded before this token."""
    is_text: bool
    """False: a stop token or a special token that the client does not see; it adds nothing to the text."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class TextOptions:
    """How tokens become the text a client sees."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that are text all the same: the markers of tool calls."""
    continues_text: bool = True
    min_tokens: int = 0


class ChoiceAssembler:
    """Feed every RequestOutput of one choice to `push`, in order, until a piece has a finish_reason."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, options.skip_special_tokens, continues_text=options.continues_text, shown=options.shown_special_ids
        )
        self._matcher = StopStringMatcher(options.stops, options.include_stop)
        self._options = options
        self._num_characters = 0
        self.num_tokens = 0

    def push(self, output: RequestOutput) -> TokenPiece:
        if output.token_id is None:
            return TokenPiece(None, "", None, 0, False, output.finish_reason, None)
        self.num_tokens += 1
        offset = self._num_characters
        # Decode ends with "stop" only for a token (EOS or stop_token_ids); that token is no text unless the client asks for it.
        is_stop_token = output.finish_reason == "stop"
        is_text = not (is_stop_token and not self._options.include_stop) and not self._detokenizer.skips(output.token_id)
        decoded = self._detokenizer.push(output.token_id) if is_text else ""
        if output.finish_reason is not None:
            decoded += self._detokenizer.flush()
        self._num_characters += len(decoded)
        text = decoded if self.num_tokens <= self._options.min_tokens else self._matcher.push(decoded)
        finish_reason, stop_reason = output.finish_reason, output.stop_token_id
        if self._matcher.matched is not None:
            return TokenPiece(output.token_id, text, output.logprobs, offset, is_text, "stop", self._matcher.matched)
        if finish_reason is not None:
            text += self._matcher.flush()
        return TokenPiece(output.token_id, text, output.logprobs, offset, is_text, finish_reason, stop_reason)
