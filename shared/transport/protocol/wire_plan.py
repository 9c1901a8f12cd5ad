"""How the KV of one prompt is cut up between one prefill and one decode worker; both ends compute it from both layouts.

The two may differ in block size (one divides the other), in tensor-parallel degree and in number format. What travels is counted in
*units* of the smaller block size, so a unit lies within one block at either end; the last unit of a prompt carries only the tokens that are
there. Of the heads, each goes exactly once to each rank that holds it: from the lowest rank of the sender that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.errors import TransferError
from shared.transport.protocol.frames import DataHeader, KVPart
from shared.transport.protocol.kv_layout import KVLayout, head_range
from shared.transport.protocol.region import Region
from shared.transport.protocol.wire_dtype import WireCodec, WireDtypeName


class IncompatibleError(TransferError):
    """Two layouts that cannot exchange KV: `field` differs."""

    def __init__(self, field: str, receiver: object, sender: object) -> None:
        super().__init__(f"incompatible peer: {field} is {receiver!r} here and {sender!r} there")
        self.field = field


def elected_heads(num_kv_heads: int, src_tp_rank: int, src_tp_size: int, dst_tp_rank: int, dst_tp_size: int) -> tuple[int, int]:
    """(first, count) of the heads that this rank of the sender has for that rank of the receiver; (0, 0): none.

    Over all ranks of a sender, every head of a receiving rank is named exactly once.
    """
    first, count = head_range(num_kv_heads, src_tp_rank, src_tp_size)
    if src_tp_rank and head_range(num_kv_heads, src_tp_rank - 1, src_tp_size) == (first, count):
        return 0, 0  # a lower rank holds the same head and sends it
    start, size = head_range(num_kv_heads, dst_tp_rank, dst_tp_size)
    low, high = max(first, start), min(first + count, start + size)
    return (low, high - low) if low < high else (0, 0)


def source_ranks(num_kv_heads: int, src_tp_size: int, dst_tp_rank: int, dst_tp_size: int) -> list[int]:
    """The ranks of a sender that have something for this rank of the receiver."""
    return [rank for rank in range(src_tp_size) if elected_heads(num_kv_heads, rank, src_tp_size, dst_tp_rank, dst_tp_size)[1]]


@dataclass(frozen=True)
class WirePlan:
    src: KVLayout
    dst: KVLayout
    codec: WireCodec
    unit_tokens: int
    head_start: int
    """Of the model."""
    head_count: int

    @classmethod
    def between(cls, src: KVLayout, dst: KVLayout, wire_dtype: WireDtypeName) -> WirePlan:
        """Raises IncompatibleError."""
        for field in ("model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "layout"):
            if getattr(src, field) != getattr(dst, field):
                raise IncompatibleError(field, getattr(dst, field), getattr(src, field))
        unit_tokens = min(src.block_size, dst.block_size)
        if max(src.block_size, dst.block_size) % unit_tokens:
            raise IncompatibleError("block_size", dst.block_size, src.block_size)
        codec = WireCodec.between(src.dtype, dst.dtype, wire_dtype)
        if codec is None:
            raise IncompatibleError("dtype", dst.dtype, src.dtype)
        start, count = elected_heads(src.num_kv_heads, src.tp_rank, src.tp_size, dst.tp_rank, dst.tp_size)
        if count == 0:
            raise IncompatibleError("tp_rank", (dst.tp_rank, dst.tp_size), (src.tp_rank, src.tp_size))
        return cls(src, dst, codec, unit_tokens, start, count)

    @property
    def is_whole(self) -> bool:
        """Blocks go as they are: of one size, with all heads, in one format."""
        src, dst = self.src, self.dst
        return (src.block_size, src.heads, src.dtype) == (dst.block_size, dst.heads, dst.dtype) and self.codec.wire is src.dtype

    def layer_nbytes(self, num_tokens: int) -> int:
        """On the wire: one layer, K and V, of a unit of `num_tokens` tokens."""
        values = self.head_count * num_tokens * self.src.head_dim
        return 2 * (values * self.codec.wire.itemsize + self.codec.scale_nbytes)

    def layers_per_chunk(self, max_chunk_bytes: int) -> int:
        """Raises TransferError when not even one layer of a unit fits."""
        per_chunk = min(self.src.num_layers, max_chunk_bytes // self.layer_nbytes(self.unit_tokens))
        if per_chunk == 0:
            raise TransferError(f"chunks of {max_chunk_bytes} bytes are too small for a layer of a KV block; raise kv_max_chunk_bytes")
        return per_chunk

    # Units

    def num_units(self, num_prompt_tokens: int) -> int:
        return -(-num_prompt_tokens // self.unit_tokens)

    def tokens_of(self, unit: int, num_prompt_tokens: int) -> int:
        """Tokens of unit `unit` that are there."""
        return max(0, min(self.unit_tokens, num_prompt_tokens - unit * self.unit_tokens))

    def units_of(self, block_index: int, block_size: int, num_prompt_tokens: int) -> range:
        """Units in block `block_index` of a chain of blocks of `block_size`, which is that of one of the two ends."""
        per_block = block_size // self.unit_tokens
        return range(block_index * per_block, min((block_index + 1) * per_block, self.num_units(num_prompt_tokens)))

    def missing_units(self, missing_blocks: Iterable[int], num_prompt_tokens: int) -> frozenset[int]:
        """Those that make up blocks of the receiver."""
        return frozenset(unit for index in missing_blocks for unit in self.units_of(index, self.dst.block_size, num_prompt_tokens))

    # Where they are

    def source_region(self, block_id: int, unit: int, num_tokens: int, layer_start: int, layer_count: int) -> Region:
        first_token = unit * self.unit_tokens % self.src.block_size
        head_start = self.head_start - self.src.heads[0]
        return Region(block_id, layer_start, layer_count, head_start, self.head_count, first_token, num_tokens)

    def target_regions(self, header: DataHeader, block_ids: Sequence[int]) -> list[Region]:
        """Of a chunk; `block_ids`: of the receiver's chain."""
        head_start = self.head_start - self.dst.heads[0]
        regions = []
        for unit in range(header.block_index, header.block_index + header.block_count):
            block_index, first_token = divmod(unit * self.unit_tokens, self.dst.block_size)
            regions.append(
                Region(
                    block_ids[block_index],
                    header.layer_start,
                    header.layer_count,
                    head_start,
                    self.head_count,
                    first_token,
                    header.block_tokens,
                )
            )
        return regions

    def describes(self, header: DataHeader) -> bool:
        """Whether the shape of a chunk is one of this plan; its indices are the grant's business."""
        return (
            (header.dtype, header.scale, header.layout) == (self.codec.wire, self.codec.scale, self.src.layout)
            and (header.head_start, header.head_count, header.head_dim) == (self.head_start, self.head_count, self.src.head_dim)
            and (header.src_tp_rank, header.src_tp_size) == (self.src.tp_rank, self.src.tp_size)
            and header.kv_part is KVPart.KV
            and header.layer_start + header.layer_count <= self.src.num_layers
        )
