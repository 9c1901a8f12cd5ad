"""The answer to one generation request, written straight to the socket: one token, one event.

Nothing is sent before the first token is there, so that whatever fails until then is an ordinary HTTP error. A client that hangs
up, streaming or not, ends the request everywhere: the connection is watched while the answer is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.dispatcher import EngineRequest
from services.router.http.error_object import error_response
from services.router.in_flight import InFlightLimit
from services.router.observation import RequestObservation
from services.router.openai import best_of
from services.router.openai.answer_format import AnswerFormat, Usage
from services.router.openai.choice import ChoiceAssembler, TokenPiece
from services.router.openai.prompt_logprobs import PromptReport
from services.router.openai.tool_calls import Json
from shared.errors import PagewireError, UnavailableError, WorkerFailedError
from shared.messages import RequestOutput

_logger = logging.getLogger(__name__)
_SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_MERGE_QUEUE_LENGTH = 64

Generate = Callable[[EngineRequest, Callable[[int], bool]], AsyncGenerator[RequestOutput, None]]


@dataclass(frozen=True)
class PlannedPrompt:
    """One prompt, and an assembler for each of its sequences; `prefix` is the echoed prompt."""

    engine_request: EngineRequest
    assemblers: Sequence[ChoiceAssembler]
    prefix: str = ""
    prompt_report: PromptReport | None = None


@dataclass(frozen=True)
class AnswerOptions:
    num_choices: int = 1
    """Of each prompt: the best of its sequences where there are more (never with `stream`)."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_logprobs: bool = False
    """False: logprobs that came only to choose by are left out."""


