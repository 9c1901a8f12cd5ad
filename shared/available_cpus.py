"""How many CPUs this process may use: those it is bound to and the container's quota, whichever is less."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def _quota(v2: Path, v1: Path) -> float | None:
    """CPUs' worth of time; None: no limit, or none that can be read."""
    try:
        quota, period = v2.read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (v1 / "cpu.cfs_quota_us").read_text(), (v1 / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None


def available_cpus(cgroup_v2: Path = _CGROUP_V2, cgroup_v1: Path = _CGROUP_V1) -> int:
    """At least 1. Part of a CPU counts as a whole one."""
    num_bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup_v2, cgroup_v1)
    return max(1, num_bound if quota is None else min(num_bound, math.ceil(quota)))
