"""XXH3-64 of blocks where they lie, so that what travels from GPU to GPU is checked without a processor's core: one gives 6 GB/s."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
import xxhash

from kernels.build import Library, launch, load
from kernels.cache_ops import Rows, block_nbytes, check_block_ids, check_blocks
from kernels.op_library import LIBRARY

MIN_NBYTES = 241
"""Of a payload: shorter inputs are hashed by another rule."""
TILE_NBYTES = 1024

LIBRARY.define("block_checksums(Tensor cache, Tensor block_ids, int blocks_per_payload) -> Tensor")


def block_checksums(cache: torch.Tensor, block_ids: torch.Tensor, blocks_per_payload: int = 1) -> torch.Tensor:
    """int64 [len(block_ids) / blocks_per_payload] (the bits of an unsigned number): xxh3_64 of the blocks named, one after the other.

    cache: any tensor whose blocks (all but its first dimension) are contiguous, of a multiple of 16 bytes; several to a payload: of a
    multiple of 1024. block_ids: int64 on the cache's device; on the GPU a payload with an id outside the cache has checksum 0, on the
    CPU it raises IndexError. Raises ValueError."""
    check_blocks("cache", cache)
    size = block_nbytes(cache)
    if block_ids.dtype != torch.int64 or block_ids.dim() != 1 or not block_ids.is_contiguous() or block_ids.device != cache.device:
        raise ValueError(f"block_ids must be contiguous int64 [n] on {cache.device}, not {list(block_ids.shape)} {block_ids.dtype}")
    if blocks_per_payload < 1 or len(block_ids) % blocks_per_payload:
        raise ValueError(f"{len(block_ids)} blocks do not divide into payloads of {blocks_per_payload}")
    if not can_checksum(size, blocks_per_payload, cache.data_ptr() | cache.stride(0) * cache.element_size()):
        raise ValueError(f"blocks of {size} bytes, {blocks_per_payload} to a payload, cannot be hashed here; see can_checksum")
    sums: torch.Tensor = torch.ops.pagewire.block_checksums(cache, block_ids, blocks_per_payload)
    return sums


def can_checksum(nbytes: int, blocks_per_payload: int, alignment: int = 0) -> bool:
    """Whether blocks of this size are served. `alignment`: addresses and strides, or-ed together."""
    is_whole = blocks_per_payload == 1 or nbytes % TILE_NBYTES == 0
    return is_whole and nbytes * blocks_per_payload >= MIN_NBYTES and (nbytes | alignment) % 16 == 0


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("block_checksum.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    int64 = ctypes.c_int64
    loaded.launch_block_checksums.argtypes = [ctypes.c_void_p, int64, int64, int64, ctypes.c_void_p, ctypes.c_void_p]
    loaded.launch_block_checksums.restype = ctypes.c_char_p
    assert loaded.block_checksum_struct_bytes(0) == ctypes.sizeof(Rows), "Rows differs between Python and CUDA"
    return loaded


def _on_cuda(cache: torch.Tensor, block_ids: torch.Tensor, blocks_per_payload: int) -> torch.Tensor:
    sums = _empty(cache, block_ids, blocks_per_payload)
    arguments = (ctypes.byref(Rows.of(cache, block_ids)), len(sums), blocks_per_payload, block_nbytes(cache), sums.data_ptr())
    launch(_library().launch_block_checksums, cache.device, *arguments)
    return sums


def _on_cpu(cache: torch.Tensor, block_ids: torch.Tensor, blocks_per_payload: int) -> torch.Tensor:
    check_block_ids(block_ids, len(cache))
    payloads = block_ids.view(-1, blocks_per_payload)
    sums = np.empty(len(payloads), np.uint64)
    for index, ids in enumerate(payloads.tolist()):
        state = xxhash.xxh3_64()
        for block_id in ids:
            state.update(cache[block_id].contiguous().view(torch.uint8).numpy().data)
        sums[index] = state.intdigest()
    return torch.from_numpy(sums.view(np.int64))


def _empty(cache: torch.Tensor, block_ids: torch.Tensor, blocks_per_payload: int) -> torch.Tensor:
    return cache.new_empty(block_ids.shape[0] // blocks_per_payload, dtype=torch.int64)


LIBRARY.impl("block_checksums", _on_cuda, "CUDA")
LIBRARY.impl("block_checksums", _on_cpu, "CPU")
LIBRARY.impl("block_checksums", _empty, "Meta")
