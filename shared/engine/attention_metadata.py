"""What attention needs to know of one step, built once from the scheduler's output and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu_attention import CPUPagedAttention
from kernels.gpu_attention import GPUPagedAttention
from shared.batch import SchedulerOutput
from shared.engine.device import to_device
from shared.model_files.model_config import ModelConfig


@dataclass(frozen=True)
class AttentionMetadata:
    """The flattened batch: request i owns rows query_start_loc[i] : query_start_loc[i + 1]."""

    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64: physical block x block size + offset, where a token's K and V are written
    hidden_rows: torch.Tensor  # rows whose hidden state is wanted: the last of each request that completes, then those to score
    attention: CPUPagedAttention | GPUPagedAttention

    @classmethod
    def build(
        cls, output: SchedulerOutput, block_tables: list[list[int]], block_size: int, config: ModelConfig, device: torch.device
    ) -> AttentionMetadata:
        """block_tables[i]: all block ids of the i-th scheduled request. Tensors are on `device`."""
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
        step = (block_tables, query_start_loc, seq_lens, block_size)
        return cls(
            positions=to_device(torch.cat(positions), device),
            slot_mapping=to_device(torch.cat(slots), device),
            hidden_rows=to_device(torch.tensor(last_rows + scored_rows, dtype=torch.int64), device),
            attention=GPUPagedAttention(*step, device)
            if device.type == "cuda"
            else CPUPagedAttention(*step, config.num_heads, config.num_kv_heads),
        )