class GenerationResponse(Response):
    """Runs the prompts when the framework calls it, and ends the observation whatever happens. Sequences are numbered through: all of
    the first prompt, then all of the second; without best_of that is the index of the choice."""

    def __init__(
        self,
        generate: Generate,
        prompts: list[PlannedPrompt],
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
        self._prompts = prompts
        self._assemblers = [assembler for prompt in prompts for assembler in prompt.assemblers]
        self._prompt_of = [prompt for prompt in prompts for _ in prompt.assemblers]
        self._format = answer_format
        self._options = options
        self._observation = observation
        self._in_flight = in_flight
        self._extra_headers = extra_headers
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
            with self._in_flight.hold(sum(prompt.engine_request.max_num_sequences for prompt in self._prompts)):
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
            self._observation.succeed(self._usage(), [self._finish_reasons[index] for index in range(len(self._assemblers))])

    async def _stream(self, send: Send) -> None:
        options, has_come = self._options, [False] * len(self._assemblers)
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                is_first = not has_come[index]
                chunk = self._format.chunk(index, piece, is_first, self._prompt_of[index].prefix)
                if options.return_token_ids:
                    self._add_token_ids(chunk["choices"][0], index, [piece], with_prompt=is_first)
                if is_first:
                    has_come[index] = True
                    self._add_prompt(chunk, 0, index)
                if options.continuous_usage:
                    chunk["usage"] = self._usage().as_json()
                if not self._has_started:
                    await self._send_start(send, _SSE_HEADERS)
                await send({"type": "http.response.body", "body": self._format.event(chunk), "more_body": True})
                self._observation.token(index)
        closing = self._format.closing(self._usage(), options.include_usage)
        await send({"type": "http.response.body", "body": closing, "more_body": False})

    async def _send_whole(self, send: Send) -> None:
        collected: list[list[TokenPiece]] = [[] for _ in self._assemblers]
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                collected[index].append(piece)
                self._observation.token(index)
        chosen = self._choose(collected)
        if not self._options.return_logprobs:
            collected = [[piece._replace(logprobs=None) for piece in pieces_of_one] for pieces_of_one in collected]
        prefixes = [self._prompt_of[index].prefix for index in chosen]
        answer = self._format.whole([collected[index] for index in chosen], prefixes, self._usage())
        if self._options.return_token_ids:
            for choice, index in zip(answer["choices"], chosen, strict=True):
                self._add_token_ids(choice, index, collected[index], with_prompt=True)
        for place, index in enumerate(chosen):
            self._add_prompt(answer, place, index)
        body = orjson.dumps(answer)
        await self._send_start(send, {"content-type": "application/json", "content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _choose(self, collected: list[list[TokenPiece]]) -> list[int]:
        """The sequences that become the choices, in order."""
        chosen: list[int] = []
        first = 0
        for prompt in self._prompts:
            count = len(prompt.assemblers)
            of_prompt: Sequence[int] = range(count)
            if count > self._options.num_choices:
                of_prompt = best_of.best(collected[first : first + count], self._options.num_choices)
            chosen += [first + index for index in of_prompt]
            first += count
        return chosen

    def _add_prompt(self, answer: Json, place: int, index: int) -> None:
        """What sequence `index`, whose choice stands at `place` in `answer`, says about its prompt."""
        report = self._prompt_of[index].prompt_report
        if report is not None:
            self._format.add_prompt(answer, place, report)

    def _add_token_ids(self, choice: Json, index: int, pieces: list[TokenPiece], with_prompt: bool) -> None:
        choice["token_ids"] = [piece.token_id for piece in pieces if piece.token_id is not None]
        if with_prompt:
            choice["prompt_token_ids"] = self._prompt_of[index].engine_request.prompt.token_ids

    def _pieces(self) -> AsyncGenerator[tuple[int, TokenPiece], None]:
        """The pieces of all sequences as they come, each with the number of its sequence."""
        return self._run(0) if len(self._prompts) == 1 else self._merged()

    async def _merged(self) -> AsyncGenerator[tuple[int, TokenPiece], None]:
        merged: asyncio.Queue[tuple[int, TokenPiece] | BaseException | None] = asyncio.Queue(_MERGE_QUEUE_LENGTH)
        tasks = [asyncio.create_task(self._forward(number, merged)) for number in range(len(self._prompts))]
        try:
            num_running = len(tasks)
            while num_running:
                item = await merged.get()
                if item is None:
                    num_running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, prompt_number: int, merged: asyncio.Queue[tuple[int, TokenPiece] | BaseException | None]) -> None:
        try:
            async with aclosing(self._run(prompt_number)) as pieces:
                async for numbered_piece in pieces:
                    await merged.put(numbered_piece)
            await merged.put(None)
        except Exception as error:
            await merged.put(error)

    async def _run(self, prompt_number: int) -> AsyncGenerator[tuple[int, TokenPiece], None]:
        """All sequences of one prompt, each until decode or a stop string ends it."""
        prompt = self._prompts[prompt_number]
        first = sum(len(before.assemblers) for before in self._prompts[:prompt_number])
        async with aclosing(self._generate(prompt.engine_request, lambda index: first + index in self._finish_reasons)) as outputs:
            async for output in outputs:
                self._cached_tokens.setdefault(prompt_number, output.num_cached_tokens)
                index = first + output.sequence_index
                piece = self._assemblers[index].push(output)
                if piece.finish_reason is not None:
                    self._finish_reasons[index] = piece.finish_reason
                yield index, piece
        if any(first + index not in self._finish_reasons for index in range(len(prompt.assemblers))):
            raise WorkerFailedError("the answer ended without a reason")

    def _usage(self) -> Usage:
        """As of now. A prompt counts once, and so does what was reused of it; tokens count of all sequences, chosen or not."""
        num_prompt_tokens = sum(len(prompt.engine_request.prompt.token_ids) for prompt in self._prompts)
        num_completion_tokens = sum(assembler.num_tokens for assembler in self._assemblers)
        return Usage(num_prompt_tokens, num_completion_tokens, sum(self._cached_tokens.values()))

    async def _send_start(self, send: Send, headers: dict[str, str]) -> None:
        self._has_started = True
        merged = {**self._extra_headers, **headers}
        raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})

    async def _send_error(self, error: PagewireError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._has_started:
            await send({"type": "http.response.body", "body": self._format.error_event(error), "more_body": False})
        else:
            await error_response(error, self._extra_headers)(scope, receive, send)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
