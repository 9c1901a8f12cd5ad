from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.available_cpus import available_cpus


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    return tmp_path


def available(cgroup: Path) -> int:
    return available_cpus(cgroup / "cpu.max", cgroup / "cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("max 100000", 8), ("?", 8)],
)
def test_a_quota_of_cgroup_v2_limits_the_threads(cgroup: Path, text: str, expected: int) -> None:
    (cgroup / "cpu.max").write_text(text + "\n")
    assert available(cgroup) == expected


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 8)])
def test_a_quota_of_cgroup_v1_does_too(cgroup: Path, quota: str, expected: int) -> None:
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert available(cgroup) == expected


def test_without_a_quota_it_is_what_the_process_is_bound_to(cgroup: Path) -> None:
    assert available(cgroup) == 8
