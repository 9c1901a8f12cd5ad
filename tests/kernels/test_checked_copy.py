"""Checksums and checked copies of ordinary memory are XXH3-64's, with and without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kernels import build, checked_copy
from shared.transport.checked_copies import CheckedCopies, PlainCopies

SIZES = (1, 240, 241, 255, 256, 1023, 1024, 1025, 1088, 2048, 4096 + 63, 65537, (1 << 20) + 17)


@pytest.fixture(params=["compiled", "plain"])
def copies(request: pytest.FixtureRequest) -> CheckedCopies:
    if request.param == "plain":
        return PlainCopies()
    if build.find_cxx() is None:
        pytest.skip("no C++ compiler")
    return checked_copy.CompiledCopies()


def bytes_of(nbytes: int, offset: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes + offset, np.uint8)[offset:]


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_checksum_is_that_of_xxhash(copies: CheckedCopies, nbytes: int, offset: int) -> None:
    data = bytes_of(nbytes, offset)
    assert copies.checksum(data.data) == xxhash.xxh3_64_intdigest(data)


@pytest.mark.parametrize("target_offset", [0, 8, 32, 33])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_copy_is_exact_stays_within_its_target_and_gives_the_checksum(copies: CheckedCopies, nbytes: int, target_offset: int) -> None:
    source, memory = bytes_of(nbytes, 3), np.full(nbytes + 192, 0xA5, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64 + target_offset
    assert copies.copy(memory[start : start + nbytes].data, source.data) == xxhash.xxh3_64_intdigest(source)
    assert (memory[start : start + nbytes] == source).all()
    assert (memory[:start] == 0xA5).all() and (memory[start + nbytes :] == 0xA5).all()


def test_read_only_memory_is_read_and_not_written(copies: CheckedCopies) -> None:
    data = bytes(1000)
    assert copies.checksum(memoryview(data)) == xxhash.xxh3_64_intdigest(data)
    with pytest.raises((AssertionError, ValueError)):
        copies.copy(memoryview(data), memoryview(bytes(1000)))


@pytest.mark.skipif(build.find_cxx() is None, reason="no C++ compiler")
def test_nothing_is_read_past_the_end() -> None:
    """The bytes end where the mapping does, as a segment's may; in a process of its own, for the fault would end it."""
    script = """
import mmap, sys
from kernels.checked_copy import CompiledCopies
copies = CompiledCopies()
size = 4 * mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * size)
end = mmap.mmap(-1, size)
for nbytes in (241, 1024, 1025, 4096, size):
    copies.checksum(memoryview(end)[size - nbytes :])
    copies.copy(memoryview(memory)[size - nbytes : size], memoryview(end)[size - nbytes :])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
