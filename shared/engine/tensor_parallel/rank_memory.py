"""The KV cache of an engine whose ranks are processes on CPUs: one memory that all of them map, of which each computes some heads.

So a block has all its heads in one place, as in an engine of one rank, and whoever looks at blocks as a whole does so on the first rank
alone: the KV transfer (to engines of any degree, with one lease, one checksum and one commit for all ranks), copies of blocks, the host
tier. Of several ranks that hold the same head each writes it, with the same numbers.

A sum over all ranks ends each half of a layer (of nothing, where no row of the last one is wanted), so when the first rank has the result
of a step, or of a layer, all KV of it stands here;
and other ranks read what came from elsewhere only in a step that they are told of afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.tensor_parallel.sharding import Shard
from shared.errors import ConfigurationError
from shared.model_files.model_config import ModelConfig
from shared.transport.protocol.kv_layout import head_range
from shared.transport.wires.shared_segment import SharedSegment, map_inherited


@dataclass(frozen=True)
class RankMemory:
    view: memoryview
    heads: tuple[int, int]
    """(first, count) of those that this rank computes."""
    segment: SharedSegment | None = None
    """Of the first rank, who owns it: not sealed until all ranks have mapped it."""

    @classmethod
    def new(cls, config: ModelConfig, shard: Shard, size_bytes: int) -> RankMemory:
        """Raises ConfigurationError where the system has no such memory."""
        try:
            segment = SharedSegment(size_bytes, is_sealed=False)
        except OSError as error:
            raise ConfigurationError(
                f"tensor_parallel_size = {shard.size} on a CPU needs memory that processes can share (memfd): {error.strerror}; set it to 1"
            ) from error
        return cls(segment.view, _heads(config, shard), segment)

    @classmethod
    def inherited(cls, config: ModelConfig, shard: Shard, descriptor: int, size_bytes: int) -> RankMemory:
        """On another rank, by the descriptor that its process was started with."""
        return cls(map_inherited(descriptor, size_bytes), _heads(config, shard))


def _heads(config: ModelConfig, shard: Shard) -> tuple[int, int]:
    return head_range(config.num_kv_heads, shard.rank, shard.size)
