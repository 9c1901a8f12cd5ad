"""Whether this machine has an NVIDIA driver: known without torch, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_VERSION = Path("/proc/driver/nvidia/version")


def may_use_gpu(device: Literal["auto", "cpu", "cuda"]) -> bool:
    """An engine with this setting may come to run on a GPU."""
    return device == "cuda" or (device == "auto" and _VERSION.exists())
