"""The system that most tests share; and the two parts of `make test`, of which the last repeats what failed in the first."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from local_stack import LocalStack

# As workers do, before torch is loaded: on cores that others use too, threads that wait for each other by spinning take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples each time, however long a busy machine takes over one.
settings.register_profile("pagewire", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pagewire")

_FAILED = "pagewire/failed_in_the_first_part"
"""In pytest's cache: None while the first part runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=["first", "last"], help="this run is a part of `make test`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("part") == "first":
        config.cache.set(_FAILED, None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own is the same whatever ran before it in its process."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    part = config.getoption("part")
    if part == "first":
        stats = terminalreporter.stats
        config.cache.set(_FAILED, [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])])
    elif part == "last":
        failed = config.cache.get(_FAILED, None)
        if failed != []:
            terminalreporter.section("failed in the first part", red=True)
            for line in failed or ["it was broken off: see its output above"]:
                terminalreporter.line(line)


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """One prefill and one decode worker with the invariants checked after every step, which with the default pool of 2900 blocks
    would take longer than the steps. No test that shares it makes a peer silent, so none is taken for dead on a machine that is busy."""
    from local_stack import LocalStack

    with LocalStack(debug="true", num_blocks=640, kv_peer_timeout_s=10) as running:
        yield running
