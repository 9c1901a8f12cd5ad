"""Checksums of ordinary memory, and copies that give them: the transfer's cost on a CPU."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash

from shared.transport.protocol.frames import checksum

_PIECE_NBYTES = 256 << 10


class CheckedCopies(Protocol):
    """On the threads of the lanes, several at a time. Memory is contiguous."""

    def checksum(self, data: memoryview) -> int:
        """As `frames.checksum`."""
        ...

    def copy(self, target: memoryview, source: memoryview) -> int:
        """All of `source` over `target`, of the same size and elsewhere. Gives the checksum of what was written."""
        ...


class PlainCopies:
    """With no kernel of ours."""

    def checksum(self, data: memoryview) -> int:
        return checksum(data)

    def copy(self, target: memoryview, source: memoryview) -> int:
        # numpy rather than a slice assignment: it lets go of the interpreter lock while it copies.
        landed, given, digest = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8), xxhash.xxh3_64()
        for start in range(0, len(landed), _PIECE_NBYTES):  # summed while it is in the processor's cache
            piece = landed[start : start + _PIECE_NBYTES]
            np.copyto(piece, given[start : start + _PIECE_NBYTES])
            digest.update(piece.data)
        return digest.intdigest()
