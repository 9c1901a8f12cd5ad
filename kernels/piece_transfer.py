"""Copies between pieces of memory of any kind, and the XXH3-64 of what pieces of GPU memory hold, in one call without the interpreter lock.

Copies are made by the copy engines, which take no multiprocessor from what else runs. A checksum of 2 MiB keeps one multiprocessor busy for
some 50 us; a core would take 300.
"""

from __future__ import annotations

import ctypes
import functools
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.build import Library, check, load

MIN_NBYTES = 241
"""Of a payload: shorter inputs are hashed by another rule."""
TILE_NBYTES = 1024
MAX_PIECES_PER_PAYLOAD = 256
Addresses = NDArray[np.int64]
NOTHING = np.empty(0, np.int64)


class _Transfer(ctypes.Structure):
    """Mirrors `Transfer` of kernels/csrc/piece_transfer.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("to", "source", "summed", "digests")),
        *((name, ctypes.c_int64) for name in ("num_copied", "copied_bytes", "num_summed", "summed_bytes", "pieces_per_payload")),
        ("is_sum_beside", ctypes.c_int64),
    )


class _Lane(ctypes.Structure):
    """Mirrors `Lane` of kernels/csrc/piece_transfer.cu."""

    _fields_ = (
        ("device", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("sums", "summed", "done")),
    )


_PRIORITY = -1


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("piece_transfer.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    pointer = ctypes.c_void_p
    loaded.transfer_pieces.argtypes = [pointer, pointer, pointer]
    loaded.free_lane.argtypes, loaded.free_lane.restype = [pointer], None
    loaded.new_lane.argtypes = [ctypes.c_int, ctypes.c_int, pointer]
    for function in (loaded.transfer_pieces, loaded.new_lane):
        function.restype = ctypes.c_char_p
    for index, structure in enumerate((_Transfer, _Lane)):
        assert loaded.transfer_struct_bytes(index) == ctypes.sizeof(structure), f"{structure.__name__} differs between Python and CUDA"
    return loaded


def can_sum(piece_nbytes: int, pieces_per_payload: int, alignment: int = 0) -> bool:
    """Whether pieces of this size can be summed. `alignment`: their addresses or-ed together."""
    is_whole = pieces_per_payload == 1 or piece_nbytes % TILE_NBYTES == 0
    is_long = piece_nbytes * pieces_per_payload >= MIN_NBYTES
    return is_whole and is_long and pieces_per_payload <= MAX_PIECES_PER_PAYLOAD and (piece_nbytes | alignment) % 16 == 0


def _free(lane: _Lane) -> None:
    _library().free_lane(ctypes.byref(lane))


class PieceTransfer:
    """One thread's stream, and how it waits. At most `max_digests` checksums at once."""

    def __init__(self, device: torch.device, max_digests: int) -> None:
        # Before the model's kernels wherever a place comes free: these are short, and a peer waits for them.
        self.stream = torch.cuda.Stream(device, priority=_PRIORITY)
        self._digests = torch.zeros(max_digests, dtype=torch.int64).pin_memory()
        self._lane = _Lane()
        check(_library().new_lane(device.index, _PRIORITY, ctypes.byref(self._lane)))
        weakref.finalize(self, _free, self._lane).atexit = False

    def run(
        self,
        to: Addresses = NOTHING,
        source: Addresses = NOTHING,
        copied_nbytes: int = 0,
        summed: Addresses = NOTHING,
        summed_nbytes: int = 0,
        pieces_per_payload: int = 1,
        *,
        is_sum_beside: bool = False,
    ) -> NDArray[np.uint64]:
        """After what is queued on `stream`: copy `copied_nbytes` bytes from each address of `source` to that of `to`, then form the xxh3_64
        of each `pieces_per_payload` pieces of `summed`, GPU memory, one after the other (see can_sum). Returns when all is done, with the
        checksums, valid until the next call. `is_sum_beside`: the copies do not write to `summed`. Host memory must be
        pinned. Raises KernelError, ValueError."""
        if to.shape != source.shape or any(array.dtype != np.int64 or not array.flags.c_contiguous for array in (to, source, summed)):
            raise ValueError(f"addresses must be int64 arrays, as many to copy to as from: {to.shape} and {source.shape}")
        num_digests, rest = divmod(len(summed), pieces_per_payload)
        if rest or num_digests > len(self._digests):
            raise ValueError(f"{len(summed)} pieces, {pieces_per_payload} to a payload, do not make 0 to {len(self._digests)} checksums")
        if len(summed) and not can_sum(summed_nbytes, pieces_per_payload, int(np.bitwise_or.reduce(summed))):
            raise ValueError(f"pieces of {summed_nbytes} bytes, {pieces_per_payload} to a payload, cannot be summed here; see can_sum")
        transfer = _Transfer(
            to.ctypes.data, source.ctypes.data, summed.ctypes.data, self._digests.data_ptr(), len(to), copied_nbytes, len(summed),
            summed_nbytes, pieces_per_payload, is_sum_beside,
        )  # fmt: skip
        check(_library().transfer_pieces(ctypes.byref(transfer), ctypes.byref(self._lane), self.stream.cuda_stream))
        return self._digests[:num_digests].numpy().view(np.uint64)
