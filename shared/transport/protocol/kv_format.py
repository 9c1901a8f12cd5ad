"""In which form a worker holds KV, as far as others need to know: what its block hashes mean, and to whom it can send."""

from __future__ import annotations

from dataclasses import dataclass

from shared.block_hash import BlockHash, root_hash
from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.wire_dtype import WireCodec, WireDtypeName


@dataclass(frozen=True, slots=True)
class KVFormat:
    dtype: str
    """Of the KV cache, as KVDtype names it, in small letters."""
    block_size: int
    wire_dtype: WireDtypeName = "auto"
    num_ranks: int = 1
    """Of a tensor-parallel engine, each of which holds some of the heads."""

    def root(self, model_fingerprint: str) -> BlockHash:
        """The parent of every first block. Blocks that may have come rounded over the wire never pass for exact ones."""
        dtype = self.dtype if self.wire_dtype == "auto" else f"{self.dtype} by {self.wire_dtype}"
        return root_hash(model_fingerprint, dtype, self.block_size)

    def can_send_to(self, other: KVFormat) -> bool:
        """What HELLO will say of two workers of one model, known beforehand (see wire_plan). Ranks of an engine do not send or take KV."""
        if max(self.num_ranks, other.num_ranks) > 1:
            return False
        if self.wire_dtype != other.wire_dtype or max(self.block_size, other.block_size) % min(self.block_size, other.block_size):
            return False
        ours, theirs = _CODES.get(self.dtype), _CODES.get(other.dtype)
        return ours is not None and theirs is not None and WireCodec.between(ours, theirs, self.wire_dtype) is not None


_CODES = {code.name.lower(): code for code in KVDtype}
