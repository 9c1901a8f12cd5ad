"""Pieces and usage as the JSON objects of the OpenAI API: chunks of a stream, or one whole answer. Plain dicts for orjson."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.choice import TokenPiece
from shared.messages import TokenLogprobs
from shared.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass
class Usage:
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(frozen=True)
class AnswerHead:
    """What is the same in all chunks of an answer."""

    answer_id: str
    created: int
    model: str


class AnswerFormat(Protocol):
    """One of the two APIs."""

    def chunk(self, index: int, piece: TokenPiece, is_first: bool, prefix: str) -> Json:
        """One token of choice `index`; `prefix` (an echoed prompt) stands before the text of the first."""
        ...

    def usage_chunk(self, usage: Usage) -> Json: ...

    def whole(self, choices: Sequence[Sequence[TokenPiece]], prefixes: Sequence[str], usage: Usage) -> Json: ...


class CompletionFormat:
    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, tokens_as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids
        self._head = {"id": head.answer_id, "object": "text_completion", "created": head.created, "model": head.model}

    def chunk(self, index: int, piece: TokenPiece, is_first: bool, prefix: str) -> Json:
        text = prefix + piece.text if is_first else piece.text
        return {**self._head, "choices": [self._choice(index, text, self._logprobs([piece], len(prefix)), piece)]}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head, "choices": [], "usage": usage.as_json()}

    def whole(self, choices: Sequence[Sequence[TokenPiece]], prefixes: Sequence[str], usage: Usage) -> Json:
        bodies = [
            self._choice(index, prefix + "".join(piece.text for piece in pieces), self._logprobs(pieces, len(prefix)), pieces[-1])
            for index, (pieces, prefix) in enumerate(zip(choices, prefixes, strict=True))
        ]
        return {**self._head, "choices": bodies, "usage": usage.as_json()}

    def _choice(self, index: int, text: str, logprobs: Json | None, last: TokenPiece) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _logprobs(self, pieces: Sequence[TokenPiece], offset: int) -> Json | None:
        given = [(piece, piece.logprobs) for piece in pieces if piece.logprobs is not None]
        if not given:
            return None
        return {
            "text_offset": [offset + piece.text_offset for piece, _ in given],
            "token_logprobs": [entry.logprob for _, entry in given],
            "tokens": [self._token(piece.token_id) for piece, _ in given],
            "top_logprobs": [self._top(piece.token_id, entry) for piece, entry in given],
        }

    def _top(self, token_id: int, entry: TokenLogprobs) -> Json:
        return {self._token(other): logprob for other, logprob in _alternatives(token_id, entry)}

    def _token(self, token_id: int) -> str:
        """A token as text; one that is only part of a character as "bytes:\\xf0\\x9f", so that each id reads differently."""
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat:
    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, tokens_as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids
        self._head = {"id": head.answer_id, "object": "chat.completion", "created": head.created, "model": head.model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}

    def chunk(self, index: int, piece: TokenPiece, is_first: bool, prefix: str) -> Json:
        delta = {"role": "assistant", "content": piece.text} if is_first else {"content": piece.text}
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs([piece]),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return {**self._chunk_head, "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._chunk_head, "choices": [], "usage": usage.as_json()}

    def whole(self, choices: Sequence[Sequence[TokenPiece]], prefixes: Sequence[str], usage: Usage) -> Json:
        bodies = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
                "logprobs": self._logprobs(pieces),
                "finish_reason": pieces[-1].finish_reason,
                "stop_reason": pieces[-1].stop_reason,
            }
            for index, pieces in enumerate(choices)
        ]
        return {**self._head, "choices": bodies, "usage": usage.as_json()}

    def _logprobs(self, pieces: Sequence[TokenPiece]) -> Json | None:
        content = [self._entry(piece, piece.logprobs) for piece in pieces if piece.logprobs is not None]
        return {"content": content} if content else None

    def _entry(self, piece: TokenPiece, entry: TokenLogprobs) -> Json:
        # The token that ended the answer has its name and no bytes: the bytes of all entries are the bytes of the text.
        token = self._token(piece.token_id, entry.logprob)
        if piece.is_stop_token:
            token["bytes"] = []
        # alternatives[0] is the sampled token where the client asked for none.
        count = len(entry.top_token_ids)
        return {**token, "top_logprobs": [self._token(*pair) for pair in _alternatives(piece.token_id, entry)] if count else []}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._tokens_as_ids else raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _alternatives(token_id: int, entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
    """The most likely tokens, and the sampled one if it is not among them."""
    yield from zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    if token_id not in entry.top_token_ids:
        yield token_id, entry.logprob
