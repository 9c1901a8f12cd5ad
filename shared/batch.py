"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """Compute positions [start, start + num_new_tokens) of `request`."""

    request: Request
    start: int
    num_new_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def completes(self) -> bool:
        """All tokens known are computed after this step: the last one's hidden state predicts the next token."""
        return self.end == self.request.num_tokens

    @property
    def scored_positions(self) -> range:
        """Positions of this chunk whose hidden state is wanted for the log-probability of the prompt token that follows."""
        request = self.request
        if request.num_prompt_logprobs is None:
            return range(0)
        return range(max(self.start, request.num_scored_tokens), min(self.end, request.num_prompt_tokens - 1))


@dataclass(frozen=True)
class SchedulerOutput:
    """Decode-like rows (one new token) come first, so that one step can use a decode kernel for the head and a prefill kernel
    for the rest."""

    scheduled: list[ScheduledRequest]
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new_tokens for row in self.scheduled)

    @property
    def num_decode_rows(self) -> int:
        return sum(row.num_new_tokens == 1 for row in self.scheduled)
