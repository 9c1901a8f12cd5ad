"""A KV cache in the memory of an NVIDIA GPU, as the KV transfer reads and writes it.

Out: GPU -> pinned slot, which another process of the host may read; in: pinned memory -> GPU. Runs of MIN_COPY_NBYTES and more are moved by
the copy engines, which take nothing from what the GPU computes; smaller ones by one kernel that reads or writes the pinned memory itself.
The engine hands blocks over when their KV stands in memory, so nothing here waits for its stream. A chunk of one form costs one call.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kernels import cache_ops, device_memory
from kernels.build import KernelError
from kernels.checked_copy import compiled_copies
from kernels.piece_transfer import NOTHING, PieceTransfer, can_sum
from shared.engine.block_runs import BlockRuns, block_runs, regions_nbytes
from shared.engine.peer_device_memory import PeerDeviceMemory, offer_of
from shared.engine.staging_ring import PinnedScratch, StagingRing
from shared.errors import TransferError
from shared.transport.checked_copies import PlainCopies
from shared.transport.connector import GpuMemory, Landed, LocatedBytes, StoredBytes
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.frames import MAX_NOTICE_BYTES, MAX_UNITS_PER_CHUNK, join_checksums
from shared.transport.protocol.region import Region
from shared.transport.protocol.segment_offer import SegmentOffer

logger = logging.getLogger(__name__)

MIN_COPY_NBYTES = 256 << 10
"""39 of 55 GB/s; runs of 64 KiB would be copied at 18 (bench/kv_transfer_gpu.py)."""
PROBE_NBYTES = 64 << 20


class _Lane(threading.local):
    """What each thread has to itself."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.transfer = PieceTransfer(device, MAX_UNITS_PER_CHUNK)
            self.scratch = PinnedScratch()


@dataclass(frozen=True)
class _Adopted:
    """Memory of another process, mapped here and pinned."""

    start: int
    nbytes: int


