"""The KV cache of another process of this host, in the memory of this GPU or of one that it reaches: CUDA IPC.

As with shared memory the receiver copies out, when it has been told that bytes are complete, and checks them; so a sender, live or dead,
never writes into anybody's blocks. The driver keeps the memory until the last process that opened it lets go, so a sender that dies leaves
nothing dangling here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import device_memory
from kernels.build import KernelError
from shared.errors import TransferError
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer


def offer_of(cache: torch.Tensor) -> DeviceMemoryOffer:
    """Raises TransferError where the memory cannot be opened by others."""
    try:
        handle = device_memory.export_device_memory(cache)
    except KernelError as error:
        raise TransferError(f"the KV cache cannot be opened by other processes: {error}") from error
    return DeviceMemoryOffer(handle=handle.handle.hex(), offset=handle.offset, size_bytes=cache.nbytes)


class PeerDeviceMemory:
    """Open until nobody refers to it."""

    def __init__(self, offer: DeviceMemoryOffer, device: torch.device) -> None:
        """Raises TransferError when it is not on this host, or on a GPU that `device` does not reach."""
        handle = device_memory.DeviceMemoryHandle(bytes.fromhex(offer.handle), offer.offset)
        try:
            self._address = device_memory.open_device_memory(handle, device)
        except KernelError as error:
            raise TransferError(f"the peer's GPU memory cannot be reached from here: {error}") from error
        weakref.finalize(self, device_memory.close_device_memory, self._address, handle, device).atexit = False
        self.size_bytes = offer.size_bytes

    def addresses(self, offsets: Sequence[int], nbytes: int) -> NDArray[np.int64]:
        """Where `nbytes` bytes from each offset on stand. Raises TransferError when they are not all within."""
        starts = np.array(offsets, np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() > self.size_bytes - nbytes):
            raise TransferError(f"{nbytes} bytes from {int(starts.max())} on are outside GPU memory of {self.size_bytes}")
        return self._address + starts
