"""Whom the router takes for gone, by the records that it finds in Redis and the time at which it looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import zmq

from services.router.workers import POLL_INTERVAL_S, WorkerDirectory
from shared.clock import ManualClock
from shared.membership import WorkerRecord

LEASE_S = 1.5
RECORD = WorkerRecord(
    worker_id="d", role="decode", incarnation=1, rpc_endpoint="tcp://127.0.0.1:1", model_name="m", model_fingerprint="f",
    dtype="float32", block_size=16, num_blocks=8, max_model_len=64, vocab_size=64,
)  # fmt: skip
THERE, EXPIRED = ({"d"}, {"d": RECORD}), ({"d"}, {})
"""What a look finds: the ids that are listed, and the records that have not expired."""


class Looks:
    """A directory that looks when it is told to, and finds what it is told."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.clock = ManualClock()
        no_redis = cast(Any, None)
        self.directory = WorkerDirectory(no_redis, context, self.clock, "test", LEASE_S, "f", ("decode",))

    def look(self, found: tuple[set[str], dict[str, WorkerRecord]], after_s: float = POLL_INTERVAL_S) -> bool:
        """Whether the worker is known then."""
        self.clock.advance(after_s)
        self.directory._apply(*found)
        return bool(self.directory.workers)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    running: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield running
    running.destroy(linger=0)


@pytest.fixture
async def looks(context: zmq.Context[zmq.Socket[bytes]]) -> Looks:
    made = Looks(context)
    assert made.look(THERE)
    return made


async def test_worker_whose_lease_has_run_out_is_gone_at_the_next_look(looks: Looks) -> None:
    assert looks.look(THERE)
    assert not looks.look(EXPIRED)


async def test_lease_that_ran_out_while_the_router_could_not_look_says_nothing(looks: Looks) -> None:
    """The machine stood still for three seconds, and the router is the first to go on."""
    assert looks.look(EXPIRED, after_s=3.0)
    assert looks.look(EXPIRED)
    assert looks.look(THERE)
    assert looks.directory.workers[0].missing_since_s is None


async def test_worker_that_is_dead_after_all_is_gone_half_a_lease_later(looks: Looks) -> None:
    assert looks.look(EXPIRED, after_s=3.0)
    gone_s = 0.0
    while looks.look(EXPIRED):
        gone_s += POLL_INTERVAL_S
    assert LEASE_S / 4 < gone_s < LEASE_S / 2 + POLL_INTERVAL_S
