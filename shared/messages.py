"""Messages between the router and the workers: JSON, one pydantic model each, discriminated by `kind`, versioned as a whole.

Transport: a DEALER socket at the router, a ROUTER socket at the worker. A frame from the router is one message; a frame from a worker
is a list of them, in the order in which they were sent, so that the tokens of one step cost the router one frame. KV transfer has its
own protocol (shared/transport). Nothing here is ever evaluated; unknown kinds and fields are refused with ProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.errors import ProtocolError
from shared.sampling_params import BeamSearchParams, SamplingParams

PROTOCOL_VERSION: Final = 2
MAX_BATCH_BYTES: Final = 1 << 20
"""A worker's frame takes no further message when it has this many."""
FinishReason = Literal["stop", "length"]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[2] = PROTOCOL_VERSION


class KVPeer(BaseModel):
    """Where a decode worker takes KV blocks: its control endpoint and the incarnation that must answer there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    worker_id: str
    ctrl_endpoint: str
    incarnation: int


class PrefillRequest(Message):
    """Router -> prefill: compute the KV of `token_ids` and send it to `decode` as transfer `transfer_id`."""

    kind: Literal["prefill"] = "prefill"
    request_id: str
    transfer_id: str
    attempt: int = 0
    token_ids: tuple[int, ...]
    cache_salt: str | None = None
    decode: KVPeer
    deadline_s: float
    """Seconds left for the whole request when this message was sent."""
    num_prompt_logprobs: int | None = None
    """As in SamplingParams; the answers go to the router as PromptLogprobs."""
    priority: int = 0
    traceparent: str = ""


class DecodeRequest(Message):
    """Router -> decode: reserve blocks for `token_ids`, take their KV as `transfer_id` (None: compute it here), then generate."""

    kind: Literal["decode"] = "decode"
    request_id: str
    transfer_id: str | None
    attempt: int = 0
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_sequences: int = Field(1, ge=1)
    """Answers to this prompt: drawn independently, or the best of a beam search."""
    beam_search: BeamSearchParams | None = None
    cache_salt: str | None = None
    deadline_s: float
    priority: int = 0
    traceparent: str = ""


class AbortRequest(Message):
    """Router -> either worker: forget this request and give its blocks back. Idempotent; unknown ids are ignored."""

    kind: Literal["abort"] = "abort"
    request_id: str
    reason: str
    sequence_index: int | None = None
    """Only this sequence (decode); the others go on."""


class TokenLogprobs(BaseModel):
    """Raw log-softmax (fp32, before penalties and temperature) at one position."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    logprob: float
    rank: int
    """1 = the most likely token."""
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(Message):
    """The worker that computes a prompt -> router: what it found at some positions of it. Parts come in any order, and again when the
    prompt is computed again; those of the worker that decodes come before its first token."""

    kind: Literal["prompt_logprobs"] = "prompt_logprobs"
    request_id: str
    first_position: int = Field(ge=1)
    """Position of the first entry's token in the prompt; the rest are consecutive. Token 0 has nothing before it, so no entry."""
    entries: tuple[TokenLogprobs, ...]


class RequestOutput(Message):
    """Decode -> router: one generated token, or the end of its sequence (`finish_reason` set; the final token is included)."""

    kind: Literal["output"] = "output"
    request_id: str
    sequence_index: int = 0
    """Below the request's num_sequences."""
    token_id: int | None
    """None only where no token was asked for (max_tokens 0): then this is the sequence's only output."""
    index: int
    """0 for the first generated token of the sequence; consecutive."""
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """Set when a stop_token_ids entry ended the request (not for the model's own EOS)."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused rather than computed for this request, wherever they were found."""
    num_preemptions: int = 0


class WorkerTiming(Message):
    """Either worker -> router: what one phase of one request took, for /metrics and the waterfall (milliseconds)."""

    kind: Literal["timing"] = "timing"
    request_id: str
    phase: Literal["prefill", "decode"]
    queue_ms: float
    compute_ms: float
    num_computed_tokens: int
    num_cached_tokens: int
    num_steps: int


class RequestFailed(Message):
    """Either worker -> router: this request will not be completed here. `retryable`: another worker might manage."""

    kind: Literal["failed"] = "failed"
    request_id: str
    message: str
    error_type: Literal["invalid_request", "overloaded", "unavailable", "deadline", "transfer", "internal"]
    retryable: bool
    param: str | None = None
    """The request field at fault, if one is."""
    retry_after_s: float | None = None


class Ping(Message):
    """Either worker -> a router whose requests it holds: are you there? Needs no answer; a router that is gone cannot be reached."""

    kind: Literal["ping"] = "ping"


RouterMessage = PrefillRequest | DecodeRequest | AbortRequest
WorkerMessage = RequestOutput | PromptLogprobs | WorkerTiming | RequestFailed | Ping

_router_messages: TypeAdapter[RouterMessage] = TypeAdapter(Annotated[RouterMessage, Field(discriminator="kind")])
_worker_messages: TypeAdapter[list[WorkerMessage]] = TypeAdapter(list[Annotated[WorkerMessage, Field(discriminator="kind")]])


def encode(message: RouterMessage) -> bytes:
    return message.model_dump_json().encode()


def encode_batch(messages: Iterable[WorkerMessage]) -> list[bytes]:
    """In as few frames as hold them."""
    frames: list[bytes] = []
    parts: list[bytes] = []
    size_bytes = 0
    for message in messages:
        part = message.model_dump_json().encode()
        if size_bytes + len(part) > MAX_BATCH_BYTES and parts:
            frames.append(_as_list(parts))
            parts, size_bytes = [], 0
        parts.append(part)
        size_bytes += len(part)
    return [*frames, _as_list(parts)] if parts else frames


def _as_list(parts: list[bytes]) -> bytes:
    return b"[" + b",".join(parts) + b"]"


def decode_router_message(frame: bytes) -> RouterMessage:
    """Raises ProtocolError on anything that is not a valid message of this version."""
    try:
        return _router_messages.validate_json(frame)
    except ValidationError as error:
        raise ProtocolError(f"invalid message from a router: {error.errors()[0]['msg']}") from error


def decode_batch(frame: bytes) -> list[WorkerMessage]:
    """Raises ProtocolError on anything that is not a list of valid messages of this version."""
    try:
        return _worker_messages.validate_json(frame)
    except ValidationError as error:
        raise ProtocolError(f"invalid message from a worker: {error.errors()[0]['msg']}") from error