class DeviceBlocks:
    """BlockMemory over `cache`: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous, on a GPU."""

    preferred_chunk_bytes = MAX_NOTICE_BYTES
    """Blocks go together: each chunk costs a wait for the GPU."""
    preferred_notice_bytes = MAX_NOTICE_BYTES

    def __init__(
        self, cache: torch.Tensor, *, staging_nbytes: int, max_chunk_nbytes: int, is_debug: bool = False, sums_on_gpu: bool = True
    ) -> None:
        """`staging_nbytes` of host memory are pinned when something is first to be read; KernelError is raised there if they cannot be.
        `sums_on_gpu`: False leaves checksums to cores; where another process computes on the same GPU, each kernel costs both a change
        of context."""
        self._sums_on_gpu = sums_on_gpu
        self.checksum = (compiled_copies() or PlainCopies()).checksum
        self._cache = cache
        self._device = cache.device
        self.max_chunks_held = max(2, staging_nbytes // max_chunk_nbytes)
        self._new_ring = partial(StagingRing, self.max_chunks_held, max_chunk_nbytes, is_debug=is_debug)
        self._known_ring: StagingRing | None = None
        self._lock = threading.Lock()
        self._lane = _Lane(self._device)
        self._adopted: dict[int, _Adopted] = {}

    @property
    def _ring(self) -> StagingRing:
        with self._lock:
            if self._known_ring is None:
                with torch.cuda.device(self._device):
                    self._known_ring = self._new_ring()
            return self._known_ring

    @property
    def gpu(self) -> GpuMemory | None:
        return self if self._is_exportable else None

    @functools.cached_property
    def offer(self) -> DeviceMemoryOffer:
        """Where other processes of this host open the cache. Raises TransferError where they cannot."""
        return offer_of(self._cache)

    @functools.cached_property
    def _is_exportable(self) -> bool:
        layer_nbytes = self._cache[0, 0].nbytes
        if not can_sum(layer_nbytes, 1, layer_nbytes | self._cache.data_ptr()):
            return False
        try:
            return self.offer is not None
        except TransferError as error:
            logger.info("KV is not copied from GPU to GPU: %s", error.message)
            return False

    def open(self, offer: DeviceMemoryOffer) -> tuple[object, float]:
        """Raises TransferError when it is not on this host, or on a GPU that this one does not reach."""
        peer = PeerDeviceMemory(offer, self._device)
        nbytes = min(PROBE_NBYTES, peer.size_bytes)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        to, source = np.array([target.data_ptr()], np.int64), peer.addresses([0], nbytes)
        seconds = []
        for _ in range(2):
            start_s = time.perf_counter()
            self._lane.transfer.run(to, source, nbytes)
            seconds.append(time.perf_counter() - start_s)
        return peer, nbytes / min(seconds)

    @property
    def segment(self) -> SegmentOffer | None:
        return self._ring.segment

    def read(self, regions: Sequence[Region]) -> StoredBytes:
        """Raises TransferError when no staging slot comes free, IndexError for a region that is not in the cache."""
        runs = block_runs(self._cache, regions)
        ring = self._ring
        taken, offset = ring.take(sum(run.nbytes for run in runs))
        digest = self._move(runs, len(regions), taken.ctypes.data, is_read=True)
        return StoredBytes(taken.data, offset if ring.segment is not None else None, digest)

    def read_apart(self, regions: Sequence[Region]) -> list[StoredBytes] | None:
        """Staged together."""
        return None

    def write(self, regions: Sequence[Region], data: memoryview) -> Landed:
        """Gives the checksum of what landed where the GPU can form it. Raises IndexError for a region that is not in the cache, ValueError
        when `data` has another size."""
        if data.nbytes != regions_nbytes(self._cache, regions):
            raise ValueError(f"{data.nbytes} bytes for regions of {regions_nbytes(self._cache, regions)}")
        return self._move(block_runs(self._cache, regions), len(regions), self._reachable(data), is_read=False)

    def locate(self, regions: Sequence[Region]) -> LocatedBytes:
        """Where the bytes stand in this GPU's memory, for a receiver that opened it; they are not touched. Regions are all heads and tokens
        of the same layers: others are not in one piece (ValueError)."""
        run = self._single_run(regions)
        digests = self._lane.transfer.run(summed=run.addresses, summed_nbytes=run.run_nbytes)
        return LocatedBytes(tuple((run.addresses - self._cache.data_ptr()).tolist()), join_checksums(digests.tolist()))

    def write_from(self, peer: object, offsets: Sequence[int], regions: Sequence[Region]) -> int:
        """Like `write`, with the bytes of region i standing from offsets[i] on in a peer's GPU memory; gives the checksum as `locate` does.
        On return nothing of the peer's is read any more. Raises TransferError when they are not within it, ValueError as `locate`."""
        assert isinstance(peer, PeerDeviceMemory), "not what open() gave"
        run = self._single_run(regions)
        if len(offsets) != len(run.ids):
            raise ValueError(f"{len(offsets)} offsets for {len(run.ids)} regions")
        source, to = peer.addresses(offsets, run.run_nbytes), run.addresses
        digests = self._lane.transfer.run(to, source, run.run_nbytes, to, run.run_nbytes)
        return join_checksums(digests.tolist())

    def _single_run(self, regions: Sequence[Region]) -> BlockRuns:
        runs = block_runs(self._cache, regions)
        if len(runs) != 1 or len(runs[0].ids) != len(regions):
            raise ValueError("regions copied from GPU to GPU must be all heads and tokens of the same layers of blocks")
        if len(regions) > MAX_UNITS_PER_CHUNK or not can_sum(runs[0].run_nbytes, 1, runs[0].alignment):
            limit = f"{MAX_UNITS_PER_CHUNK} at most, of multiples of 16 bytes"
            raise ValueError(f"{len(regions)} regions of {runs[0].run_nbytes} bytes; give {limit}")
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

    def _reachable(self, data: memoryview) -> int:
        """The address of the bytes in memory that the GPU can read; valid until this thread's next call."""
        address = _address(data)
        if any(known.start <= address and address + data.nbytes <= known.start + known.nbytes for known in list(self._adopted.values())):
            return address
        pinned = self._lane.scratch.take(data.nbytes)
        np.copyto(pinned.numpy(), np.frombuffer(data, np.uint8))  # which lets go of the interpreter lock
        return pinned.data_ptr()

    def _move(self, runs: list[BlockRuns], num_regions: int, address: int, *, is_read: bool) -> int | None:
        """Between the cache and pinned memory. Gives the checksum of the runs as they stand in the cache, if it can be formed."""
        transfer = self._lane.transfer
        if runs[0].run_nbytes >= MIN_COPY_NBYTES and len(runs) == 1:
            return self._run(transfer, runs[0], num_regions, address, is_read=is_read)
        # By its address: torch warns of memory that it may only read, each time.
        memory = (ctypes.c_uint8 * sum(run.nbytes for run in runs)).from_address(address)
        packed, start = torch.frombuffer(memory, dtype=torch.uint8), 0
        with torch.cuda.device(self._device), torch.cuda.stream(transfer.stream):
            for run in runs:
                part = packed[start : start + run.nbytes]
                start += run.nbytes
                ids = torch.from_numpy(run.ids).pin_memory().to(self._device, non_blocking=True)
                if is_read:
                    cache_ops.gather_blocks(run.rows, ids, part)
                else:
                    cache_ops.scatter_blocks(part, ids, run.rows)
        if len(runs) == 1:
            return self._run(transfer, runs[0], num_regions, None, is_read=is_read)
        transfer.run()
        return None

    def _run(self, transfer: PieceTransfer, run: BlockRuns, num_regions: int, packed_address: int | None, *, is_read: bool) -> int | None:
        """The copies, unless they are queued already (None), and the checksum."""
        addresses, to, source = run.addresses, NOTHING, NOTHING
        if packed_address is not None:
            ends = packed_address + np.arange(len(run.ids), dtype=np.int64) * run.run_nbytes
            to, source = (ends, addresses) if is_read else (addresses, ends)
        runs_per_region = len(run.ids) // num_regions
        if not (self._sums_on_gpu and num_regions <= MAX_UNITS_PER_CHUNK and can_sum(run.run_nbytes, runs_per_region, run.alignment)):
            transfer.run(to, source, run.run_nbytes)
            return None
        # The sums of the units are formed side by side, each by a multiprocessor.
        return join_checksums(
            transfer.run(to, source, run.run_nbytes, addresses, run.run_nbytes, runs_per_region, is_sum_beside=is_read).tolist()
        )


def _address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data
