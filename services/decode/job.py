"""One request on a decode worker, from its arrival to its last token, and the sequences it generates."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from services.decode.beam_search import BeamSearch
from shared import telemetry
from shared.engine.sampler import SamplingRow
from shared.engine.structured_output import SequenceGuide
from shared.messages import PrefixPull
from shared.request import Request
from shared.sampling_params import SamplingParams


@dataclass(eq=False)
class DecodeSequence:
    """One answer in the making: to the scheduler a request of its own, which shares the full blocks of the prompt with its siblings."""

    job: DecodeJob
    request: Request
    guide: SequenceGuide | None = None
    """Where it stands in its grammar and towards its bad words, if it has any."""

    @property
    def index(self) -> int:
        return self.request.sequence_index

    def sampling_row(self) -> SamplingRow:
        """Only when its guide, if it has one, is ready."""
        job, request = self.job, self.request
        mask = self.guide.mask if self.guide is not None else None
        return SamplingRow(job.params, job.seed, request.token_ids, request.num_prompt_tokens, job.stop_ids, self.index, mask)


@dataclass(eq=False)
class DecodeJob:
    """One request on this worker. Until its first token is drawn it has one sequence, the first; the others fork from that."""

    request: Request
    """That of the first sequence: the prompt, its reservation and its transfer."""
    router: bytes
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    """Empty when the request ignores EOS."""
    attempt: int
    span: Span
    prefix_pull: PrefixPull | None = None
    """What another worker was asked for, until it is known to be of no use."""
    num_sequences: int = 1
    """Answers wanted."""
    beam_search: BeamSearch | None = None
    sequences: dict[int, DecodeSequence] = field(default_factory=dict)
    """Those that have not ended, by index."""
    received_ns: int = field(default_factory=time.time_ns)
    reserved_ns: int = 0
    started_ns: int = 0
    """When its prompt was complete here."""
    first_token_ns: int = 0
    num_steps: int = 0
    num_local_prompt_tokens: int = 0
    num_sent_tokens: int = 0
    num_preemptions: int = 0
    """Of the sequences that have ended."""
    is_recomputed: bool = False

    @property
    def traceparent(self) -> str:
        return telemetry.traceparent_of(self.span)

    @property
    def num_all_preemptions(self) -> int:
        return self.num_preemptions + sum(sequence.request.num_preemptions for sequence in self.sequences.values())

    @property
    def max_num_sequences(self) -> int:
        """How many it has at a time once it generates."""
        return self.num_sequences if self.beam_search is None else self.beam_search.params.width

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.eos_token_ids | set(self.params.stop_token_ids)
