"""Messages between the router and the workers: JSON, one class each, told apart by `kind`, versioned as a whole.

Transport: a DEALER socket at the router, a ROUTER socket at the worker. A frame from the router is one message; a frame from a worker
is a list of them, in the order in which they were sent, so that the tokens of one step cost the router one frame. KV transfer has its
own protocol (shared/transport). Nothing here is ever evaluated; unknown kinds and fields are refused with ProtocolError.

What a router sends is a pydantic model, as its sampling parameters are. What a worker sends is a msgspec struct: there is one for each
token, and a struct is made, written and read, every type checked, in a fifth of the time. Structs are checked when they are read only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.errors import ProtocolError
from shared.sampling_params import BeamSearchParams, SamplingParams

PROTOCOL_VERSION: Final = 4
MAX_BATCH_BYTES: Final = 1 << 20
"""A worker's frame takes no further message when it has this many."""
FinishReason = Literal["stop", "length"]


FailureType = Literal["invalid_request", "overloaded", "unavailable", "deadline", "transfer", "internal"]


class _FromRouter(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[4] = PROTOCOL_VERSION


class _FromWorker(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    version: Literal[4] = PROTOCOL_VERSION


class KVPeer(BaseModel):
    """Where a worker takes KV blocks: its control endpoint, and the incarnation and key that must answer there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    worker_id: str
    ctrl_endpoint: str
    incarnation: int
    server_key: str = ""
    """The public CURVE key of that incarnation, in Z85."""


class PrefixPull(BaseModel):
    """Part of a request: another worker was asked (SendPrefix) for the KV of the prompt's first `num_blocks` blocks, which cost less to
    fetch than to compute. Whoever gets the request takes what comes within `timeout_s` of having room for it, and computes the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    transfer_id: str
    num_blocks: int = Field(ge=1)
    timeout_s: float


class PrefillRequest(_FromRouter):
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
    prefix_pull: PrefixPull | None = None
    priority: int = 0
    traceparent: str = ""


class DecodeRequest(_FromRouter):
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
    prefix_pull: PrefixPull | None = None
    """Only where no transfer brings the prompt."""
    deadline_s: float
    priority: int = 0
    traceparent: str = ""


class SendPrefix(_FromRouter):
    """Router -> either worker: offer the KV of these blocks to `peer` as transfer `transfer_id`, as many of the first ones as you have."""

    kind: Literal["send_prefix"] = "send_prefix"
    transfer_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    block_hashes: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], ...]
    """In chain order, from the first block of the prompt on, hex."""
    peer: KVPeer
    deadline_s: float
    """Seconds from now for which the blocks are kept for `peer`."""
    traceparent: str = ""


class AbortRequest(_FromRouter):
    """Router -> either worker: forget this request and give its blocks back. Idempotent; unknown ids are ignored."""

    kind: Literal["abort"] = "abort"
    request_id: str
    reason: str
    sequence_index: int | None = None
    """Only this sequence (decode); the others go on."""


class PrefillLost(_FromRouter):
    """Router -> decode: the prefill worker of this request is gone, or has given its transfer up. Where that has not ended, it will not
    come."""

    kind: Literal["prefill_lost"] = "prefill_lost"
    request_id: str
    reason: str


class TokenLogprobs(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Raw log-softmax (fp32, before penalties and temperature) at one position."""

    logprob: float
    rank: int
    """1 = the most likely token."""
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(_FromWorker, kw_only=True, frozen=True, tag="prompt_logprobs"):
    """The worker that computes a prompt -> router: what it found at some positions of it. Parts come in any order, and again when the
    prompt is computed again; those of the worker that decodes come before its first token."""

    request_id: str
    first_position: Annotated[int, msgspec.Meta(ge=1)]
    """Position of the first entry's token in the prompt; the rest are consecutive. Token 0 has nothing before it, so no entry."""
    entries: tuple[TokenLogprobs, ...]


class RequestOutput(_FromWorker, kw_only=True, frozen=True, tag="output"):
    """Decode -> router: one generated token, or the end of its sequence (`finish_reason` set; the final token is included)."""

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


class PrefixPulled(_FromWorker, kw_only=True, frozen=True, tag="prefix_pulled"):
    """Either worker -> router: the blocks that this request was to have from another worker are here, or will not come."""

    request_id: str
    failure: str | None = None


class WorkerTiming(_FromWorker, kw_only=True, frozen=True, tag="timing"):
    """Either worker -> router: what one phase of one request took, for /metrics and the waterfall (milliseconds)."""

    request_id: str
    phase: Literal["prefill", "decode"]
    queue_ms: float
    compute_ms: float
    num_computed_tokens: int
    num_cached_tokens: int
    num_steps: int


class RequestFailed(_FromWorker, kw_only=True, frozen=True, tag="failed"):
    """Either worker -> router: this request will not be completed here. `retryable`: another worker might manage."""

    request_id: str
    message: str
    error_type: FailureType
    retryable: bool
    param: str | None = None
    """The request field at fault, if one is."""
    retry_after_s: float | None = None


class Ping(_FromWorker, kw_only=True, frozen=True, tag="ping"):
    """Either worker -> a router whose requests it holds: are you there? Needs no answer; a router that is gone cannot be reached."""


RouterMessage = PrefillRequest | DecodeRequest | SendPrefix | AbortRequest | PrefillLost
WorkerMessage = RequestOutput | PromptLogprobs | PrefixPulled | WorkerTiming | RequestFailed | Ping

_router_messages: TypeAdapter[RouterMessage] = TypeAdapter(Annotated[RouterMessage, Field(discriminator="kind")])
_worker_messages = msgspec.json.Decoder(list[WorkerMessage])
_worker_encoder = msgspec.json.Encoder()


def encode(message: RouterMessage) -> bytes:
    return message.model_dump_json().encode()


def encode_batch(messages: Iterable[WorkerMessage]) -> list[bytes]:
    """In as few frames as hold them."""
    frames: list[bytes] = []
    parts: list[bytes] = []
    size_bytes = 0
    for message in messages:
        part = _worker_encoder.encode(message)
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
        return _worker_messages.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid message from a worker: {error}") from error
