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
    is_whole: bool = True
    """False: the heads of a block stand in the memories of several GPUs, out of which and into which the transfer does not go. Of how many
    ranks an engine is, its blocks do not show: they are the same but for the last digits of a sum."""

    def root(self, model_fingerprint: str) -> BlockHash:
        """The parent of every first block. Blocks that a lossy wire may have rounded never pass for exact ones. Those of a narrower
        cache stand under the root of the wider one that took them, as they are: none of the narrower format could take them back."""
        dtype = self.dtype if self.wire_dtype == "auto" else f"{self.dtype} by {self.wire_dtype}"
        return root_hash(model_fingerprint, dtype, self.block_size)

    def can_send_to(self, other: KVFormat) -> bool:
        """What HELLO will say of two workers of one model, known beforehand (see wire_plan)."""
        if not (self.is_whole and other.is_whole):
            return False
        if self.wire_dtype != other.wire_dtype or max(self.block_size, other.block_size) % min(self.block_size, other.block_size):
            return False
        ours, theirs = _CODES.get(self.dtype), _CODES.get(other.dtype)
        return ours is not None and theirs is not None and WireCodec.between(ours, theirs, self.wire_dtype) is not None


_CODES = {code.name.lower(): code for code in KVDtype}
