"""A KV cache that other processes of this host may read: the sending side of the shared-memory transport.

The memory is an unnamed file (memfd), so nothing is left behind by a crash and no limit of /dev/shm applies; pages are taken when they are
first used. Sealed against shrinking, growing and later writers: who maps it can neither be killed by a file cut short (SIGBUS) nor write.
Only processes of the owner's own may, which inherit the descriptor and map the memory before it is sealed (`map_inherited`).
The reader copies out of it what it has been told is complete, and checks it; so a sender, live or dead, never writes into anybody's blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path

from shared.errors import TransferError
from shared.transport.protocol.segment_offer import SegmentOffer

_NAME = "pagewire-kv"
_NONCE_NBYTES = 32
# <linux/fcntl.h>; Python has no name for the last one. With it, mappings that exist may write and later ones may not.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x0010
_F_GET_SEALS = 1034
_F_ADD_SEALS = 1033


class SharedSegment:
    """Memory of this process, zeros at first, that others may read."""

    def __init__(self, size_bytes: int, *, is_sealed: bool = True) -> None:
        """`is_sealed` False: until `seal` is called processes that inherit `offer.fd` may map it to write, and no reader trusts it.
        Raises OSError where the system has no such memory (Linux 5.1 has)."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # closed in __del__, also when what follows fails
        os.ftruncate(self._fd, size_bytes + _NONCE_NBYTES)
        self._map = mmap.mmap(self._fd, size_bytes + _NONCE_NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._map[size_bytes:] = nonce
        self.view = memoryview(self._map)[:size_bytes]
        self.offer = SegmentOffer(pid=os.getpid(), fd=self._fd, size_bytes=size_bytes, nonce=nonce.hex())
        if is_sealed:
            self.seal()

    def seal(self) -> None:
        """From now on nobody else can map it to write. Raises OSError where the system cannot see to that."""
        fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)

    def __del__(self) -> None:
        # The memory itself lives on while anything looks at it.
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._fd)


def map_inherited(descriptor: int, size_bytes: int) -> memoryview:
    """The `size_bytes` of a segment that is not sealed yet, to read and write; the descriptor is closed. Raises OSError."""
    try:
        return memoryview(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(descriptor)


class SegmentReader:
    """Another process's segment, read-only."""

    def __init__(self, offer: SegmentOffer) -> None:
        """Raises TransferError when the segment is not on this host, not ours to read, or not safe to map."""
        path = Path(f"/proc/{offer.pid}/fd/{offer.fd}")
        try:
            # Looked at before it is opened: on another host the number may be anything, even a device.
            if not os.readlink(path).startswith(f"/memfd:{_NAME}") or os.stat(path).st_uid != os.geteuid():
                raise TransferError("the segment is not on this host, or is another user's")
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(f"the segment cannot be reached from here: {error.strerror}") from error
        try:
            if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
                raise TransferError("the segment is not sealed: its owner could cut it short")
            if os.fstat(fd).st_size != offer.size_bytes + _NONCE_NBYTES:
                raise TransferError("the segment has another size than was offered")
            self._map = mmap.mmap(fd, offer.size_bytes + _NONCE_NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise TransferError(f"the segment cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        if self._map[offer.size_bytes :] != bytes.fromhex(offer.nonce):
            raise TransferError("the segment is another one than was offered")
        self._view = memoryview(self._map)[: offer.size_bytes]

    @property
    def size_bytes(self) -> int:
        return self._view.nbytes

    def read(self, start: int, size_bytes: int) -> memoryview:
        """Bytes [start, start + size_bytes). Raises TransferError when they are not all within."""
        if not (start >= 0 and 0 <= size_bytes <= self._view.nbytes - start):
            raise TransferError(f"bytes {start} to {start + size_bytes} are outside a segment of {self._view.nbytes}")
        return self._view[start : start + size_bytes]
