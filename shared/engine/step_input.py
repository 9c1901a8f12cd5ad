"""What a model runner needs to know of one step, in numbers: built where the scheduler is, and sent as it is to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from shared.batch import SchedulerOutput


@dataclass(frozen=True)
class StepInput:
    """The flattened batch: request i owns positions [starts[i], ends[i]), one row of it after the other."""

    token_ids: list[int]
    starts: list[int]
    ends: list[int]
    block_tables: list[list[int]]
    """All block ids of each request."""
    hidden_rows: list[int]
    """Rows whose hidden state is wanted: the last of each request that completes, then those to score."""

    @classmethod
    def of(cls, output: SchedulerOutput, block_tables: list[list[int]]) -> StepInput:
        """block_tables[i]: of the i-th scheduled request."""
        first_rows = list(accumulate((row.num_new_tokens for row in output.scheduled), initial=0))
        last = [end - 1 for row, end in zip(output.scheduled, first_rows[1:], strict=True) if row.completes]
        scored = [
            position - row.start + first
            for row, first in zip(output.scheduled, first_rows, strict=False)
            for position in row.scored_positions
        ]
        return cls(
            token_ids=[token for row in output.scheduled for token in row.request.token_ids[row.start : row.end]],
            starts=[row.start for row in output.scheduled],
            ends=[row.end for row in output.scheduled],
            block_tables=block_tables,
            hidden_rows=last + scored,
        )

    def pack(self) -> bytes:
        """int64: the sizes, then the lists in order."""
        table_sizes = [len(table) for table in self.block_tables]
        sizes = [len(self.token_ids), len(self.starts), len(self.hidden_rows)]
        lists = (sizes, self.token_ids, self.starts, self.ends, self.hidden_rows, table_sizes, chain.from_iterable(self.block_tables))
        return np.fromiter(chain.from_iterable(lists), np.int64).tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> StepInput:
        numbers = np.frombuffer(packed, np.int64).tolist()
        num_tokens, num_requests, num_hidden = numbers[:3]
        sizes = (num_tokens, num_requests, num_requests, num_hidden, num_requests)
        token_ids, starts, ends, hidden_rows, table_sizes = _split(numbers[3 : 3 + sum(sizes)], sizes)
        return cls(token_ids, starts, ends, _split(numbers[3 + sum(sizes) :], table_sizes), hidden_rows)


def _split(numbers: list[int], sizes: Sequence[int]) -> list[list[int]]:
    ends = list(accumulate(sizes))
    assert ends[-1:] in ([], [len(numbers)])
    return [numbers[end - size : end] for end, size in zip(ends, sizes, strict=True)]
