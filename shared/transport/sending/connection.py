"""What the sender knows of one decode worker: whether it answers, how KV goes there, and how full its lanes are."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.transport.connector import BlockMemory
from shared.transport.protocol.frames import MAX_DEVICE_NOTICE_BYTES, MAX_NOTICE_BYTES
from shared.transport.protocol.limits import LANE_GRACE_S, LANES_TIMEOUT_S
from shared.transport.protocol.transport_name import TransportName
from shared.transport.protocol.wire_plan import WirePlan


@dataclass(slots=True)
class Lane:
    num_in_flight: int = 0
    broken_s: float | None = None
    """Since when it has had no connection."""
    was_connected: bool = False
    is_out: bool = False
    """Broken for too long: what was on it went to the others."""


@dataclass(slots=True)
class Connection:
    """One decode worker, by address and incarnation."""

    key: str
    incarnation: int
    opened_s: float
    last_hello_s: float
    last_heard_s: float
    last_heartbeat_s: float = 0.0
    is_draining: bool = False
    lanes: list[Lane] = field(default_factory=list)
    lane_endpoints: tuple[str, ...] = ()
    plan: WirePlan | None = None
    """None until it has answered HELLO."""
    max_chunk_bytes: int = 0
    transport: TransportName = "tcp"

    @property
    def is_ready(self) -> bool:
        return self.plan is not None

    @property
    def agreed(self) -> WirePlan:
        assert self.plan is not None, "nothing is sent before HELLO was answered"
        return self.plan

    def preferred_chunk_bytes(self, memory: BlockMemory) -> int:
        """Up to which size blocks are put together."""
        if self.transport == "cuda":
            return MAX_DEVICE_NOTICE_BYTES
        if self.transport == "shm" and self.agreed.codec.is_plain:
            preferred = memory.preferred_notice_bytes if self.agreed.is_whole else memory.preferred_chunk_bytes
            return min(preferred, MAX_NOTICE_BYTES)
        return min(memory.preferred_chunk_bytes, self.max_chunk_bytes)

    @property
    def num_in_flight(self) -> int:
        return sum(lane.num_in_flight for lane in self.lanes)

    def live_lanes(self) -> list[int]:
        """Never empty: when all are broken, all are hoped for."""
        return [index for index, lane in enumerate(self.lanes) if not lane.is_out] or list(range(len(self.lanes)))

    def least_loaded(self) -> int:
        return min(self.live_lanes(), key=lambda index: self.lanes[index].num_in_flight)

    def is_out_of_reach(self, now: float) -> bool:
        """None of its lanes has ever been connected, and there was time enough."""
        return bool(self.lanes) and all(
            lane.broken_s is not None and not lane.was_connected and now - lane.broken_s > LANES_TIMEOUT_S for lane in self.lanes
        )

    def given_up(self, now: float) -> list[int]:
        """Lanes that have just been broken for too long, while another one lives; they are out from now on."""
        late = [
            index
            for index, lane in enumerate(self.lanes)
            if lane.broken_s is not None and not lane.is_out and now - lane.broken_s > LANE_GRACE_S
        ]
        if all(lane.broken_s is not None for lane in self.lanes):
            return []
        for index in late:
            self.lanes[index].is_out = True
        return late
