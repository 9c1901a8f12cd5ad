"""Fixtures of the tests that start the real system."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_stack import LocalStack


@pytest.fixture(scope="session")
def tight() -> Iterator[LocalStack]:
    """Chunks of 128 tokens, and pools so small that requests wait, are preempted and evict each other's cache."""
    with LocalStack(debug="true", max_num_batched_tokens=128, prefill_num_blocks=60, decode_num_blocks=40, kv_peer_timeout_s=10) as running:
        yield running
