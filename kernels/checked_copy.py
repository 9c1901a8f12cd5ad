"""XXH3-64 of ordinary memory, and copies that give it, in one pass: kernels/csrc/checked_copy.cpp."""

from __future__ import annotations

import ctypes
import functools
import logging

import numpy as np
import xxhash

from kernels.build import KernelBuildError, Library, load

MIN_NBYTES = 241
"""XXH3 treats shorter inputs in other ways; they are left to xxhash."""

_log = logging.getLogger(__name__)


def libraries() -> list[Library]:
    """What images build ahead of time."""
    return [Library("checked_copy.cpp")]


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


class CompiledCopies:
    """Both let go of the interpreter lock. Memory is contiguous."""

    def __init__(self) -> None:
        """Builds what was never built. Raises KernelBuildError, or OSError, where that cannot be done."""
        library = load(libraries()[0])
        self._checksum, self._copy = library.checksum, library.checked_copy
        self._checksum.argtypes, self._checksum.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
        self._copy.argtypes, self._copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64

    def checksum(self, data: memoryview) -> int:
        """XXH3-64, seed 0."""
        if data.nbytes < MIN_NBYTES:
            return xxhash.xxh3_64_intdigest(data)
        return int(self._checksum(_address(data), data.nbytes))

    def copy(self, target: memoryview, source: memoryview) -> int:
        """All of `source` over `target`, of the same size and elsewhere. Gives the checksum of what was written."""
        assert target.nbytes == source.nbytes and not target.readonly
        if source.nbytes < MIN_NBYTES:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            return xxhash.xxh3_64_intdigest(target)
        return int(self._copy(_address(target), _address(source), source.nbytes))


@functools.cache
def compiled_copies() -> CompiledCopies | None:
    """None without a compiler."""
    try:
        return CompiledCopies()
    except (KernelBuildError, OSError) as error:
        _log.warning("checksums of KV are formed by xxhash, which takes twice as long: %s", error)
        return None
