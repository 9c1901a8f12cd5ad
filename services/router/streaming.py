"""The answer to one generation request, written straight to the socket: one token, one event.

Nothing is sent before the first token is there, so that whatever fails until then is an ordinary HTTP error. A client that hangs
up, streaming or not, ends the request everywhere: the connection is watched while the answer is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.answer_format import AnswerFormat, Json, Usage
from services.router.choice import ChoiceAssembler, TokenPiece
from services.router.dispatcher import EngineRequest
from services.router.error_object import error_event, error_response
from services.router.in_flight import InFlightLimit
from services.router.observation import RequestObservation
from services.router.prompt_logprobs import PromptReport
from shared.errors import PagewireError, UnavailableError, WorkerFailedError
from shared.messages import RequestOutput

_logger = logging.getLogger(__name__)
_SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_MERGE_QUEUE_LENGTH = 64

Generate = Callable[[EngineRequest], AsyncGenerator[RequestOutput, None]]


@dataclass(frozen=True)
class PlannedChoice:
    """One choice to be generated. Those of one prompt share `prompt_index`; `prefix` is the echoed prompt."""

    engine_request: EngineRequest
    assembler: ChoiceAssembler
    prompt_index: int
    is_leader: bool
    """The first choice of its prompt."""
    waits_for_leader: bool = False
    """Start only with the leader's first token, and reuse the KV it left, instead of computing the same prompt beside it."""
    prefix: str = ""
    prompt_report: PromptReport | None = None


@dataclass(frozen=True)
class AnswerOptions:
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False


