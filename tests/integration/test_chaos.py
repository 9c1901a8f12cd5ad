"""`pagewire chaos` as a user runs it: real processes, real faults, an exit code. A thousand faults with `make long-test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
from local_stack import ROOT


def chaos(*arguments: str, timeout_s: float = 240) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, events, stderr)."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PAGEWIRE_", "REDIS_"))}
    command = [sys.executable, "-m", "services.cli", "chaos", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def check(code: int, events: list[dict[str, Any]], stderr: str, num_faults: int) -> dict[str, Any]:
    violations = [event for event in events if event["event"] == "violation"]
    assert (code, violations) == (0, []), stderr
    done = events[-1]
    assert done["event"] == "done" and done["is_ok"] and done["num_faults"] >= num_faults
    return done


def services() -> set[int]:
    """Processes of ours, also those of a stack that other tests share."""
    return {process.pid for process in psutil.Process().children(recursive=True) if "services." in " ".join(process.cmdline())}


def test_a_dozen_real_faults_break_nothing() -> None:
    before = services()
    done = check(*chaos("--real", "12", "--seed", "2", "--prefill", "1", "--decode", "2"), num_faults=12)
    assert done["num_right"] > 3 and done["kv_mib"] > 2 and len(done["faults"]) >= 4
    assert services() <= before


def test_simulated_faults_are_counted_by_kind() -> None:
    done = check(*chaos("--simulated", "300", "--seed", "3"), num_faults=300)
    assert done["num_faults"] == sum(done["faults"].values()) and done["num_committed"] > done["num_transfers"] / 2


def test_chaos_without_a_number_says_what_to_give() -> None:
    code, events, stderr = chaos()
    assert (code, events) == (2, []) and "--simulated N" in stderr and len(stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_real_faults_break_nothing() -> None:
    check(*chaos("--real", "1000", "--seed", "1", timeout_s=3500), num_faults=1000)
