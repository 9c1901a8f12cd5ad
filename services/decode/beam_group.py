"""The live beams of one request as sequences: each step forks those that go on twice and ends those that do not go on.

A beam whose logits are there needs its blocks only to go on fast. While a sibling waits for blocks, those of the finished ones go
back: two beams that do not fit side by side take turns, and the search goes on in any pool that holds one of them.
"""

from __future__ import annotations

from services.decode.beam_search import BeamSearch, Hypothesis
from services.decode.job import DecodeJob
from services.decode.sequence_table import SequenceTable


def advance(job: DecodeJob, search: BeamSearch, table: SequenceTable) -> list[Hypothesis] | None:
    """One token further, all logits being there; the answers when the search is over. Dropped beams give their blocks back first."""
    continuations = search.advance({index: job.sequences[index].sampling_row() for index in search.beams})
    if search.is_done:
        return search.best(job.num_sequences)
    parents = {continuation.parent for continuation in continuations}
    for index in job.sequences.keys() - parents:
        table.end(job.sequences[index])
    for continuation in continuations:
        if continuation.index != continuation.parent:
            table.fork(job.sequences[continuation.parent], continuation.index)
    for continuation in continuations:
        sequence = job.sequences[continuation.index]
        sequence.request.token_ids.append(continuation.token_id)
        if sequence.guide is not None:
            sequence.guide.push(continuation.token_id)
        table.resume(sequence)
    return None


def release_idle(job: DecodeJob, search: BeamSearch, table: SequenceTable) -> None:
    """Between two steps: give back the blocks of beams that only wait for a sibling which in turn waits for blocks."""
    idle = [job.sequences[index] for index, beam in search.beams.items() if beam.logits is not None]
    if idle and any(table.is_waiting(sequence) for sequence in job.sequences.values()):
        for sequence in idle:
            table.set_aside(sequence)
