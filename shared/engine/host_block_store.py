"""The memory of the host tier (shared/cache/host_tier.py) and its copies: pinned beside a GPU, plain beside a CPU engine."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kernels import device_memory
from kernels.build import KernelError
from kernels.cache_ops import swap_blocks
from shared.available_memory import available_memory_bytes
from shared.cache.host_tier import HostBlockStore
from shared.errors import ConfigurationError

MAX_STAGED_NBYTES = 128 << 20
"""Of GPU memory, where evicted blocks wait for their way over PCIe: 2.5 ms of it (50 GB/s)."""


def new_host_block_store(cache: torch.Tensor, size_bytes: int) -> HostBlockStore:
    """For `cache`, [num_blocks, ...] with contiguous blocks, of as many slots as `size_bytes` holds. Raises ConfigurationError."""
    block_nbytes = cache[0].nbytes
    num_slots = size_bytes // block_nbytes
    if num_slots < 1:
        raise ConfigurationError(f"kv_host_cache_gib holds no block of {block_nbytes >> 10} KiB; set it higher, or 0 for none")
    available = available_memory_bytes()
    if available is not None and size_bytes > available:
        raise ConfigurationError(
            f"a host KV cache of {size_bytes >> 20} MiB does not fit into the {available >> 20} MiB that are free; "
            "set PAGEWIRE_KV_HOST_CACHE_GIB lower"
        )
    slots = np.zeros((num_slots, block_nbytes), np.uint8)  # from the system untouched: memory is taken when a slot is first used
    return _PinnedBlockStore(cache, slots) if cache.is_cuda else _PlainBlockStore(cache, slots)


def _checksum(slots: NDArray[np.uint8], slot: int) -> int:
    return int(xxhash.xxh3_64_intdigest(slots[slot]))


class _PlainBlockStore:
    """HostBlockStore beside a cache in ordinary memory."""

    def __init__(self, cache: torch.Tensor, slots: NDArray[np.uint8]) -> None:
        self.num_slots, self.block_nbytes = len(slots), slots[0].nbytes
        self._slots = slots
        self._blocks: NDArray[np.uint8] = cache.view(len(cache), -1).view(torch.uint8).numpy()

    def num_storable(self) -> int:
        return self.num_slots

    # Row by row with numpy: one copy each, and the interpreter lock is let go meanwhile.
    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            np.copyto(self._slots[slot], self._blocks[block_id])

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot, block_id in zip(slots, block_ids, strict=True):
            np.copyto(self._blocks[block_id], self._slots[slot])

    def checksum(self, slot: int) -> int:
        return _checksum(self._slots, slot)


class _PinnedBlockStore:
    """HostBlockStore beside a cache on a GPU.

    Evicted blocks are first copied within the GPU, which is what their next owner waits for, and from there to the host. All copies over
    PCIe are made on one stream, so a slot is never read before it was written, nor written before it was read.
    """

    def __init__(self, cache: torch.Tensor, slots: NDArray[np.uint8]) -> None:
        """Raises ConfigurationError where the memory cannot be pinned."""
        self.num_slots, self.block_nbytes = len(slots), slots[0].nbytes
        self._slots = slots
        try:
            device_memory.pin(slots.ctypes.data, slots.nbytes)
        except KernelError as error:
            raise ConfigurationError(
                f"{slots.nbytes >> 20} MiB of host memory cannot be pinned for kv_host_cache_gib: {error}; set it lower"
            ) from error
        weakref.finalize(self, device_memory.unpin, slots.ctypes.data).atexit = False
        self._cache = cache
        self._host = torch.from_numpy(slots).view(cache.dtype).view(self.num_slots, *cache.shape[1:])
        num_staged = max(1, min(MAX_STAGED_NBYTES // self.block_nbytes, self.num_slots))
        self._staging = torch.empty((num_staged, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
        self._free_rows = list(range(num_staged))
        self._leaving: deque[tuple[torch.cuda.Event, list[int]]] = deque()
        """Rows of the staging memory, and when they will have been copied to the host."""
        self._within_gpu = torch.cuda.Stream(cache.device, priority=-1)
        self._over_pcie = torch.cuda.Stream(cache.device)

    def num_storable(self) -> int:
        while self._leaving and self._leaving[0][0].query():
            self._free_rows += self._leaving.popleft()[1]
        return len(self._free_rows)

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        rows = [self._free_rows.pop() for _ in block_ids]
        with torch.cuda.stream(self._within_gpu):
            swap_blocks(self._cache, self._staging, _mapping(block_ids, rows))
        staged = torch.cuda.Event(blocking=True)
        staged.record(self._within_gpu)
        with torch.cuda.stream(self._over_pcie):
            self._over_pcie.wait_event(staged)
            swap_blocks(self._staging, self._host, _mapping(rows, slots))
        arrived = torch.cuda.Event()
        arrived.record(self._over_pcie)
        self._leaving.append((arrived, rows))
        staged.synchronize()

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        with torch.cuda.stream(self._over_pcie):
            swap_blocks(self._host, self._cache, _mapping(slots, block_ids))
        done = torch.cuda.Event(blocking=True)
        done.record(self._over_pcie)
        done.synchronize()

    def checksum(self, slot: int) -> int:
        self._over_pcie.synchronize()
        return _checksum(self._slots, slot)


def _mapping(sources: Sequence[int], targets: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(zip(sources, targets, strict=True)), dtype=torch.int64)
