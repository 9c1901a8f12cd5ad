"""What a client may send to /v1/completions and /v1/chat/completions, validated once.

null means absent. A field that would change the answer and is not offered is refused by name when it is set to anything but its
default; any other unknown field is accepted, ignored, and named in the response header x-pagewire-ignored-fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from services.router.openai.response_format import StructuredOutputFields
from services.router.openai.tools import ToolFields
from shared.errors import InvalidRequestError
from shared.sampling_params import BeamSearchParams, SamplingParams, StructuredOutput

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_LOGIT_BIASES = 1024
MAX_PROMPTS = 256
MAX_PROMPT_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 128
MAX_TEMPLATE_VARIABLES = 64
DEFAULT_COMPLETION_MAX_TOKENS = 16
_INT64 = 2**63

# Fields that would change the answer, with the values (besides null) that ask for nothing.
NOT_OFFERED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    # Fields of one of the APIs: where it declares them they are not looked for here.
    "echo": (False,),
    "top_logprobs": (0,),
    "max_output_tokens": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    # Fields of chat alone, which a completion cannot follow.
    "tools": ([],),
    "tool_choice": ("none",),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "prompt_embeds": (),
    "lora_path": (),
}

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("functions", "function_call"), "by this server; use tools and tool_choice"),
    **dict.fromkeys(("tools", "tool_choice", "chat_template_kwargs", "continue_final_message"), "by completions; use /v1/chat/completions"),
    "echo": "here; use /v1/completions",
    "top_logprobs": "by completions; set logprobs to the number",
    "max_output_tokens": "here; use max_tokens",
}


def _check_prompt(value: Any) -> Any:
    """One plain pass with a clear message instead of four nested attempts at a union."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if value and isinstance(value[0], list):
        if not all(isinstance(item, list) and _are_ids(item) for item in value):
            raise ValueError("every item of a list of lists must be a list of integer token ids")
    elif not (all(isinstance(item, str) for item in value) or _are_ids(value)):
        raise ValueError("items must be all strings, all integer token ids, or all lists of integer token ids")
    return value


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _check_stop(value: Any) -> Any:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}")
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    return stops


