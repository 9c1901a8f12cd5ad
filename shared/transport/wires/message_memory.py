"""Where received messages lie: libzmq allocates each one anew."""

from __future__ import annotations

import contextlib
import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_KEPT_NBYTES = 32 << 20
"""glibc takes no more."""
_KEPT_NBYTES = 256 << 20


@functools.cache
def keep_message_memory() -> None:
    """Of this process, from now on: freed memory is used again rather than given back to the system page by page, and with it the time that
    touching new pages takes, a third of what receiving a chunk does. Does nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_NBYTES)