class GenerationResponse(Response):
    """Runs the choices when the framework calls it, and ends the observation whatever happens."""

    def __init__(
        self,
        generate: Generate,
        choices: list[PlannedChoice],
        answer_format: AnswerFormat,
        options: AnswerOptions,
        observation: RequestObservation,
        in_flight: InFlightLimit,
        extra_headers: dict[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(extra_headers)
        self._generate = generate
        self._choices = choices
        self._format = answer_format
        self._options = options
        self._observation = observation
        self._in_flight = in_flight
        self._extra_headers = extra_headers
        self._leader_has_token = {choice.prompt_index: asyncio.Event() for choice in choices}
        self._cached_tokens: dict[int, int] = {}
        self._finish_reasons: dict[int, str] = {}
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(scope, receive, send))
        watch = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await answer
                self._observation.disconnect(self._usage())
            else:
                answer.result()
        except asyncio.CancelledError:
            # Only the server does this, when its time to drain is over: say so instead of letting the connection break.
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            error = UnavailableError("the server is shutting down", retry_after_s=1.0)
            self._observation.fail(error, self._usage())
            await self._send_error(error, scope, receive, send)
        finally:
            for task in (answer, watch):
                task.cancel()
            await asyncio.gather(answer, watch, return_exceptions=True)
            self._observation.abandon()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._in_flight.hold(len(self._choices)):
                if self._options.stream:
                    await self._stream(send)
                else:
                    await self._send_whole(send)
        except PagewireError as error:
            self._observation.fail(error, self._usage())
            await self._send_error(error, scope, receive, send)
        except Exception:
            _logger.exception("request failed")
            failure = PagewireError("internal error; the log of the router has the details")
            self._observation.fail(failure, self._usage())
            await self._send_error(failure, scope, receive, send)
        else:
            self._observation.succeed(self._usage(), [self._finish_reasons[index] for index in range(len(self._choices))])

    async def _stream(self, send: Send) -> None:
        is_first = [True] * len(self._choices)
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                chunk = self._format.chunk(index, piece, is_first[index], self._choices[index].prefix)
                if self._options.return_token_ids:
                    self._add_token_ids(chunk["choices"][0], index, [piece], with_prompt=is_first[index])
                if is_first[index]:
                    self._add_prompt(chunk, 0, index)
                is_first[index] = False
                if self._options.continuous_usage:
                    chunk["usage"] = self._usage().as_json()
                await self._send_event(send, b"data: " + orjson.dumps(chunk) + b"\n\n")
                self._observation.token(index)
        if self._options.include_usage:
            await self._send_event(send, b"data: " + orjson.dumps(self._format.usage_chunk(self._usage())) + b"\n\n")
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _send_whole(self, send: Send) -> None:
        collected: list[list[TokenPiece]] = [[] for _ in self._choices]
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                collected[index].append(piece)
                self._observation.token(index)
        answer = self._format.whole(collected, [choice.prefix for choice in self._choices], self._usage())
        if self._options.return_token_ids:
            for index, pieces_of_choice in enumerate(collected):
                self._add_token_ids(answer["choices"][index], index, pieces_of_choice, with_prompt=True)
        for index in range(len(self._choices)):
            self._add_prompt(answer, index, index)
        body = orjson.dumps(answer)
        await self._send_start(send, {"content-type": "application/json", "content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _add_prompt(self, answer: Json, place: int, index: int) -> None:
        """What choice `index`, which stands at `place` in `answer`, says about its prompt."""
        report = self._choices[index].prompt_report
        if report is not None:
            self._format.add_prompt(answer, place, report)

    def _add_token_ids(self, choice: Json, index: int, pieces: list[TokenPiece], with_prompt: bool) -> None:
        choice["token_ids"] = [piece.token_id for piece in pieces if piece.token_id is not None]
        if with_prompt:
            choice["prompt_token_ids"] = self._choices[index].engine_request.prompt.token_ids

    async def _pieces(self) -> AsyncGenerator[tuple[int, TokenPiece], None]:
        """The pieces of all choices as they come, each with the index of its choice."""
        if len(self._choices) == 1:
            async with aclosing(self._run(0)) as pieces:
                async for piece in pieces:
                    yield 0, piece
            return
        merged: asyncio.Queue[tuple[int, TokenPiece | BaseException | None]] = asyncio.Queue(_MERGE_QUEUE_LENGTH)
        tasks = [asyncio.create_task(self._forward(index, merged)) for index in range(len(self._choices))]
        try:
            num_running = len(tasks)
            while num_running:
                index, item = await merged.get()
                if item is None:
                    num_running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, index: int, merged: asyncio.Queue[tuple[int, TokenPiece | BaseException | None]]) -> None:
        choice = self._choices[index]
        try:
            if choice.waits_for_leader:
                await self._leader_has_token[choice.prompt_index].wait()
            async with aclosing(self._run(index)) as pieces:
                async for piece in pieces:
                    await merged.put((index, piece))
            await merged.put((index, None))
        except Exception as error:
            await merged.put((index, error))

    async def _run(self, index: int) -> AsyncGenerator[TokenPiece, None]:
        """One choice, until decode or a stop string ends it; then decode is told to stop by the closing of the generator."""
        choice = self._choices[index]
        async with aclosing(self._generate(choice.engine_request)) as outputs:
            async for output in outputs:
                if choice.is_leader and output.index == 0:
                    self._cached_tokens[choice.prompt_index] = output.num_cached_tokens
                    self._leader_has_token[choice.prompt_index].set()
                piece = choice.assembler.push(output)
                if piece.finish_reason is not None:
                    self._finish_reasons[index] = piece.finish_reason
                yield piece
                if piece.finish_reason is not None:
                    return
        raise WorkerFailedError("the answer ended without a reason")

    def _usage(self) -> Usage:
        """As of now. The prompt of n choices counts once; what was reused is what the first choice of each prompt reused."""
        prompts = {choice.prompt_index: len(choice.engine_request.prompt.token_ids) for choice in self._choices}
        num_completion_tokens = sum(choice.assembler.num_tokens for choice in self._choices)
        return Usage(sum(prompts.values()), num_completion_tokens, sum(self._cached_tokens.values()))

    async def _send_start(self, send: Send, headers: dict[str, str]) -> None:
        self._has_started = True
        merged = {**self._extra_headers, **headers}
        raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})

    async def _send_event(self, send: Send, event: bytes) -> None:
        if not self._has_started:
            await self._send_start(send, _SSE_HEADERS)
        await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _send_error(self, error: PagewireError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._has_started:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": False})
        else:
            await error_response(error, self._extra_headers)(scope, receive, send)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
