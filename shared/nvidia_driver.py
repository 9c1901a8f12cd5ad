"""What the NVIDIA driver says of this machine: known without torch, which takes seconds to import."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

_VERSION = Path("/proc/driver/nvidia/version")
_DRIVER_LIBRARY = "libcuda.so.1"
logger = logging.getLogger(__name__)


def may_use_gpu(device: str) -> bool:
    """An engine with this setting `device` may come to run on a GPU."""
    return device.startswith("cuda") or (device.startswith("auto") and _VERSION.exists())


def gpu_index(device: str) -> int | None:
    """The N of "cuda:N" and "auto:N"; None where the setting names no GPU."""
    number = device.partition(":")[2]
    return int(number) if number else None


def count_gpus() -> int:
    """GPUs that a process started from here would see: CUDA_VISIBLE_DEVICES counts. 0 where there is no driver, or it does not work."""
    if not _VERSION.exists():
        return 0
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError as error:
        logger.warning("there is an NVIDIA driver, but its library cannot be loaded: %s", error)
        return 0
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        logger.info("the NVIDIA driver finds no GPU (CUDA error %d)", status)
        return 0
    return count.value
