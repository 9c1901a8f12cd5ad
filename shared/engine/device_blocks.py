"""A KV cache in the memory of an NVIDIA GPU, as the KV transfer reads and writes it.

Out: GPU -> pinned slot, which another process of the host may read; in: pinned memory -> GPU. Runs of MIN_COPY_NBYTES and more are moved by
the copy engines, which take nothing from what the GPU computes; smaller ones by one kernel that reads or writes the pinned memory itself.
The engine hands blocks over when their KV stands in memory, so nothing here waits for its stream.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xxhash

from kernels import block_checksum, cache_ops, device_memory
from kernels.build import KernelError
from shared.engine.block_runs import BlockRuns, block_runs, regions_nbytes
from shared.engine.peer_device_memory import PeerDeviceMemory
from shared.engine.staging_ring import PinnedScratch, StagingRing
from shared.transport.connector import Landed, StoredBytes
from shared.transport.protocol.region import Region
from shared.transport.protocol.segment_offer import SegmentOffer

logger = logging.getLogger(__name__)

MIN_COPY_NBYTES = 256 << 10
"""39 of 55 GB/s; runs of 64 KiB would copy at 13 (bench/kv_transfer_gpu.py)."""
CHUNK_NBYTES = 4 << 20
MAX_LOCATED = 1024
"""Regions of one notice."""


class _Lane(threading.local):
    """What each thread has to itself: a stream, an event that does not spin, and where a checksum arrives."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            # Before the model's kernels wherever a place comes free: these are short, and a peer waits for them.
            self.stream = torch.cuda.Stream(device, priority=-1)
            self.done = torch.cuda.Event(blocking=True)
            self.digests = torch.zeros(MAX_LOCATED, dtype=torch.int64).pin_memory()


