"""One request on a decode worker, from its arrival to its last token."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from shared import telemetry
from shared.request import Request
from shared.sampling_params import SamplingParams


@dataclass
class DecodeJob:
    """One request on this worker."""

    request: Request
    router: bytes
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    """Empty when the request ignores EOS."""
    attempt: int
    span: Span
    received_ns: int = field(default_factory=time.time_ns)
    reserved_ns: int = 0
    started_ns: int = 0
    """When its prompt was complete here."""
    first_token_ns: int = 0
    num_steps: int = 0
    num_local_prompt_tokens: int = 0
    is_recomputed: bool = False

    @property
    def traceparent(self) -> str:
        return telemetry.traceparent_of(self.span)

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.eos_token_ids | set(self.params.stop_token_ids)