def _check_logit_bias(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object of token id to bias")
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_LOGIT_BIASES} entries are allowed, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # isdecimal, not int(): " 5", "+5" and "5_0" are not token ids.
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20):
            raise ValueError(f"key {str(key)[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


Prompt = str | list[str] | list[int] | list[list[int]]
PromptField = Annotated[
    Any,
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
StopField = Annotated[
    list[str] | None,
    BeforeValidator(_check_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
LogitBiasField = Annotated[
    dict[int, float] | None,
    BeforeValidator(_check_logit_bias),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(StructuredOutputFields):
    """The fields that completions and chat share."""

    model_config = ConfigDict(strict=True, extra="allow")
    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = NOT_OFFERED
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that are not declared and yet not named as ignored, because nothing is lost without them."""
    prompt_field: ClassVar[str] = "prompt"

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, lt=_INT64)
    max_completion_tokens: int | None = Field(None, ge=0, lt=_INT64, description="chat's newer name of max_tokens; goes before it")
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-10, le=10)
    early_stopping: bool | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: StopField = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: LogitBiasField = None
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=_INT64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = Field(None, max_length=1024)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="accepted; no tokenizer served here puts spaces there")
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-_INT64, lt=_INT64)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_PROMPT_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_sequences(self) -> int:
        """How many sequences of one prompt are worked on at a time: those drawn, or the width of the beam search."""
        return max(self.num_choices, self.best_of or 1)

    @property
    def beam_search(self) -> BeamSearchParams | None:
        if not self.use_beam_search:
            return None
        length_penalty, early_stopping = _or(self.length_penalty, 1.0), bool(self.early_stopping)
        return BeamSearchParams(width=self.num_sequences, length_penalty=length_penalty, early_stopping=early_stopping)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def requested_max_tokens(self) -> int | None:
        """The limit the client named, if it named one."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        """Where it was named, or would be."""
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives a token's logprobs list; None: no logprobs at all (0 still gives the token's own)."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt; None: they need not be computed."""
        return self.prompt_logprobs

    @property
    def may_generate_nothing(self) -> bool:
        """max_tokens 0 is of use: the answer says something about the prompt."""
        return self.prompt_logprobs is not None

    def ignored_fields(self) -> list[str]:
        return sorted(name for name in (self.model_extra or {}) if name not in self.not_offered and name not in self.without_effect)

    def check_offered(self) -> None:
        """Raises InvalidRequestError naming the first field that asks for something not offered here."""
        for name, value in (self.model_extra or {}).items():
            defaults = self.not_offered.get(name)
            if defaults is not None and value is not None and not any(_same(value, default) for default in defaults):
                raise InvalidRequestError(f"{name} is not supported {self.instead.get(name, 'by this server; leave it out')}", param=name)
        self._check_sequences()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
        if self.requested_max_tokens == 0 and not self.may_generate_nothing:
            message = f"{self.max_tokens_field}: must be at least 1; 0 needs prompt_logprobs or (completions only) echo"
            raise InvalidRequestError(message, param=self.max_tokens_field)
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1 for as many as fit"
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        for word in self.bad_words or ():
            if not 1 <= len(word.strip()) <= MAX_BAD_WORD_CHARACTERS:
                message = f"bad_words: each must have 1 to {MAX_BAD_WORD_CHARACTERS} characters besides white space"
                raise InvalidRequestError(message, param="bad_words")

    def _check_sequences(self) -> None:
        if self.best_of is not None and self.best_of < self.num_choices:
            raise InvalidRequestError(f"best_of ({self.best_of}) must not be less than n ({self.num_choices})", param="best_of")
        if self.use_beam_search:
            if self.stream:
                raise InvalidRequestError("a beam search knows its answers only at its end and cannot be streamed", param="stream")
        elif self.stream and self.num_sequences > self.num_choices:
            message = "which of best_of sequences are the best shows only at their end: with stream, best_of must equal n"
            raise InvalidRequestError(message, param="best_of")
        elif _or(self.length_penalty, 1.0) != 1.0:
            raise InvalidRequestError("length_penalty needs use_beam_search to be true", param="length_penalty")
        elif self.early_stopping:
            raise InvalidRequestError("early_stopping needs use_beam_search to be true", param="early_stopping")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequestError for a token id outside the vocabulary, before any worker indexes with it."""
        for name, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token_id in token_ids or ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(f"{name}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param=name)

    def sampling(self, max_tokens: int, vocab_size: int, structured_output: StructuredOutput | None = None) -> SamplingParams:
        """The frozen parameters; `max_tokens` as resolved against the context length."""
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequestError(f"min_tokens ({min_tokens}) must not be greater than max_tokens ({max_tokens})", param="min_tokens")
        return SamplingParams(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=min(_or(self.top_k, -1), vocab_size),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias or {},
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            # As vLLM reads them: with and without white space in front.
            bad_words=tuple(word.lstrip() for word in self.bad_words or ()),
            structured_output=structured_output,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )


class CompletionRequest(GenerationRequest):
    prompt: PromptField
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_echo_logprobs(self) -> int | None:
        """How many alternatives the logprobs of the echoed prompt list; None: there are none."""
        return self.logprobs if self.echo else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return max((count for count in (self.prompt_logprobs, self.num_echo_logprobs) if count is not None), default=None)

    @property
    def may_generate_nothing(self) -> bool:
        return bool(self.echo) or super().may_generate_nothing

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts of this request, at least one, none empty."""
        prompt: Prompt = self.prompt
        prompts: Any = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts or not all(prompts):
            raise InvalidRequestError("prompt must not be empty: this model adds no token of its own to start from", param="prompt")
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts fit in one request, got {len(prompts)}", param="prompt")
        return prompts  # type: ignore[no-any-return]


def _check_content(value: Any) -> Any:
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"content parts of type {str(kind)[:40]!r} are not supported by this model; send parts of type 'text'")
    return value


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """`content` null or missing reads as empty; text parts are joined."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Annotated[str | list[ContentPart] | None, BeforeValidator(_check_content)] = None

    def as_template_input(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatCompletionRequest(GenerationRequest, ToolFields):
    prompt_field: ClassVar[str] = "messages"

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=MAX_TEMPLATE_VARIABLES)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_offered(self) -> None:
        super().check_offered()
        if not self.messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message goes on in the last message and add_generation_prompt begins a new one; set only one of them"
            raise InvalidRequestError(message, param="continue_final_message")
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            if name in (self.chat_template_kwargs or {}):
                raise InvalidRequestError(f"chat_template_kwargs must not hold {name}; set the field itself", param="chat_template_kwargs")


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    model: str | None = None
    tokens: list[int] = Field(max_length=1_000_000)


ParsedBody = TypeVar("ParsedBody", bound=BaseModel)


def parse_body(body_type: type[ParsedBody], body: bytes) -> ParsedBody:
    """`body` as `body_type`. Raises InvalidRequestError whose param is the field at fault."""
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise InvalidRequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from error
        if not first["loc"]:
            raise InvalidRequestError("the body must be a JSON object") from error
        path = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "dict[", "function-", "str", "int")))
        param = str(first["loc"][0])
        reason = first["msg"].removeprefix("Value error, ")
        raise InvalidRequestError(f"{path or param}: {reason}", param=param) from error


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _same(value: object, default: object) -> bool:
    # False == 0 in Python, but not here.
    return value == default and isinstance(value, bool) == isinstance(default, bool)