@dataclass(frozen=True)
class _Adopted:
    """Memory of another process, mapped here and pinned."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LocatedBytes:
    """KV where it stands: a place in GPU memory for each region, and the xxh3_64 of their xxh3_64s (eight bytes each, little-endian), if it
    was formed. That of all bytes in a row would be a chain of scrambles from the first KiB to the last; these are formed side by side."""

    offsets: tuple[int, ...]
    checksum: int | None


class DeviceBlocks:
    """BlockMemory over `cache`: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous, on a GPU."""

    preferred_chunk_bytes = CHUNK_NBYTES
    """Blocks go together: each chunk costs a wait for the GPU."""

    def __init__(
        self, cache: torch.Tensor, *, staging_nbytes: int, max_chunk_nbytes: int, is_debug: bool = False, sums_on_gpu: bool = True
    ) -> None:
        """`staging_nbytes` of host memory are pinned when something is first to be read; KernelError is raised there if they cannot be.
        `sums_on_gpu`: see `_sum`; where another process computes on the same GPU, each of its kernels costs the two a change of context."""
        self._sums_on_gpu = sums_on_gpu
        self._cache = cache
        self._device = cache.device
        self._new_ring = partial(StagingRing, max(2, staging_nbytes // max_chunk_nbytes), max_chunk_nbytes, is_debug=is_debug)
        self._known_ring: StagingRing | None = None
        self._lock = threading.Lock()
        self._lane = _Lane(self._device)
        self._scratch = PinnedScratch()
        self._adopted: dict[int, _Adopted] = {}

    @property
    def _ring(self) -> StagingRing:
        with self._lock:
            if self._known_ring is None:
                with torch.cuda.device(self._device):
                    self._known_ring = self._new_ring()
            return self._known_ring

    @property
    def segment(self) -> SegmentOffer | None:
        return self._ring.segment

    def read(self, regions: Sequence[Region]) -> StoredBytes:
        """Raises TransferError when no staging slot comes free, IndexError for a region that is not in the cache."""
        runs = block_runs(self._cache, regions)
        ring = self._ring
        taken, offset = ring.take(sum(run.nbytes for run in runs))
        with torch.cuda.device(self._device), torch.cuda.stream(self._lane.stream):
            has_digest = self._sum(runs)
            start = offset
            for run in runs:
                self._move(run, ring.tensor[start : start + run.nbytes], is_read=True)
                start += run.nbytes
            self._wait()
        return StoredBytes(taken.data, offset if ring.segment is not None else None, self._digest() if has_digest else None)

    def write(self, regions: Sequence[Region], data: memoryview) -> Landed:
        """Gives the checksum of what landed where the GPU can form it. Raises IndexError for a region that is not in the cache, ValueError
        when `data` has another size."""
        if data.nbytes != regions_nbytes(self._cache, regions):
            raise ValueError(f"{data.nbytes} bytes for regions of {regions_nbytes(self._cache, regions)}")
        runs = block_runs(self._cache, regions)
        source = self._reachable(data)
        with torch.cuda.device(self._device), torch.cuda.stream(self._lane.stream):
            start = 0
            for run in runs:
                self._move(run, source[start : start + run.nbytes], is_read=False)
                start += run.nbytes
            has_digest = self._sum(runs)
            self._wait()
        return self._digest() if has_digest else None

    def locate(self, regions: Sequence[Region]) -> LocatedBytes:
        """Where the bytes stand in this GPU's memory, for a receiver that opened it; they are not touched. Regions are all heads and tokens
        of the same layers: others are not in one piece (ValueError)."""
        run = self._single_run(regions)
        with torch.cuda.device(self._device), torch.cuda.stream(self._lane.stream):
            has_digests = self._sum([run], is_each=True)
            self._wait()
        return LocatedBytes(tuple((run.addresses - self._cache.data_ptr()).tolist()), self._joined(len(run.ids)) if has_digests else None)

    def write_from(self, peer: PeerDeviceMemory, offsets: Sequence[int], regions: Sequence[Region]) -> Landed:
        """Like `write`, with the bytes of region i standing from offsets[i] on in a peer's GPU memory. On return it is not read any more.
        Raises TransferError when they are not within it, ValueError as `locate` does."""
        run = self._single_run(regions)
        if len(offsets) != len(run.ids):
            raise ValueError(f"{len(offsets)} offsets for {len(run.ids)} regions")
        source = peer.addresses(offsets, run.run_nbytes)
        with torch.cuda.device(self._device), torch.cuda.stream(self._lane.stream):
            device_memory.copy_pieces(run.addresses, source, run.run_nbytes, self._lane.stream)
            has_digests = self._sum([run], is_each=True)
            self._wait()
        return self._joined(len(run.ids)) if has_digests else None

    def _single_run(self, regions: Sequence[Region]) -> BlockRuns:
        runs = block_runs(self._cache, regions)
        if len(runs) != 1 or len(runs[0].ids) != len(regions):
            raise ValueError("regions copied from GPU to GPU must be all heads and tokens of the same layers of blocks")
        if len(regions) > MAX_LOCATED:
            raise ValueError(f"{len(regions)} regions at once; give {MAX_LOCATED} at most")
        return runs[0]

    def adopt(self, segment: memoryview) -> None:
        """Pins it, so that the GPU copies out of it; where that cannot be, bytes go by way of memory of our own. Undone when it
        vanishes."""
        address = _address(segment)
        if address in self._adopted:
            return
        try:
            device_memory.pin(address, segment.nbytes, is_read_only=segment.readonly)
        except KernelError as error:
            logger.warning("KV of a peer is copied once more on its way to the GPU: %s", error)
            return
        self._adopted[address] = _Adopted(address, segment.nbytes)
        weakref.finalize(segment.obj, self._disown, address).atexit = False

    def _disown(self, address: int) -> None:
        if self._adopted.pop(address, None) is not None:
            device_memory.unpin(address)

    def _reachable(self, data: memoryview) -> torch.Tensor:
        """The bytes in memory that the GPU can read."""
        address = _address(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is read-only: nobody writes to it
            tensor = torch.frombuffer(data, dtype=torch.uint8)
        for known in list(self._adopted.values()):
            if known.start <= address and address + data.nbytes <= known.start + known.nbytes:
                return tensor
        pinned = self._scratch.take(data.nbytes)
        np.copyto(pinned.numpy(), np.frombuffer(data, np.uint8))  # which lets go of the interpreter lock
        return pinned

    def _move(self, run: BlockRuns, packed: torch.Tensor, *, is_read: bool) -> None:
        """Between the cache and `packed`, pinned uint8 [run.nbytes]. Queued on the current stream."""
        if run.run_nbytes >= MIN_COPY_NBYTES:
            ends = packed.data_ptr() + np.arange(len(run.ids), dtype=np.int64) * run.run_nbytes
            to, source = (ends, run.addresses) if is_read else (run.addresses, ends)
            device_memory.copy_pieces(to, source, run.run_nbytes, self._lane.stream)
            return
        if is_read:
            cache_ops.gather_blocks(run.rows, self._ids(run), packed)
        else:
            cache_ops.scatter_blocks(packed, self._ids(run), run.rows)

    def _ids(self, run: BlockRuns) -> torch.Tensor:
        return torch.from_numpy(run.ids).pin_memory().to(self._device, non_blocking=True)

    def _sum(self, runs: list[BlockRuns], *, is_each: bool = False) -> bool:
        """Queue the checksum of the regions' bytes as they stand in the cache, one after the other or each by itself. False: they are of a
        form that the kernel does not take, or cores are to do it."""
        if len(runs) != 1 or not (self._sums_on_gpu or is_each):
            return False
        [run] = runs
        per_payload = 1 if is_each else len(run.ids)
        alignment = run.rows.data_ptr() | run.rows.stride(0) * run.rows.element_size()
        if not block_checksum.can_checksum(run.run_nbytes, per_payload, alignment):
            return False
        digests = block_checksum.block_checksums(run.rows, self._ids(run), per_payload)
        self._lane.digests[: len(digests)].copy_(digests, non_blocking=True)
        return True

    def _digest(self) -> int:
        return int(self._lane.digests[0]) & 0xFFFF_FFFF_FFFF_FFFF

    def _joined(self, count: int) -> int:
        return xxhash.xxh3_64_intdigest(self._lane.digests[:count].numpy().data)

    def _wait(self) -> None:
        self._lane.done.record(self._lane.stream)
        self._lane.done.synchronize()


def _address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data
