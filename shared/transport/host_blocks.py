"""A KV cache in this machine's ordinary memory, as the transfer reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.errors import TransferError
from shared.transport.checked_copies import CheckedCopies, PlainCopies
from shared.transport.connector import StoredBytes
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.region import Region
from shared.transport.protocol.segment_offer import SegmentOffer


class HostBlocks:
    """BlockMemory over `memory`, block after block; `segment`: where other processes of this host find the same bytes."""

    gpu = None
    preferred_chunk_bytes = 0
    """Blocks go one by one: put together they would have to be copied first."""
    preferred_notice_bytes = 8 << 20
    """Enough for the notice, and the hops between threads that it takes, to cost nothing; not so much that the two ends take turns."""
    max_chunks_held = 0

    def __init__(
        self, layout: KVLayout, memory: memoryview, segment: SegmentOffer | None = None, copies: CheckedCopies | None = None
    ) -> None:
        self.segment = segment
        self._copies = copies or PlainCopies()
        self.checksum = self._copies.checksum
        self._layout = layout
        self._bytes = memory
        num_blocks = memory.nbytes // layout.block_nbytes
        row_nbytes = layout.head_dim * layout.dtype.itemsize
        shape = (num_blocks, layout.num_layers, 2, layout.heads[1], layout.block_size, row_nbytes)
        self._array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[: num_blocks * layout.block_nbytes].reshape(shape)

    def read(self, regions: Sequence[Region]) -> StoredBytes:
        """Without a copy where a region is whole blocks' layers; a copy in order otherwise."""
        if len(regions) == 1 and self._is_contiguous(regions[0]):
            start, end = self._range(regions[0])
            return StoredBytes(self._bytes[start:end], start if self.segment is not None else None)
        parts = [self._box(region).reshape(-1) for region in regions]
        return StoredBytes((parts[0] if len(parts) == 1 else np.concatenate(parts)).data, None)

    def read_apart(self, regions: Sequence[Region]) -> list[StoredBytes] | None:
        if self.segment is None or not all(map(self._is_contiguous, regions)):
            return None
        return [self.read([region]) for region in regions]

    def write(self, regions: Sequence[Region], data: memoryview) -> int | None:
        """Gives the checksum where a region is whole blocks' layers."""
        if len(regions) == 1 and self._is_contiguous(regions[0]):
            start, end = self._range(regions[0])
            return self._copies.copy(self._bytes[start:end], data)
        source, start = np.frombuffer(data, np.uint8), 0
        for region in regions:
            box = self._box(region)
            np.copyto(box, source[start : start + box.size].reshape(box.shape))
            start += box.size
        return None

    def adopt(self, segment: memoryview) -> None:
        """Another process's memory is read like one's own."""

    def _is_contiguous(self, region: Region) -> bool:
        return (region.head_count, region.token_count) == (self._layout.heads[1], self._layout.block_size)

    def _range(self, region: Region) -> tuple[int, int]:
        if not 0 <= region.block_id < len(self._array):
            raise TransferError(f"block {region.block_id} is not one of the {len(self._array)} of this KV cache")
        start = region.block_id * self._layout.block_nbytes + region.layer_start * self._layout.layer_nbytes
        return start, start + region.layer_count * self._layout.layer_nbytes

    def _box(self, region: Region) -> NDArray[np.uint8]:
        """[layer][K|V][head][token][bytes of a row]"""
        return self._array[
            region.block_id,
            region.layer_start : region.layer_start + region.layer_count,
            :,
            region.head_start : region.head_start + region.head_count,
            region.token_start : region.token_start + region.token_count,
        ]
