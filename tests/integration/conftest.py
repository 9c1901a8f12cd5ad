"""Fixtures of the tests that start the real system."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_stack import LocalStack


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """One prefill and one decode worker with the invariants checked after every step, which with the default pool of 2900 blocks
    would take longer than the steps. No test that shares it makes a peer silent, so none is taken for dead on a machine that is busy."""
    with LocalStack(debug="true", num_blocks=640, kv_peer_timeout_s=10) as running:
        yield running
