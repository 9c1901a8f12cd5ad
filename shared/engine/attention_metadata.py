"""What attention needs to know of one step, built once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu_attention import CPUPagedAttention
from kernels.gpu_attention import GPUChunkAttention, GPUDecodeAttention, GPUPagedAttention
from shared.engine.device import to_device
from shared.engine.step_input import StepInput
from shared.model_files.model_config import ModelConfig


@dataclass(frozen=True)
class AttentionMetadata:
    """The flattened batch: request i owns rows query_start_loc[i] : query_start_loc[i + 1]."""

    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64: physical block x block size + offset, where a token's K and V are written
    hidden_rows: torch.Tensor | None  # rows whose hidden state is wanted; None: all
    attention: CPUPagedAttention | GPUPagedAttention | GPUDecodeAttention | GPUChunkAttention

    @classmethod
    def build(cls, step: StepInput, block_size: int, config: ModelConfig, device: torch.device) -> AttentionMetadata:
        """`config`: of what this rank holds. Tensors are on `device`."""
        query_start_loc = [0]
        positions, slots = [], []
        for start, end, table in zip(step.starts, step.ends, step.block_tables, strict=True):
            token_positions = torch.arange(start, end)
            positions.append(token_positions)
            slots.append(torch.tensor(table)[token_positions // block_size] * block_size + token_positions % block_size)
            query_start_loc.append(query_start_loc[-1] + end - start)
        paged = (step.block_tables, query_start_loc, step.ends, block_size)
        return cls(
            positions=to_device(torch.cat(positions), device),
            slot_mapping=to_device(torch.cat(slots), device),
            hidden_rows=to_device(torch.tensor(step.hidden_rows, dtype=torch.int64), device),
            attention=GPUPagedAttention(*paged, device)
            if device.type == "cuda"
            else CPUPagedAttention(*paged, config.num_heads, config.num_kv_heads),
        )
