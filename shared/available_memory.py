"""How much memory this process may still take: the machine's free memory and the container's limit, whichever is less."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def _number(path: Path) -> int | None:
    """The number in a one-line file; None when there is no file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int | None:
    """`name 123 [kB]` in a file of such lines, unit ignored."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split()) and words[0].rstrip(":") == name), None)


def _cgroup_room(limit: int | None, used: int | None, stat: Path, cache_field: str) -> int | None:
    if limit is None or used is None:
        return None
    # Cached file pages count as used but give way.
    return max(0, limit - used + (_field(stat, cache_field) or 0))


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup_v2: Path = _CGROUP_V2, cgroup_v1: Path = _CGROUP_V1) -> int | None:
    """None when the system does not say (not Linux)."""
    free_kib = _field(meminfo, "MemAvailable")
    rooms = [
        free_kib * 1024 if free_kib is not None else None,
        _cgroup_room(_number(cgroup_v2 / "memory.max"), _number(cgroup_v2 / "memory.current"), cgroup_v2 / "memory.stat", "inactive_file"),
        _cgroup_room(
            _number(cgroup_v1 / "memory.limit_in_bytes"),
            _number(cgroup_v1 / "memory.usage_in_bytes"),
            cgroup_v1 / "memory.stat",
            "total_inactive_file",
        ),
    ]
    return min((room for room in rooms if room is not None), default=None)
