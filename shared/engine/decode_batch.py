"""A decode step in numbers: one new token for each of its requests. Arrays, because a step of hundreds of requests is prepared in less
time than a GPU takes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.cache.kv_cache_manager import KVCacheManager
from shared.engine.step_input import StepInput

UNKNOWN = -1


class BlockTableRows:
    """The block tables of requests that generate, each a row of one matrix. What changed since the last step is all that is written."""

    def __init__(self, manager: KVCacheManager, max_num_rows: int, max_num_blocks: int) -> None:
        self._manager = manager
        self.matrix: NDArray[np.int32] = np.zeros((max_num_rows, max_num_blocks), np.int32)
        self._rows: dict[str, int] = {}
        self._free = list(range(max_num_rows))

    def rows_of(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """Where the tables of these requests, no more than there are rows, stand as they are now."""
        for holder, (first, block_ids) in self._manager.take_changes().items():
            row = self._rows.get(holder)
            if row is not None:
                self.matrix[row, first : first + len(block_ids)] = block_ids
        for request_id in request_ids:
            if request_id not in self._rows:
                self._enter(request_id, request_ids)
        return np.fromiter((self._rows[request_id] for request_id in request_ids), np.int64, len(request_ids))

    def _enter(self, request_id: str, in_step: Sequence[str]) -> None:
        if not self._free:
            # Those that are gone, or hold blocks and sit this step out: of these there may be more than rows.
            for other in self._rows.keys() - set(in_step):
                self._free.append(self._rows.pop(other))
        row = self._rows[request_id] = self._free.pop()
        block_ids = self._manager.block_ids(request_id)
        self.matrix[row, : len(block_ids)] = block_ids


@dataclass(frozen=True)
class DecodeBatch:
    token_ids: NDArray[np.int64]  # [num_requests]; anything where it is still to be drawn
    sources: NDArray[np.int64]  # [num_requests]: which token of the step before it is; UNKNOWN: that in token_ids
    seq_lens: NDArray[np.int32]  # [num_requests]: with the new token
    rows: NDArray[np.int64]  # [num_requests]: of block_tables
    block_tables: NDArray[np.int32]  # [num_rows, max_num_blocks]
    block_size: int

    def __len__(self) -> int:
        return len(self.seq_lens)

    @property
    def positions(self) -> NDArray[np.int64]:
        return self.seq_lens.astype(np.int64) - 1

    @property
    def slots(self) -> NDArray[np.int64]:
        """Physical block x block size + offset, where each new token's K and V are written."""
        positions = self.positions
        blocks = self.block_tables[self.rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def step_input(self, previous: torch.Tensor | None) -> StepInput:
        """The same as lists. `previous`: the tokens of the step before; waits for them."""
        token_ids = self.token_ids
        if previous is not None:
            token_ids = np.where(self.sources == UNKNOWN, token_ids, previous.cpu().numpy()[self.sources])
        ends = self.seq_lens.tolist()
        widths = (-(-self.seq_lens // self.block_size)).tolist()
        return StepInput(
            token_ids=token_ids.tolist(),
            starts=[end - 1 for end in ends],
            ends=ends,
            block_tables=[self.block_tables[row, :width].tolist() for row, width in zip(self.rows.tolist(), widths, strict=True)],
            hidden_rows=list(range(len(self))),
        )
