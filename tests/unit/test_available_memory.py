from __future__ import annotations

from pathlib import Path

from shared.available_memory import available_memory_bytes

GIB = 1 << 30


def machine(tmp_path: Path, free_gib: int) -> Path:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable:   {free_gib * GIB // 1024} kB\n")
    return meminfo


def cgroup_v2(tmp_path: Path, limit: str, used: int, cache: int) -> Path:
    directory = tmp_path / "v2"
    directory.mkdir()
    for name, value in {"memory.max": limit, "memory.current": str(used), "memory.stat": f"anon 5\ninactive_file {cache}\n"}.items():
        (directory / name).write_text(value + "\n")
    return directory


def test_machine_without_a_limit_gives_what_is_available(tmp_path: Path) -> None:
    unlimited = cgroup_v2(tmp_path, "max", 5 * GIB, 0)
    assert available_memory_bytes(machine(tmp_path, 8), unlimited, tmp_path / "none") == 8 * GIB


def test_container_limit_counts_and_cached_files_give_way(tmp_path: Path) -> None:
    limited = cgroup_v2(tmp_path, str(4 * GIB), 3 * GIB, GIB)
    assert available_memory_bytes(machine(tmp_path, 8), limited, tmp_path / "none") == 2 * GIB


def test_older_cgroups_count_too(tmp_path: Path) -> None:
    directory = tmp_path / "v1"
    directory.mkdir()
    (directory / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (directory / "memory.usage_in_bytes").write_text(str(GIB))
    assert available_memory_bytes(machine(tmp_path, 8), tmp_path / "none", directory) == GIB


def test_unknown_system_is_none(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "no", tmp_path / "no", tmp_path / "no") is None
