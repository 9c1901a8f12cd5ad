"""From a parsed body to a planned answer: names and limits checked, template applied, tokens made, one engine request a prompt."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opentelemetry.trace import Tracer

from services.router.dispatcher import Dispatcher, EngineRequest, Prompt
from services.router.grammar.grammar_checker import GrammarChecker
from services.router.in_flight import InFlightLimit
from services.router.metrics import RouterMetrics
from services.router.observation import Receipt, RequestObservation
from services.router.openai.answer_format import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat, Usage
from services.router.openai.choice import ChoiceAssembler, TextOptions
from services.router.openai.openai_types import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from services.router.openai.prompt_logprobs import PromptLogprobsAssembler, PromptReport, text_offsets
from services.router.openai.response_format import AskedGrammar, asked_grammar
from services.router.openai.responses_format import ResponsesFormat
from services.router.openai.responses_request import ResponsesRequest
from services.router.openai.streaming import AnswerOptions, GenerationResponse, PlannedPrompt
from services.router.openai.tools import tool_use, with_parsed_arguments
from services.router.served_model import ServedModel, resolve_max_tokens
from services.router.workers import WorkerDirectory
from shared.config import Settings
from shared.errors import InvalidRequestError, PagewireError
from shared.ids import new_request_id
from shared.sampling_params import StructuredOutput
from shared.telemetry import OPERATION_CHAT, OPERATION_COMPLETION, SPAN_TOKENIZE, start_span
from shared.text.chat_template import up_to_final_message

IGNORED_FIELDS_HEADER = "x-pagewire-ignored-fields"
_MAX_HEADER_CHARACTERS = 512
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class _TokenizedPrompt:
    token_ids: list[int]
    echo: str = ""
    skips_special_tokens: bool = False
    """Special tokens among the ids have no text in `echo`."""


class Frontend:
    """Stateless between requests but for the number in flight."""

    def __init__(
        self,
        model: ServedModel,
        directory: WorkerDirectory,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        tracer: Tracer,
        settings: Settings,
        grammar_checker: GrammarChecker,
    ) -> None:
        self._grammar_checker = grammar_checker
        self._model = model
        self._directory = directory
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tracer = tracer
        self._settings = settings
        self._in_flight = InFlightLimit(settings.max_num_requests, lambda count: metrics.in_flight.set(count))

    @property
    def max_model_len(self) -> int:
        return self._directory.max_model_len(self._model.max_model_len)

    async def complete(self, body: CompletionRequest, receipt: Receipt) -> GenerationResponse:
        """Raises what is wrong with the request; what goes wrong later is in the response."""
        head = self._head("cmpl")
        answer_format = CompletionFormat(head, self._model.tokenizer, bool(body.return_tokens_as_token_ids))
        observation = self._observe(OPERATION_COMPLETION, head, body, receipt)
        with _failing(observation):
            self._check(body)
            prompts = body.prompts()
            self._in_flight.check(len(prompts) * body.num_sequences)
            structured_output = await self._structured_output(asked_grammar(body))
            with self._tokenizing(observation) as sizes:
                tokenized = [await self._tokenize_prompt(body, prompt) for prompt in prompts]
                sizes.extend(len(prompt.token_ids) for prompt in tokenized)
            options = _text_options(body, continues_text=True)
            num_echo_logprobs = body.num_echo_logprobs
            max_tokens = DEFAULT_COMPLETION_MAX_TOKENS
            planned = self._plan(body, tokenized, head, observation, max_tokens, options, num_echo_logprobs, structured_output)
        return self._response(body, planned, answer_format, observation)

    async def chat(self, body: ChatCompletionRequest, receipt: Receipt) -> GenerationResponse:
        """As `complete`, for a conversation; by default the answer may fill the context."""
        head = self._head("chatcmpl")
        observation = self._observe(OPERATION_CHAT, head, body, receipt)
        with _failing(observation):
            self._check(body)
            self._in_flight.check(body.num_sequences)
            tools = tool_use(body, self._model.name, self._model.takes_tools, self._model.tool_family)
            markers = self._model.special_ids(tools.family.markers) if tools is not None else {}
            call_grammar = tools.grammar(markers) if tools is not None else None
            structured_output = await self._structured_output(_only_one(asked_grammar(body), call_grammar))
            variables = {**(body.chat_template_kwargs or {}), **({"tools": tools.definitions} if tools is not None else {})}
            with self._tokenizing(observation) as sizes:
                token_ids = await self._tokenize_chat(
                    body.messages,
                    body.add_generation_prompt is not False and not body.continue_final_message,
                    body.add_special_tokens is not False,
                    variables,
                    bool(body.continue_final_message),
                )
                prompt = _TokenizedPrompt(self._truncated(body, token_ids, None))
                sizes.append(len(prompt.token_ids))
            options = _text_options(body, bool(body.continue_final_message), frozenset(markers.values()))
            planned = self._plan(body, [prompt], head, observation, None, options, None, structured_output)
        new_parser = tools.parser if tools is not None else None
        answer_format = ChatFormat(head, self._model.tokenizer, bool(body.return_tokens_as_token_ids), new_parser)
        return self._response(body, planned, answer_format, observation)

    async def respond(self, body: ResponsesRequest, receipt: Receipt) -> GenerationResponse:
        """As `chat`, with the request and the answer in the form of /v1/responses."""
        head = self._head("resp")
        observation = self._observe(OPERATION_CHAT, head, body, receipt)
        with _failing(observation):
            self._check(body)
            self._in_flight.check(1)
            structured_output = await self._structured_output(asked_grammar(body, body.text.asked_grammar() if body.text else None))
            messages = body.messages()
            with self._tokenizing(observation) as sizes:
                try:
                    token_ids = await self._tokenize_chat(messages, True, body.add_special_tokens is not False)
                except InvalidRequestError as error:
                    raise InvalidRequestError(error.message, param=body.prompt_field) from error
                prompt = _TokenizedPrompt(self._truncated(body, token_ids, None))
                sizes.append(len(prompt.token_ids))
            options = _text_options(body, continues_text=False)
            planned = self._plan(body, [prompt], head, observation, None, options, None, structured_output)
        return self._response(body, planned, ResponsesFormat(head, self._model.tokenizer, body), observation)

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a text or of a conversation, exactly as a completion or chat request would make them."""
        self._model.check_name(body.model)
        add_special_tokens = body.add_special_tokens is not False
        if body.messages is not None:
            return await self._tokenize_chat(body.messages, body.add_generation_prompt is not False, add_special_tokens)
        if body.prompt is None:
            raise InvalidRequestError("give a prompt (text) or messages (a conversation)", param="prompt")
        return await self._model.encode(body.prompt, add_special_tokens)

    def _check(self, body: GenerationRequest) -> None:
        self._model.check_name(body.model)
        body.check_offered()
        body.check_token_ids(self._model.vocab_size)

    def _head(self, prefix: str) -> AnswerHead:
        return AnswerHead(new_request_id(prefix), int(time.time()), self._model.name)

    def _observe(self, operation: str, head: AnswerHead, body: GenerationRequest, receipt: Receipt) -> RequestObservation:
        return RequestObservation(self._tracer, self._metrics, receipt, operation, self._model.name, head.answer_id, body)

    @contextmanager
    def _tokenizing(self, observation: RequestObservation) -> Iterator[list[int]]:
        span = start_span(self._tracer, SPAN_TOKENIZE, observation.traceparent)
        sizes: list[int] = []
        try:
            yield sizes
        finally:
            span.set_attribute("pagewire.num_prompt_tokens", sum(sizes))
            span.end()

    async def _tokenize_prompt(self, body: CompletionRequest, prompt: str | list[int]) -> _TokenizedPrompt:
        if isinstance(prompt, str):
            token_ids = await self._model.encode(prompt, body.add_special_tokens is not False)
        else:
            token_ids = prompt
        self._model.check_ids(token_ids, "prompt")  # of text too: a tokenizer may know tokens that the model does not
        kept = self._truncated(body, token_ids, DEFAULT_COMPLETION_MAX_TOKENS)
        if not body.echo:
            return _TokenizedPrompt(kept)
        if isinstance(prompt, str) and len(kept) == len(token_ids):
            return _TokenizedPrompt(kept, prompt)
        skips_special_tokens = body.skip_special_tokens is not False
        return _TokenizedPrompt(kept, self._model.tokenizer.decode(kept, skips_special_tokens), skips_special_tokens)

    async def _tokenize_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        add_special_tokens: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        continues_final: bool = False,
    ) -> list[int]:
        inputs = [with_parsed_arguments(message.as_template_input(), index) for index, message in enumerate(messages)]
        text = await self._model.render(inputs, add_generation_prompt, variables)
        if continues_final:
            text = up_to_final_message(text, inputs[-1]["content"])
        token_ids = await self._model.encode(text, add_special_tokens)
        self._model.check_ids(token_ids, "messages")
        return token_ids

    def _truncated(self, body: GenerationRequest, token_ids: list[int], default_max_tokens: int | None) -> list[int]:
        """The last truncate_prompt_tokens of a prompt; for -1, the last that leave room for what is to be generated."""
        limit = body.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if limit == -1:
            asked = body.requested_max_tokens
            limit = max(1, self.max_model_len - ((default_max_tokens or 1) if asked is None else asked))
        elif limit > self.max_model_len:
            message = f"truncate_prompt_tokens ({limit}) is more than this model's maximum context length of {self.max_model_len} tokens"
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        return token_ids[-limit:]

    async def _structured_output(self, asked: AskedGrammar | None) -> StructuredOutput | None:
        if asked is None:
            return None
        return StructuredOutput(grammar=await self._grammar_checker.check(asked.kind, asked.text, asked.param), param=asked.param)

    def _plan(
        self,
        body: GenerationRequest,
        prompts: Sequence[_TokenizedPrompt],
        head: AnswerHead,
        observation: RequestObservation,
        default_max_tokens: int | None,
        options: TextOptions,
        num_echo_logprobs: int | None,
        structured_output: StructuredOutput | None,
    ) -> list[PlannedPrompt]:
        deadline_s = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        planned: list[PlannedPrompt] = []
        # The answers of a beam search are ranked at decode; of those drawn the best are chosen here, by their log-probabilities.
        num_answers = body.num_choices if body.use_beam_search else body.num_sequences
        for prompt_index, prompt in enumerate(prompts):
            num_tokens = len(prompt.token_ids)
            if num_tokens == 0:
                raise InvalidRequestError("the prompt has no tokens", param=body.prompt_field)
            fields = body.prompt_field, body.max_tokens_field
            max_tokens = resolve_max_tokens(body.requested_max_tokens, default_max_tokens, num_tokens, self.max_model_len, *fields)
            sampling = body.sampling(max_tokens, self._model.vocab_size, structured_output)
            if num_answers > body.num_choices and sampling.num_logprobs is None:
                sampling = sampling.model_copy(update={"num_logprobs": 0})
            report = self._report(body, prompt, num_echo_logprobs)
            request = EngineRequest(
                request_id=f"{head.answer_id}-{prompt_index}",
                prompt=Prompt(tuple(prompt.token_ids), body.cache_salt or None),
                sampling=sampling,
                priority=body.priority or 0,
                traceparent=observation.traceparent,
                deadline_s=deadline_s,
                num_sequences=num_answers,
                beam_search=body.beam_search,
                prompt_logprobs=report.assembler if report else None,
            )
            assemblers = [ChoiceAssembler(self._model.tokenizer, options) for _ in range(num_answers)]
            planned.append(PlannedPrompt(request, assemblers, prompt.echo, report))
        return planned

    def _report(self, body: GenerationRequest, prompt: _TokenizedPrompt, num_echo_logprobs: int | None) -> PromptReport | None:
        if body.num_prompt_logprobs is None:
            return None
        offsets: list[int] = []
        if num_echo_logprobs is not None:
            # An echoed text stands there as it was sent, with its special tokens; ids are decoded for the echo.
            offsets = text_offsets(self._model.tokenizer, prompt.token_ids, prompt.skips_special_tokens, prompt.echo)
        assembler = PromptLogprobsAssembler(len(prompt.token_ids))
        return PromptReport(prompt.token_ids, assembler, offsets, body.prompt_logprobs, num_echo_logprobs)

    def _response(
        self, body: GenerationRequest, planned: list[PlannedPrompt], answer_format: AnswerFormat, observation: RequestObservation
    ) -> GenerationResponse:
        options = AnswerOptions(
            num_choices=body.num_choices,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            return_token_ids=bool(body.return_token_ids),
            return_logprobs=body.num_logprobs is not None,
        )
        headers = {}
        ignored = ",".join(name for name in body.ignored_fields() if _FIELD_NAME.fullmatch(name))
        if ignored:
            headers[IGNORED_FIELDS_HEADER] = ignored[:_MAX_HEADER_CHARACTERS]
        return GenerationResponse(self._dispatcher.generate, planned, answer_format, options, observation, self._in_flight, headers)


def _text_options(body: GenerationRequest, continues_text: bool, shown_special_ids: frozenset[int] = frozenset()) -> TextOptions:
    return TextOptions(
        stops=body.stop or (),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        shown_special_ids=shown_special_ids,
        continues_text=continues_text,
        min_tokens=body.min_tokens or 0,
    )


def _only_one(format_grammar: AskedGrammar | None, call_grammar: AskedGrammar | None) -> AskedGrammar | None:
    if format_grammar is not None and call_grammar is not None:
        message = f"tool_choice asks for a call, and {format_grammar.param} for an answer of another form; leave one out"
        raise InvalidRequestError(message, param="tool_choice")
    return format_grammar or call_grammar


@contextmanager
def _failing(observation: RequestObservation) -> Iterator[None]:
    """An error before the answer begins ends the observation, and goes on to become an HTTP error."""
    try:
        yield
    except PagewireError as error:
        observation.fail(error, Usage())
        raise
    except BaseException:
        observation.abandon()
        raise
