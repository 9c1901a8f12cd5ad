"""Pieces and usage as the JSON objects of the OpenAI API: chunks of a stream, or one whole answer. Plain dicts for orjson."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from services.router.http.error_object import error_object
from services.router.openai.choice import TokenPiece
from services.router.openai.prompt_logprobs import PromptReport, first_alternatives
from services.router.openai.tool_calls import Json, ParsedText, ToolCallParser, merged_calls
from shared.errors import PagewireError
from shared.messages import TokenLogprobs
from shared.text.tokenizer import Tokenizer


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
    """One of the APIs: completions, chat, responses."""

    def chunk(self, index: int, piece: TokenPiece, is_first: bool, prefix: str) -> Json:
        """One token of choice `index`; `prefix` (an echoed prompt) stands before the text of the first."""
        ...

    def event(self, chunk: Json) -> bytes:
        """A chunk as it goes over the wire."""
        ...

    def closing(self, usage: Usage, include_usage: bool) -> bytes:
        """What ends a stream after the last token."""
        ...

    def error_event(self, error: PagewireError) -> bytes:
        """What ends a stream that broke off."""
        ...

    def whole(self, choices: Sequence[Sequence[TokenPiece]], prefixes: Sequence[str], usage: Usage) -> Json: ...

    def add_prompt(self, answer: Json, place: int, report: PromptReport) -> None:
        """What `report` says, into an answer or a first chunk, for the choice at `place` in it."""
        ...


class _Chunks:
    """How completions and chat stream: data lines without names, and [DONE] after the last token."""

    def __init__(self, head: Json) -> None:
        self._chunk_head = head

    def event(self, chunk: Json) -> bytes:
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def closing(self, usage: Usage, include_usage: bool) -> bytes:
        usage_event = self.event({**self._chunk_head, "choices": [], "usage": usage.as_json()}) if include_usage else b""
        return usage_event + b"data: [DONE]\n\n"

    def error_event(self, error: PagewireError) -> bytes:
        """Nothing follows it, in particular no [DONE]."""
        return self.event(error_object(error))


class CompletionFormat(_Chunks):
    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, tokens_as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids
        self._head = {"id": head.answer_id, "object": "text_completion", "created": head.created, "model": head.model}
        super().__init__(self._head)

    def chunk(self, index: int, piece: TokenPiece, is_first: bool, prefix: str) -> Json:
        text = prefix + piece.text if is_first else piece.text
        logprobs = self._logprobs([piece], len(prefix)) if piece.logprobs is not None else None
        return {**self._head, "choices": [self._choice(index, text, logprobs, piece)]}

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
        given = [(piece.token_id, offset + piece.text_offset, piece.logprobs) for piece in pieces]
        return self._lists([(token_id, at, entry) for token_id, at, entry in given if token_id is not None and entry is not None])

    def _lists(self, tokens: Sequence[tuple[int, int, TokenLogprobs | None]]) -> Json | None:
        """(token, where its text begins, its logprobs or None for the first of a prompt)."""
        if not tokens:
            return None
        return {
            "text_offset": [at for _, at, _ in tokens],
            "token_logprobs": [entry.logprob if entry else None for _, _, entry in tokens],
            "tokens": [self._token(token_id) for token_id, _, _ in tokens],
            "top_logprobs": [self._top(token_id, entry) if entry else None for token_id, _, entry in tokens],
        }

    def add_prompt(self, answer: Json, place: int, report: PromptReport) -> None:
        choice = answer["choices"][place]
        if report.num_echo_logprobs is not None:
            tokens = [
                (token_id, at, first_alternatives(entry, report.num_echo_logprobs))
                for (token_id, entry), at in zip(report.scored_tokens(), report.text_offsets, strict=True)
            ]
            of_prompt, of_answer = self._lists(tokens) or {}, choice["logprobs"] or {}
            choice["logprobs"] = {name: [*values, *of_answer.get(name, ())] for name, values in of_prompt.items()}
        if report.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(report, report.num_prompt_logprobs, self._tokenizer, self._tokens_as_ids)

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


class ChatFormat(_Chunks):
    """`new_parser`: makes what finds the tool calls in a choice's text; None: there are none to be found."""

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: Tokenizer,
        tokens_as_ids: bool = False,
        new_parser: Callable[[], ToolCallParser] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids
        self._head = {"id": head.answer_id, "object": "chat.completion", "created": head.created, "model": head.model}
        super().__init__({**self._head, "object": "chat.completion.chunk"})
        self._new_parser = new_parser
        self._parsers: dict[int, ToolCallParser] = {}

    def chunk(self, index: int, piece: TokenPiece, is_first: bool, prefix: str) -> Json:
        delta: Json = {"content": piece.text}
        finish_reason: str | None = piece.finish_reason
        if self._new_parser is not None:
            parser = self._parsers.setdefault(index, self._new_parser())
            delta = _as_delta(_parse(parser, [piece]))
            finish_reason = _reason_of(parser, piece)
        choice = {
            "index": index,
            "delta": {"role": "assistant", **delta} if is_first else delta,
            "logprobs": self._logprobs([piece]) if piece.logprobs is not None else None,
            "finish_reason": finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return {**self._chunk_head, "choices": [choice]}

    def whole(self, choices: Sequence[Sequence[TokenPiece]], prefixes: Sequence[str], usage: Usage) -> Json:
        return {**self._head, "choices": [self._whole_choice(*choice) for choice in enumerate(choices)], "usage": usage.as_json()}

    def _whole_choice(self, index: int, pieces: Sequence[TokenPiece]) -> Json:
        message: Json = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        finish_reason: str | None = pieces[-1].finish_reason
        if self._new_parser is not None:
            parser = self._new_parser()
            parsed = _parse(parser, pieces)
            message["content"] = parsed.content or (None if parsed.calls else "")
            if parsed.calls:
                message["tool_calls"] = merged_calls(parsed.calls)
            finish_reason = _reason_of(parser, pieces[-1])
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(pieces),
            "finish_reason": finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }

    def _logprobs(self, pieces: Sequence[TokenPiece]) -> Json | None:
        content = [
            token_entry(self._tokenizer, piece, self._tokens_as_ids)
            for piece in pieces
            if piece.token_id is not None and piece.logprobs is not None
        ]
        return {"content": content} if content else None

    def add_prompt(self, answer: Json, place: int, report: PromptReport) -> None:
        """Beside the choices, as vLLM does it: a conversation is one prompt."""
        if report.num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = _prompt_logprobs(report, report.num_prompt_logprobs, self._tokenizer, self._tokens_as_ids)


