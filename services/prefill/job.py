"""One dispatch of one request to a prefill worker, from its arrival to the end of its transfer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from shared import telemetry
from shared.messages import PrefixPull
from shared.request import Request


@dataclass
class PrefillJob:
    """One dispatch of one request to this worker."""

    request: Request
    router: bytes
    transfer_id: str
    span: Span
    prefix_pull: PrefixPull | None = None
    """What another worker was asked for, until it is known to be of no use."""
    received_ns: int = field(default_factory=time.time_ns)
    first_scheduled_ns: int = 0
    computed_ns: int = 0
    compute_ms: float = 0.0
    num_chunks: int = 0
    num_sent_blocks: int = 0
    kept_block_ids: list[int] = field(default_factory=list)
    """Those that belong to the transfer too, until it has ended, by index."""
    first_sent_ns: int = 0

    @property
    def transfer_name(self) -> str:
        """By which the block manager knows the transfer."""
        return f"transfer {self.transfer_id}"

    @property
    def traceparent(self) -> str:
        return telemetry.traceparent_of(self.span)
