"""The KV cache of one worker: one tensor, a block contiguous over all layers, so that a block travels as one piece of memory.

Shape [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim].
"""

from __future__ import annotations

import torch

from shared.model_config import ModelConfig


class KVCache:
    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, not empty: attention masks unused slots, and a mask does not silence a NaN.
        self.tensor = torch.zeros(
            num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim, dtype=dtype, device=device
        )
        self.block_size = block_size
        self.block_nbytes = self.tensor[0].numel() * self.tensor.element_size()
        self._bytes = memoryview(self.tensor.view(torch.uint8).flatten().numpy().data) if device.type == "cpu" else None

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value cache of one layer, each a view [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.tensor[:, index, 0], self.tensor[:, index, 1]

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block, writable, without a copy: [num_layers][K|V][kv_head][token][head_dim]."""
        assert self._bytes is not None, "blocks on a GPU are staged, not viewed"
        return self._bytes[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, itemsize: int) -> int:
        return config.num_layers * 2 * config.num_kv_heads * block_size * config.head_dim * itemsize
