"""Memory that a GPU shares with the host and with other processes: pinned host memory, another process's GPU memory (CUDA IPC)."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

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
    loaded.export_device_memory.argtypes = [pointer, ctypes.c_int, pointer, pointer]
    loaded.open_device_memory.argtypes = [ctypes.c_char_p, ctypes.c_int, pointer]
    loaded.close_device_memory.argtypes = [pointer, ctypes.c_int]
    loaded.pin_host_memory.argtypes = [pointer, int64, ctypes.c_int]
    loaded.unpin_host_memory.argtypes = [pointer]
    for name in ("pin_host_memory", "unpin_host_memory", "export_device_memory", "open_device_memory",
                 "close_device_memory"):  # fmt: skip
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


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
        check(_library().export_device_memory(tensor.data_ptr(), tensor.device.index, handle, ctypes.byref(offset)))
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
