"""The threads of the C++ kernels: one pool in a process, kernels/csrc/cpu_thread_pool.cpp, handed to each kernel as a function pointer."""

from __future__ import annotations

import ctypes
import functools

from kernels.build import Library, load


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [Library("cpu_thread_pool.cpp")]


@functools.cache
def run_on_threads() -> int:
    """Address of the function. Raises KernelBuildError or OSError where it cannot be had; then no kernel that needs it can be either."""
    address = ctypes.cast(load(libraries()[0]).cpu_run_on_threads, ctypes.c_void_p).value
    assert address is not None
    return address
