"""The shape of one KV block, the same in memory on both sides and on the wire: [layer][K|V][kv_head][token][head_dim].

So a block, or a layer range of one, is a single contiguous run of bytes and travels without a copy or a transpose.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shared.errors import ConfigurationError
from shared.transport.protocol.frames import KVDtype, LayoutCode

_Size = Annotated[int, Field(ge=1, le=0xFFFF)]


class KVLayout(BaseModel):
    """Two workers can exchange blocks when their layouts are equal field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    model_fingerprint: str = Field(max_length=256)
    dtype: KVDtype
    block_size: _Size
    num_layers: _Size
    num_kv_heads: _Size
    head_dim: _Size
    layout: LayoutCode = LayoutCode.LAYER_BLOCK_KV_HEAD_TOKEN_DIM

    @cached_property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of one block, K and V."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @cached_property
    def block_nbytes(self) -> int:
        return self.num_layers * self.layer_nbytes

    def first_difference(self, other: KVLayout) -> tuple[str, object, object] | None:
        """(field, ours, theirs) of the first field that differs, or None."""
        for field in type(self).model_fields:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return field, ours, theirs
        return None

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def valid_tokens(self, block_index: int, num_tokens: int) -> int:
        """Tokens of block `block_index` of a prompt of `num_tokens` that mean something."""
        return max(0, min(self.block_size, num_tokens - block_index * self.block_size))

    def layer_ranges(self, max_chunk_bytes: int) -> list[tuple[int, int]]:
        """(layer_start, layer_count) of the chunks of one block: one chunk when the block fits.

        Raises ConfigurationError when not even one layer fits.
        """
        per_chunk = min(self.num_layers, max_chunk_bytes // self.layer_nbytes)
        if per_chunk == 0:
            raise ConfigurationError(
                f"kv_max_chunk_bytes is {max_chunk_bytes}; one layer of a KV block has {self.layer_nbytes} bytes: raise it to at least that"
            )
        return [(start, min(per_chunk, self.num_layers - start)) for start in range(0, self.num_layers, per_chunk)]
