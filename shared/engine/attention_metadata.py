"""What attention needs to know of one step, built once from the scheduler's output and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu_attention import CPUPagedAttention
from shared.batch import SchedulerOutput
from shared.model_files.model_config import ModelConfig


@dataclass(frozen=True)
class AttentionMetadata:
    """The flattened batch: request i owns rows query_start_loc[i] : query_start_loc[i + 1]."""

    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64: physical block x block size + offset, where a token's K and V are written
    hidden_rows: torch.Tensor  # rows whose hidden state is wanted: the last of each request that completes, then those to score
    attention: CPUPagedAttention

    @classmethod
    def build(cls, output: SchedulerOutput, block_tables: list[list[int]], block_size: int, config: ModelConfig) -> AttentionMetadata:
        """block_tables[i]: all block ids of the i-th scheduled request."""
        query_start_loc, seq_lens = [0], []
        last_rows: list[int] = []
        scored_rows: list[int] = []
        positions, slots = [], []
        for row, table in zip(output.scheduled, block_tables, strict=True):
            token_positions = torch.arange(row.start, row.end)
            positions.append(token_positions)
            slots.append(torch.tensor(table)[token_positions // block_size] * block_size + token_positions % block_size)
            scored_rows.extend(position - row.start + query_start_loc[-1] for position in row.scored_positions)
            query_start_loc.append(query_start_loc[-1] + row.num_new_tokens)
            seq_lens.append(row.end)
            if row.completes:
                last_rows.append(query_start_loc[-1] - 1)
        return cls(
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            hidden_rows=torch.tensor(last_rows + scored_rows, dtype=torch.int64),
            attention=CPUPagedAttention(block_tables, query_start_loc, seq_lens, block_size, config.num_heads, config.num_kv_heads),
        )
