"""Fixtures of the tests that start the real system."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_stack import LocalStack


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """One prefill and one decode worker with default settings and the invariants checked after every step."""
    with LocalStack(debug="true") as running:
        yield running
