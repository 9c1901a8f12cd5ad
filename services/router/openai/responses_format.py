"""Pieces and usage as the objects and named events of /v1/responses: one message of text, with an event a token."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from services.router.http.error_object import error_object
from services.router.openai.answer_format import AnswerHead, Usage, token_entry
from services.router.openai.choice import TokenPiece
from services.router.openai.prompt_logprobs import PromptReport
from services.router.openai.responses_request import ResponsesRequest
from services.router.openai.tool_calls import Json
from shared.errors import PagewireError
from shared.ids import new_request_id
from shared.text.tokenizer import Tokenizer

_CONTENT = {"output_index": 0, "content_index": 0}


class ResponsesFormat:
    """An AnswerFormat (services/router/openai/answer_format.py) for one answer: it numbers the events of its stream."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, request: ResponsesRequest) -> None:
        self._tokenizer = tokenizer
        self._item_id = new_request_id("msg")
        self._pieces: list[TokenPiece] = []
        self._num_events = 0
        self._response: Json = {
            "id": head.answer_id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }
        if request.text is not None and request.text.format is not None:
            self._response["text"] = {"format": request.text.format.model_dump(by_alias=True, exclude_none=True)}

    def chunk(self, index: int, piece: TokenPiece, is_first: bool, prefix: str) -> Json:
        """The events of one token, the first ones of the stream before it."""
        events = self._opening() if is_first else []
        self._pieces.append(piece)
        place = {"item_id": self._item_id, **_CONTENT}
        delta = {**place, "delta": piece.text, "logprobs": self._logprobs([piece])}
        return {"events": [*events, self._event("response.output_text.delta", delta)]}

    def event(self, chunk: Json) -> bytes:
        return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n" for event in chunk["events"])

    def closing(self, usage: Usage, include_usage: bool) -> bytes:
        message = self._message(self._pieces)
        part = message["content"][0]
        place = {"item_id": self._item_id, **_CONTENT}
        whole = self._whole(self._pieces, usage)
        ended = [
            self._event("response.output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}),
            self._event("response.content_part.done", {**place, "part": part}),
            self._event("response.output_item.done", {"output_index": 0, "item": message}),
            self._event(f"response.{whole['status']}", {"response": whole}),
        ]
        return self.event({"events": ended})

    def error_event(self, error: PagewireError) -> bytes:
        what = error_object(error)["error"]
        described = {"code": str(what["code"]), "message": what["message"], "param": what["param"]}
        return self.event({"events": [self._event("error", described)]})

    def whole(self, choices: Sequence[Sequence[TokenPiece]], prefixes: Sequence[str], usage: Usage) -> Json:
        return self._whole(choices[0], usage)

    def add_prompt(self, answer: Json, place: int, report: PromptReport) -> None:
        raise AssertionError("prompt_logprobs is refused by ResponsesRequest")

    def _opening(self) -> list[Json]:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.created", {"response": self._response}),
            self._event("response.in_progress", {"response": self._response}),
            self._event("response.output_item.added", {"output_index": 0, "item": item}),
            self._event("response.content_part.added", {"item_id": self._item_id, **_CONTENT, "part": part}),
        ]

    def _event(self, kind: str, fields: Json) -> Json:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _whole(self, pieces: Sequence[TokenPiece], usage: Usage) -> Json:
        is_cut = pieces[-1].finish_reason == "length"
        return {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._message(pieces)],
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
                "output_tokens": usage.num_completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            },
        }

    def _message(self, pieces: Sequence[TokenPiece]) -> Json:
        text = "".join(piece.text for piece in pieces)
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(pieces)}
        status = "incomplete" if pieces[-1].finish_reason == "length" else "completed"
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _logprobs(self, pieces: Sequence[TokenPiece]) -> list[Json]:
        scored = [piece for piece in pieces if piece.token_id is not None and piece.logprobs is not None]
        return [token_entry(self._tokenizer, piece) for piece in scored]
