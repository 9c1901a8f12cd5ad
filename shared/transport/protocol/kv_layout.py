"""The shape of one KV block in the memory of one worker: [layer][K|V][kv_head][token][head_dim], of the heads its rank holds.

So a block, or a layer range of one, is a single contiguous run of bytes and travels without a copy or a transpose.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import ConfigurationError
from shared.transport.protocol.frames import KVDtype, LayoutCode

_Size = Annotated[int, Field(ge=1, le=0xFFFF)]


def head_range(num_kv_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """(first, count) of the KV heads that a rank holds: an equal share; where there are more ranks than heads, several
    ranks hold the same one."""
    if tp_size <= num_kv_heads:
        count = num_kv_heads // tp_size
        return tp_rank * count, count
    return tp_rank * num_kv_heads // tp_size, 1


class KVLayout(BaseModel):
    """What a worker says of its KV cache at HELLO; which two layouts can exchange blocks, and how, says wire_plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    model_fingerprint: str = Field(max_length=256)
    dtype: KVDtype
    block_size: _Size
    num_layers: _Size
    num_kv_heads: _Size
    """Of the model, on all ranks together."""
    head_dim: _Size
    layout: LayoutCode = LayoutCode.LAYER_BLOCK_KV_HEAD_TOKEN_DIM
    tp_rank: Annotated[int, Field(ge=0, le=0xFFFF)] = 0
    tp_size: _Size = 1

    @model_validator(mode="after")
    def _check_ranks(self) -> KVLayout:
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank {self.tp_rank} is not below tp_size {self.tp_size}")
        if max(self.num_kv_heads, self.tp_size) % min(self.num_kv_heads, self.tp_size):
            raise ValueError(f"{self.num_kv_heads} KV heads cannot be shared evenly by {self.tp_size} ranks")
        return self

    @property
    def heads(self) -> tuple[int, int]:
        """(first, count) of the KV heads in this worker's memory."""
        return head_range(self.num_kv_heads, self.tp_rank, self.tp_size)

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of one block, K and V."""
        return 2 * self.heads[1] * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def block_nbytes(self) -> int:
        return self.num_layers * self.layer_nbytes

    def check_chunk(self, max_chunk_bytes: int) -> None:
        """Raises ConfigurationError when not even one layer of a block fits."""
        if self.layer_nbytes > max_chunk_bytes:
            raise ConfigurationError(
                f"kv_max_chunk_bytes is {max_chunk_bytes}; one layer of a KV block has {self.layer_nbytes} bytes: raise it to at least that"
            )

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)
