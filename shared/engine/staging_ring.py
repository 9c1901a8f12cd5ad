"""Pinned memory of this process, which GPUs and other processes of the host reach: KV on its way out waits here until it was taken."""

from __future__ import annotations

import logging
import queue
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import device_memory
from shared.errors import TransferError
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.wires.shared_segment import SharedSegment

logger = logging.getLogger(__name__)

SLOT_TIMEOUT_S = 10.0
"""Slots come back when a peer has taken what is in them; a peer that takes nothing for this long has failed, whatever else it says."""
POISON = 0xEE


class StagingRing:
    """`num_slots` slots of `slot_nbytes`. A slot is given with its first bytes as an array, and is free again when nobody refers to the
    array or to a view of it any more: no path can forget it. Thread-safe."""

    def __init__(self, num_slots: int, slot_nbytes: int, *, is_debug: bool = False, timeout_s: float = SLOT_TIMEOUT_S) -> None:
        """`is_debug`: what is given back is overwritten at once, so that a checksum finds whoever still reads it. Raises KernelError where
        the memory cannot be pinned."""
        self.slot_nbytes = slot_nbytes
        self._is_debug = is_debug
        self._timeout_s = timeout_s
        self._segment = _new_segment(num_slots * slot_nbytes)
        size = num_slots * slot_nbytes
        self._bytes: NDArray[np.uint8] = np.zeros(size, np.uint8) if self._segment is None else np.frombuffer(self._segment.view, np.uint8)
        device_memory.pin(self._bytes.ctypes.data, size)
        self._unpin = weakref.finalize(self, device_memory.unpin, self._bytes.ctypes.data)
        self.tensor = torch.from_numpy(self._bytes)
        # Of the standard library's queues the one whose put() may interrupt another in the same thread, as a finalizer does.
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(num_slots):
            self._free.put(slot)

    @property
    def segment(self) -> SegmentOffer | None:
        """Where other processes find it; None where this system has no such memory."""
        return self._segment.offer if self._segment is not None else None

    @property
    def num_free(self) -> int:
        return self._free.qsize()

    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], int]:
        """(the slot's first bytes, where they start in the ring). Waits for a slot. Raises TransferError when none comes, or none is
        large enough."""
        if nbytes > self.slot_nbytes:
            raise TransferError(f"a chunk of {nbytes} bytes does not fit a slot of {self.slot_nbytes}")
        try:
            slot = self._free.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TransferError(f"no staging slot was given back within {self._timeout_s:g} s; raise kv_staging_mib") from None
        start = slot * self.slot_nbytes
        taken = self._bytes[start : start + nbytes]
        weakref.finalize(taken, self._give_back, slot).atexit = False
        return taken, start

    def _give_back(self, slot: int) -> None:
        if self._is_debug:
            self._bytes[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes] = POISON
        self._free.put(slot)


class PinnedScratch:
    """Pinned memory of one thread, for bytes that came in ordinary memory."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], valid until the next call."""
        if len(self._tensor) < nbytes:
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._tensor[:nbytes]


def _new_segment(size_bytes: int) -> SharedSegment | None:
    try:
        return SharedSegment(size_bytes)
    except OSError as error:
        logger.info("the staging memory cannot be shared with other processes: %s", error)
        return None
