"""What becomes of memory that this process has freed."""

from __future__ import annotations

import contextlib
import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_KEPT_NBYTES = 32 << 20
"""glibc takes no more."""
_KEPT_NBYTES = 256 << 20


@functools.cache
def keep_freed_memory() -> None:
    """From now on it is used again rather than given back to the system page by page: pages taken anew are cleared first, which takes a
    twentieth of a prompt's time on a CPU, and a third of what receiving a chunk of KV does. Does nothing without glibc."""
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_NBYTES)