def token_entry(tokenizer: Tokenizer, piece: TokenPiece, tokens_as_ids: bool = False) -> Json:
    """One entry of the logprobs of chat and responses, for a piece that has a token and logprobs."""
    token_id, entry = piece.token_id, piece.logprobs
    assert token_id is not None
    assert entry is not None

    def described(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if tokens_as_ids else raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    # A token that is not in the text has its name and no bytes: the bytes of all entries are the bytes of the text.
    token = described(token_id, entry.logprob)
    if not piece.is_text:
        token["bytes"] = []
    # As many as were asked for, the sampled token among them or not: its own entry is beside them.
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    return {**token, "top_logprobs": [described(*pair) for pair in top]}


def _parse(parser: ToolCallParser, pieces: Sequence[TokenPiece]) -> ParsedText:
    """The text of the next pieces of a choice, what was held back included if it ends with them."""
    parsed = parser.push("".join(piece.text for piece in pieces))
    if pieces[-1].finish_reason is not None:
        parsed.content += parser.finish().content
    return parsed


def _as_delta(parsed: ParsedText) -> Json:
    if not parsed.calls:
        return {"content": parsed.content}
    return {**({"content": parsed.content} if parsed.content else {}), "tool_calls": parsed.calls}


def _reason_of(parser: ToolCallParser, piece: TokenPiece) -> str | None:
    return "tool_calls" if piece.finish_reason == "stop" and parser.num_calls else piece.finish_reason


def _alternatives(token_id: int, entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
    """The most likely tokens, and the sampled one if it is not among them."""
    yield from zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    if token_id not in entry.top_token_ids:
        yield token_id, entry.logprob


def _prompt_logprobs(report: PromptReport, num_top: int, tokenizer: Tokenizer, tokens_as_ids: bool) -> list[Json | None]:
    """In vLLM's form: the prompt's own token first, then the most likely ones; null for the first token."""

    def described(token_id: int, logprob: float, rank: int) -> Json:
        text = f"token_id:{token_id}" if tokens_as_ids else tokenizer.token_text(token_id)
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    result: list[Json | None] = []
    for token_id, full_entry in report.scored_tokens():
        entry = first_alternatives(full_entry, num_top)
        if entry is None:
            result.append(None)
            continue
        position = {str(token_id): described(token_id, entry.logprob, entry.rank)}
        for rank, (other, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), 1):
            position.setdefault(str(other), described(other, logprob, rank))
        result.append(position)
    return result
