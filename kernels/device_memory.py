"""Memory that two devices or two processes reach: copies between pieces of any kind, pinned host memory, another process's GPU memory."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.build import KernelError, Library, check, load

HANDLE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class DeviceMemoryHandle:
    """Names GPU memory to other processes of the host (CUDA IPC)."""

    handle: bytes
    """Of the whole allocation; HANDLE_NBYTES."""
    offset: int
    """Bytes into it."""


def libraries() -> list[Library]:
    """What a server on a GPU loads."""
    return [Library("device_memory.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    loaded.launch_copy_pieces.argtypes = [pointer, pointer, int64, int64, pointer]
    loaded.export_device_memory.argtypes = [pointer, pointer, pointer]
    loaded.open_device_memory.argtypes = [ctypes.c_char_p, ctypes.c_int, pointer]
    loaded.close_device_memory.argtypes = [pointer, ctypes.c_int]
    loaded.pin_host_memory.argtypes = [pointer, int64, ctypes.c_int]
    loaded.unpin_host_memory.argtypes = [pointer]
    for name in ("launch_copy_pieces", "pin_host_memory", "unpin_host_memory", "export_device_memory", "open_device_memory",
                 "close_device_memory"):  # fmt: skip
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def copy_pieces(to: NDArray[np.int64], source: NDArray[np.int64], piece_nbytes: int, stream: torch.cuda.Stream) -> None:
    """Queue copies of `piece_nbytes` from each address of `source` to that of `to` by the copy engines, which take no multiprocessor from
    what else runs; neighbours go together. Host memory must be pinned (else the call waits). Raises KernelError."""
    if to.shape != source.shape or to.dtype != np.int64 or source.dtype != np.int64:
        raise ValueError(f"to and source must be int64 addresses, as many of one as of the other: {to.shape} and {source.shape}")
    check(_library().launch_copy_pieces(to.ctypes.data, source.ctypes.data, len(to), piece_nbytes, stream.cuda_stream))


def pin(address: int, nbytes: int, *, is_read_only: bool = False) -> None:
    """Let GPUs reach host memory of this process directly. `is_read_only`: the process itself may only read it. Raises KernelError."""
    try:
        check(_library().pin_host_memory(address, nbytes, is_read_only))
    except KernelError as error:
        raise KernelError(f"{nbytes >> 20} MiB of host memory cannot be pinned for the GPU: {error}") from None


def unpin(address: int) -> None:
    check(_library().unpin_host_memory(address))


def export_device_memory(tensor: torch.Tensor) -> DeviceMemoryHandle:
    """Raises KernelError where this memory cannot be named to others (an allocator with expandable segments, some virtual machines)."""
    handle, offset = ctypes.create_string_buffer(HANDLE_NBYTES), ctypes.c_int64()
    with torch.cuda.device(tensor.device):
        check(_library().export_device_memory(tensor.data_ptr(), handle, ctypes.byref(offset)))
    return DeviceMemoryHandle(handle.raw, offset.value)


def open_device_memory(handle: DeviceMemoryHandle, device: torch.device) -> int:
    """The address, on `device`, of memory that another process exported; close_device_memory takes it back. Raises KernelError, also for
    memory of this process and for two GPUs that do not reach each other."""
    if len(handle.handle) != HANDLE_NBYTES:
        raise KernelError(f"a handle of GPU memory has {HANDLE_NBYTES} bytes, not {len(handle.handle)}")
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        check(_library().open_device_memory(handle.handle, device.index, ctypes.byref(address)))
    assert address.value is not None
    return address.value + handle.offset


def close_device_memory(address: int, handle: DeviceMemoryHandle, device: torch.device) -> None:
    with torch.cuda.device(device):
        check(_library().close_device_memory(address - handle.offset, device.index))
